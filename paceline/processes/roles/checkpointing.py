"""A worker's part in checkpoints: when it puts its own aside, and how the chief has all of them written."""

from __future__ import annotations

from collections.abc import Callable, Set

from paceline.errors import SchemeError
from paceline.processes.calls.mailbox import SAVE
from paceline.processes.memory import snapshot
from paceline.processes.memory.board import GENERATION
from paceline.processes.roles.hook_session import SNAPSHOTS
from paceline.processes.roles.membership import Membership
from paceline.runs import atomic_files


class Saving(Membership):
    """What a worker does between two steps for the run's sake. An exact run is saved, and ends, at one step of all."""

    _exact: bool
    _told_late: Set[int] = frozenset()  # workers whose part the last checkpoint took from the one before
    _heeded = 0  # checkpoints that the launcher has wanted, as far as this worker has heard

    def _save_if_asked(self) -> None:
        """The launcher wants a checkpoint: a server's node is about to leave."""
        asked = self.board.get("asked")
        if self.chief and asked != self._heeded and not self._writing:
            self._heeded = asked
            self.save()

    def _snapshot_due(self, wanted: int) -> bool:
        """Whether this is where this worker's part of a snapshot is to be taken."""
        at = self.board.get("snapshot_version")
        if not self._exact:
            return self._link is not None or bool(self.worker.state.v >= at)
        reached = self.worker.state.v if self._link is None else self.worker.t
        return bool(reached >= at) and wanted // SNAPSHOTS == self._generation

    def _cut(self, wanted: int) -> None:
        """An exact run's parts are all of one step: nobody sends the servers what comes after it before they have kept
        theirs, and the chief keeps what its hooks hold at the same step."""
        board = self.board
        if self.chief:
            self._wait_for(self._all_saved, "the others' parts of a checkpoint")
            if all(board.alive) and not snapshot.common(self.memory):
                raise SchemeError(
                    f"{self.memory.scheme.name} says that it can be exact, but its workers are not in step"
                )
            return
        self.memory.wakeup.ring(0)
        if self._link is not None:
            self._wait_for(lambda: board.get("cut") >= wanted, "the servers' part of a checkpoint")

    def _bring_to_rest(self) -> None:
        """The run is to end: after the next update, which nobody can have begun to pass without this worker."""
        board, last = self.board, self.updates + 1
        if not 0 <= board.get("goal") <= last:
            board.put("goal", last)
            self._announce()
        board.put("halt", 0)

    def _all_saved(self) -> bool:
        """Whether everybody's part lies aside. Where the servers hold the centre, a worker that has not come to the end
        of its step within patience is not waited for: its part is then the one of the checkpoint before."""
        if not self._late():
            return True
        patience = self.memory.plan.patience
        return self._link is not None and not self._exact and self.memory.now() - self._asked_at > patience * 1e9

    def _late(self) -> list[int]:
        board = self.board
        return [
            rank for rank in range(self.memory.plan.workers) if board.saved[rank] < self._writing and board.alive[rank]
        ]

    def _write(self) -> None:
        """Everybody's part lies aside: the servers add theirs, then it goes to disk."""
        late = self._late()
        number, self._writing = self._writing, 0
        if self._link is not None:
            self._link.special(SAVE)
            self.board.put("cut", number)
            self.memory.wakeup.ring_all()
        if self.board.run[GENERATION] == self._generation and self._begin_to_write():
            self._tell_late(late)
            path = snapshot.write(self.memory, self.task.buffer_policy, self._kept, late)
            restored = self.board.get("restore")
            if self.board.run[GENERATION] != self._generation and self.board.get("checkpoint") > restored:
                atomic_files.discard(
                    path
                )  # all have gone back to an older one meanwhile: it is of no course that counts
                self.board.put("checkpoint", restored)
            else:
                self._record_checkpoint()
            self.board.put("saving", 0)
            self.memory.wakeup.ring_all()

    def _tell_late(self, late: list[int]) -> None:
        for rank in sorted(set(late) - self._told_late):
            what = f"worker:{rank} has not finished a step for {self.memory.plan.patience:g} s"
            self.control.send({"warn": f"{what}: checkpoints hold an earlier part of it until it does"})
        self._told_late = set(late)

    def _wait_for(self, ready: Callable[[], bool], what: str) -> None:
        """Wait for others; gives up when the run ends, goes back, or nothing in it has moved for too long."""
        raise NotImplementedError
