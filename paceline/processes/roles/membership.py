"""How a worker takes part in a run: it joins, steps aside, returns to a checkpoint with the run, and leaves."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.processes.calls.client import CallClient, Stopped
from paceline.processes.memory import snapshot
from paceline.processes.memory.board import DONE, FAILED, RUNNING, STOP, STOPPING, fence
from paceline.processes.memory.run_memory import RunMemory
from paceline.processes.roles.checkpointing import Checkpointing
from paceline.processes.roles.recorder import RunLog
from paceline.processes.roles.waiting import StepOperations, Waiting
from paceline.processes.roles.worker_cells import WorkerCells
from paceline.processes.transport import Means
from paceline.runs.times_log import Spent
from paceline.runtime.step_driver import StepDriver


@dataclass(eq=False)
class Membership:
    """One worker's membership in the run."""

    _memory: RunMemory
    _cells: WorkerCells
    _calls: CallClient | None
    _means: Means
    _driver: StepDriver
    _operations: StepOperations
    _waiting: Waiting
    _checkpoints: Checkpointing
    _log: RunLog
    returns: int = 0  # to a checkpoint
    leaving: bool = False  # the worker is to leave after its step

    def __post_init__(self) -> None:
        self._board, self._rank = self._memory.board, self._cells.worker.rank
        self._chief = self._rank == 0
        self._others = [other for other in range(self._board.workers) if other != self._rank]
        self._follow(self._waiting.generation)

    def enter(self) -> None:
        """Begin this process's life: with cells of the run's present generation, as a worker that takes part."""
        board, rank, calls = self._board, self._rank, self._calls
        while True:
            if self._waiting.rolled_back() or board.followed[rank] != self._waiting.generation:
                self.abandon()
                try:
                    self.return_to_checkpoint(noted=False)  # the log of this life begins after it
                except Stopped:
                    if calls is None:
                        raise
                    # a chief that is restarted at the end must take part: servers save for no other worker
            if calls is not None:  # until then its calls, and the servers' position, are of the old generation
                self._memory.wakeup.wait(self._servers_are_back)
            self._cells.undo()  # what the process before had done of its step
            if not board.alive[rank]:
                self.join()
            self._cells.reload()  # the launcher may have restored the cells after this process first read them
            if calls is not None and board.run[STOP]:
                return  # it calls nothing any more: calls that servers still perform are of the process before
            if self._log.start(calls, self._means):
                return

    def join(self) -> None:
        """Take part again. Without a server, copy the cells of a worker that waits meanwhile; a worker that sends
        messages has its own, at the beginning of its step."""
        board, rank = self._board, self._rank
        if self._memory.scheme.sends_messages():
            self._log.cells()
        elif self._calls is None:
            board.joining[rank] = 1
            self._memory.wakeup.ring_all()
            self.take_over(self._donor())
            self._log.cells()
        else:
            self._wait_until_known_gone()
        board.busy[rank] += board.busy[rank] % 2
        board.alive[rank] = 1
        fence()
        board.joining[rank] = board.grant[rank] = 0  # last: the donor waits until this worker takes part
        self._memory.wakeup.ring_all()

    def _donor(self) -> int | None:
        """Wait for a worker that lets this one copy its cells; None if no other worker is alive."""
        board, rank, means, wakeup = self._board, self._rank, self._means, self._memory.wakeup

        def alone() -> bool:
            return not any(board.alive[other] for other in self._others)

        while (donor := means.invited()) is None and not alone():
            wakeup.wait(lambda: bool(board.grant[rank] or means.rung() or alone() or self._waiting.interrupted()), 0.5)
            if board.run[STOP]:
                board.joining[rank] = 0
                if not self._chief:
                    raise Stopped
                self._wait_until_others_are_gone()
        return donor

    def _wait_until_known_gone(self) -> None:
        """Wait until the servers know that the process before is gone: until then a call of it may be under way, and
        a new one would be taken for it."""
        board, rank, wakeup = self._board, self._rank, self._memory.wakeup
        wakeup.wait(lambda: bool(not board.known[rank] or board.run[STOP]))
        ordered = board.get("ordered")  # its departure is among these; a return to a checkpoint empties the order

        def performed() -> bool:
            return min(board.performed) >= min(ordered, board.get("ordered")) or bool(board.run[STOP])

        while not wakeup.wait(performed, 0.02):
            pass  # servers wake only workers that wait for a reply: look now and then

    def take_over(self, donor: int | None) -> None:
        """Copy the cells of another worker; without one, the newest cells that are whole, or the last checkpoint's."""
        board, rank, memory = self._board, self._rank, self._memory
        if donor is None:
            whole = [r for r in range(board.workers) if not board.busy[r] % 2]
            if not whole:
                saved = snapshot.find(memory, board.get("checkpoint"))
                lost = self._cells.shared.v
                snapshot.restore_worker(memory, rank, saved)
                board.put("rolled_back", board.get("rolled_back") + max(lost - self._cells.shared.v, 0))
                self._cells.reload()
                return
            donor = max(whole, key=lambda r: int(memory.tensor(f"worker.{r}.v")))
        if donor != rank:
            snapshot.take_over(memory, rank, donor)
        self._cells.reload()

    def step_aside(self) -> None:
        """Do not take part for a while: barriers do not wait for this worker."""
        self._board.alive[self._rank] = 0
        self._means.step_aside()
        self._memory.wakeup.ring_all()

    def abandon(self) -> None:
        """Abandon the step."""
        self._driver.close()
        self._operations.forget()
        self._cells.undo()
        self._board.busy[self._rank] += self._board.busy[self._rank] % 2

    def return_to_checkpoint(self, *, noted: bool = True) -> None:
        """The run has returned to a checkpoint: so does this worker, also when the run ends, or its part of the last
        checkpoint would be of the old generation. `noted`: its log says so."""
        board, memory, waiting = self._board, self._memory, self._waiting
        began = memory.now()
        self._checkpoints.forget()
        waiting.generation = -1
        while waiting.rolled_back():  # once more if another process dies meanwhile
            generation = board.get("generation")
            self._follow(generation)
            saved = snapshot.find(memory, board.get("restore"))
            if self._calls is not None:
                memory.wakeup.wait(self._servers_are_back)
            if board.run[STOP] == FAILED:
                raise Stopped
            if self._calls is not None and not waiting.rolled_back():
                self._calls.go_back(generation)
        snapshot.restore_worker(memory, self._rank, saved)
        self._cells.worker.rng.set_state(memory.tensor(f"rng.{self._rank}"))
        self._cells.reload()
        board.followed[self._rank] = generation
        if self._calls is not None and not memory.near(0):
            memory.save_overrides(saved.numbers["overrides"])  # as the first server does on its own node
        memory.load_overrides()
        self._driver.close()
        self._driver.scheme = memory.scheme
        self.returns += 1
        self._log.spent(Spent.RETURN, began)
        if noted:
            self._log.returned(generation)
        if board.run[STOP]:
            raise Stopped

    def _follow(self, generation: int) -> None:
        self._waiting.generation = self._means.generation = generation
        if self._calls is not None:
            self._calls.generation = generation

    def _servers_are_back(self) -> bool:
        board, waiting = self._board, self._waiting
        back = all(one == waiting.generation for one in board.server_generation)
        return back or waiting.rolled_back() or bool(board.run[STOP] == FAILED)

    def leave(self) -> None:
        """Leave the run."""
        board, rank = self._board, self._rank
        board.alive[rank] = 0
        board.state[rank] = DONE
        board.gone[rank] = 1
        self._memory.wakeup.ring_all()

    def wait_for_the_last(self) -> bool:
        """The chief leaves last. True: its own training ended before the others'; barriers do not wait for it then."""
        board, rank, memory = self._board, self._rank, self._memory
        early = bool(board.run[STOP] == RUNNING)
        if early:
            board.alive[rank] = 0
            memory.wakeup.ring_all()
            memory.wakeup.wait(lambda: bool(board.run[STOP]) or self._others_are_gone())
            board.alive[rank] = 1
            memory.stop(STOPPING)
        self._wait_until_others_are_gone()
        return early

    def _others_are_gone(self) -> bool:
        return all(self._board.gone[other] for other in self._others)

    def _wait_until_others_are_gone(self) -> None:
        self._memory.wakeup.wait(self._others_are_gone)
