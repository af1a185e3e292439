"""The server's role on one node, where workers perform its calls themselves: it counts the workers that come and go,
and sets the state back when the run returns to a checkpoint."""

from __future__ import annotations

from collections.abc import Callable

from paceline.processes.calls.client import RolledBack, Stopped
from paceline.processes.calls.locked_server import LockedServer
from paceline.processes.memory import snapshot
from paceline.processes.memory.board import DONE, FAILED, GENERATION, RUNNING, STARTING, STOP, TRAINING, WAITING
from paceline.processes.memory.run_memory import RunMemory
from paceline.processes.roles import profiling
from paceline.runs.order_log import MemberEvent


class Caretaker:
    """The process of the only server."""

    def __init__(self, memory: RunMemory) -> None:
        self.memory, self.board = memory, memory.board
        self._profile = profiling.of_server(memory, 0)
        self._shrink = memory.plan.quorum == "shrink"
        self._server = LockedServer(memory, memory.board.server_place(0), self._wait_for)
        self._generation = memory.board.get("generation")

    def run(self) -> None:
        """Work until every worker has left."""
        board = self.board
        self._profile.start()
        first = True
        while True:
            board.server_state[0] = TRAINING
            try:
                if first or board.run[GENERATION] != self._generation:
                    self._begin()
                    first = False
                elif self._differ():
                    self._count_members()
                elif all(board.gone) or board.get("over"):
                    break
                else:
                    board.server_state[0] = WAITING
                    self.memory.wakeup.wait(self._wanted)
            except RolledBack:
                continue
            except Stopped:  # the run has failed
                self.memory.wakeup.wait(lambda: bool(all(board.gone) or board.get("over")))
                break
        self._server.close()
        self._profile.stop()
        board.server_state[0] = DONE

    def _wait_for(self, ready: Callable[[], bool], what: str) -> None:
        """Wait for the lock, as long as the run goes on."""
        board, generation = self.board, self._generation
        self.memory.wakeup.wait(lambda: ready() or board.run[STOP] == FAILED or board.run[GENERATION] != generation)
        if not ready():
            raise Stopped if board.run[STOP] == FAILED else RolledBack

    def _wanted(self) -> bool:
        board = self.board
        return bool(board.run[GENERATION] != self._generation or self._differ() or all(board.gone) or board.get("over"))

    def _differ(self) -> bool:
        return self.board.alive.tobytes() != self.board.known.tobytes()

    def _begin(self) -> None:
        """Set the state back to the checkpoint that the supervisor names, unless it is of this generation."""
        board, server = self.board, self._server
        self._generation = generation = board.get("generation")
        if board.server_generation[0] == generation:
            server.acquire(generation)
            server.stop_at_goal()  # who made the last update may have died before the stop
            server.release()
            return
        board.server_state[0] = STARTING
        saved = snapshot.find(self.memory, board.get("restore"))
        server.acquire(generation, torn=True)
        try:
            server.return_to(saved, generation)
        finally:
            server.release()
        self.memory.wakeup.ring_all()

    def _count_members(self) -> None:
        """Tell the scheme of the workers that have come or gone."""
        board, server = self.board, self._server
        server.acquire(self._generation)
        try:
            for rank in [rank for rank, one in enumerate(board.alive) if one != board.known[rank]]:
                present = bool(board.alive[rank])
                if board.run[STOP] != RUNNING:  # the end of the run is no reason to lower a quorum
                    server.leave_out(rank, present=present)
                    continue
                gone = MemberEvent.PARTED if board.parted[rank] else MemberEvent.LEFT
                event = MemberEvent.JOINED if present else gone
                # after PARTED no barrier waits for the worker, whatever the quorum
                server.member(rank, event, quorum=self._shrink or event == MemberEvent.PARTED)
        finally:
            server.release()
