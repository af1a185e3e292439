"""Where a worker finds the others: the launcher's store, its own life, and the word that the store has changed."""

from __future__ import annotations

from functools import partial

from paceline.network.secure import tls
from paceline.network.secure.store_client import StoreClient
from paceline.processes.memory.run_memory import RunMemory


class Rendezvous:
    """One worker's. A life lasts as long as its process, or until it steps aside."""

    def __init__(self, memory: RunMemory, rank: int) -> None:
        self._memory, self._rank, self._board = memory, rank, memory.board
        self.wake = partial(memory.wakeup.ring, rank)  # this worker, from a thread
        self.store = self._new_store()
        self._spare: list[StoreClient] = []  # for threads that wait for something in the store
        self._board.life[rank] += 1
        self.life: int = self._board.life[rank]

    def new_life(self) -> None:
        """For the others this worker's life has ended: from now on it has another one."""
        self._board.lost[self._rank], self.life = self.life, self.life + 1
        self._board.life[self._rank] = self.life

    def changes(self) -> int:
        """How often workers have said that the store has changed."""
        return sum(self._board.called)

    def ring(self) -> None:
        """The store has changed: tell all."""
        self._board.called[self._rank] += 1
        self._memory.wakeup.ring_all()

    def borrow(self) -> StoreClient:
        """A connection to the store of the caller's own; `give_back` it, or close it."""
        return self._spare.pop() if self._spare else self._new_store()

    def give_back(self, store: StoreClient) -> None:
        self._spare.append(store)

    def _new_store(self) -> StoreClient:
        node = self._memory.node
        assert node.store is not None, "a launcher that wants means across processes gives them a store"
        return StoreClient(*node.store, patience=self._memory.plan.patience, tls=tls.client_side(node))
