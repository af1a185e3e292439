"""A worker's part in checkpoints: when it copies its cells, and how the chief writes the parts of all processes.

The chief numbers a snapshot; every worker copies its part between two steps; the servers copy theirs last; the chief
writes all parts to disk. A checkpoint of an exact run, and the run's end, are at one step of all workers.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field

from torch import Tensor

from paceline.errors import SchemeError
from paceline.processes.calls.client import CallClient
from paceline.processes.calls.mailbox import SAVE
from paceline.processes.memory import snapshot
from paceline.processes.memory.board import ASKED, FAILED, RUNNING, SNAPSHOT, STOP, fence
from paceline.processes.memory.run_memory import RunMemory
from paceline.processes.roles.control_channel import Control
from paceline.processes.roles.recorder import RunLog
from paceline.processes.roles.waiting import Waiting
from paceline.processes.roles.worker_cells import WorkerCells
from paceline.runs import atomic_files
from paceline.runs.times_log import Spent

SNAPSHOTS = 1 << 20  # snapshots of one generation: their numbers begin at generation * SNAPSHOTS
RELEASED_AFTER = 10 * 10**9  # ns between two checkpoints from which on the copies' memory is not kept for the next
FINAL = 1 << 40  # the number of the last snapshot,
LEFT = FINAL - 1  # and of the part of a worker that has left before it
FAR = 5.0  # seconds that the chief waits at the end for parts of workers of other nodes


@dataclass(eq=False)
class Checkpointing:
    """One worker's side of the run's checkpoints. `hook_tensors` are in every checkpoint that it writes."""

    _memory: RunMemory
    _buffer_policy: str
    _cells: WorkerCells
    _calls: CallClient | None
    _waiting: Waiting
    _log: RunLog
    _control: Control
    hook_tensors: dict[str, Tensor] = field(default_factory=dict)
    _writing: int = 0  # number of the snapshot that the chief has asked for and not yet written
    _asked_at: int = 0  # when it did, ns
    _requests: int = 0  # checkpoints that the supervisor had asked for when this worker last looked
    _leaving: tuple[int, snapshot.KeptPart] | None = None  # the number and the part of a snapshot that is being copied
    _reported_late: Set[int] = frozenset()  # workers whose part is the one of an earlier checkpoint

    def __post_init__(self) -> None:
        self._board, self._exact, self._worker = self._memory.board, self._memory.plan.exact, self._cells.worker
        self._rank, self._chief = self._worker.rank, self._worker.rank == 0
        if self._chief:
            self._board.put("saving", 0)  # the process before may have died while it wrote

    def ask(self) -> None:
        """Ask all workers for their parts of a checkpoint; only the chief can."""
        if not self._chief or self._writing:
            return
        board = self._board
        self._asked_at = self._memory.now()
        margin = 2
        while True:
            # a snapshot of before a return to a checkpoint must not be taken for a new one
            self._writing = max(board.get("snapshot"), self._waiting.generation * SNAPSHOTS) + 1
            # with `exact` or without a server, all parts are of this step: no worker can be two steps ahead of this
            # one, except where workers meet in pairs
            version = max(self._reached(), *self.ahead()) + margin
            board.put("snapshot_version", version)
            board.put("snapshot", self._writing)
            if self._calls is None or self._exact:
                self.announce()
            if not self.overtaken(version):
                return
            margin *= 2

    def announce(self) -> None:
        """Wait until every node has the board: no worker may pass a step that was named for all without knowing."""
        memory, board = self._memory, self._board
        if memory.node.secret is None:
            return
        number = board.get("notice") + 1
        board.put("notice", number)
        memory.wakeup.ring_all()

        def heard() -> bool:
            ranks, shards = range(board.workers), range(board.servers)
            workers = all(memory.beside(r) or board.noticed[r] >= number or not board.alive[r] for r in ranks)
            return workers and all(memory.near(shard) or board.server_noticed[shard] >= number for shard in shards)

        memory.wakeup.wait(lambda: heard() or self._waiting.interrupted())

    def overtaken(self, version: int) -> bool:
        """In a decentralised run: whether a worker has come to a version before it could know that this was named for
        all. A worker whose count is lower has the board now: it cannot pass without knowing."""
        memory = self._memory
        if not memory.scheme.decentralised or self._waiting.interrupted():
            return False
        fence()
        return any(v >= version and memory.board.alive[rank] for rank, v in enumerate(memory.versions()))

    def between_steps(self) -> None:
        """Copy this worker's part if a checkpoint wants it at this step. The chief writes once all parts are copied."""
        board, run = self._board, self._board.run
        if self._chief and run[ASKED] != self._requests and not self._writing:  # a server's node is about to leave
            self._requests = run[ASKED]
            self.ask()
        wanted = run[SNAPSHOT]
        if self._leaving is not None:
            self._note_departure()
        elif wanted > board.saved[self._rank] and self._due(wanted):
            began = self._memory.now()
            self.keep(wanted, at_once=self._exact)
            if self._exact:
                self._meet(wanted)
            self._log.spent(Spent.CHECKPOINT, began)
        # in this order: a worker that has left because of a stop is not waited for, and its part is an old one
        if self._writing and self._all_saved() and not self._board.run[STOP]:
            began = self._memory.now()
            self._write()
            self._log.spent(Spent.CHECKPOINT, began)

    def keep(self, number: int, *, at_once: bool = True) -> None:
        """Copy this worker's part of a snapshot. Unless `at_once`, a part that has to leave a GPU does so during the
        next steps."""
        self._cells.mirror()
        if self._leaving is not None:
            self._leaving[1].finish()
        part = snapshot.start_keeping_worker(self._memory, self._rank, self._worker._rng)
        self._leaving = number, part
        if at_once:
            part.finish()
        self._note_departure()

    def _note_departure(self) -> None:
        """Tell the chief of this worker's part, once it is copied."""
        if self._leaving is not None and self._leaving[1].done():
            self._board.saved[self._rank], self._leaving = self._leaving[0], None

    def forget(self) -> None:
        """The run has returned to a checkpoint: the one that was asked for is void."""
        self._writing = 0
        if self._leaving is not None:
            self._leaving[1].finish()
            self._leaving = None

    def _due(self, wanted: int) -> bool:
        """Whether this worker's part of a snapshot is to be taken at this step."""
        if self._calls is not None and not self._exact:
            return True
        current = not self._exact or wanted // SNAPSHOTS == self._waiting.generation
        return current and self._reached() >= self._board.get("snapshot_version")

    def _reached(self) -> int:
        """The version of this worker's cells; with servers, its step."""
        return int(self._worker.state.v) if self._calls is None else self._worker.t

    def ahead(self) -> list[int]:
        """In a decentralised run, where a worker may be many steps ahead: the updates of all."""
        return [0, *self._memory.versions()] if self._memory.scheme.decentralised else [0]

    def _meet(self, wanted: int) -> None:
        """All parts of an exact run are of one step: no worker sends the servers what comes after it before they have
        copied theirs, and the chief keeps its hooks' tensors at the same step."""
        board, wait_for = self._board, self._waiting.wait_for
        if self._chief:
            wait_for(self._all_saved, "the others' parts of a checkpoint")
            if all(board.alive) and not snapshot.common(self._memory):
                name = self._memory.scheme.name
                raise SchemeError(f"{name} says that it can be exact, but its workers are not in step")
            return
        self._memory.wakeup.ring(0)
        if self._calls is not None:
            wait_for(lambda: board.get("cut") >= wanted, "the servers' part of a checkpoint")

    def _all_saved(self) -> bool:
        """Whether every worker's part is there. Where servers hold the centre, a worker that has not finished its step
        within patience is not waited for: its part is then the one of the checkpoint before."""
        if not self._late():
            return True
        patience = self._memory.plan.patience
        return self._calls is not None and not self._exact and self._memory.now() - self._asked_at > patience * 1e9

    def _late(self) -> list[int]:
        saved, comes = self._board.saved, self._memory.comes_to
        return [rank for rank in range(self._memory.plan.workers) if saved[rank] < self._writing and comes(rank)]

    def _write(self) -> None:
        """All workers' parts are there: the servers add theirs, then all go to disk."""
        board, waiting = self._board, self._waiting
        late = self._late()
        number, self._writing = self._writing, 0
        if self._calls is not None:
            self._calls.special(SAVE)
            board.put("cut", number)
            self._memory.wakeup.ring_all()
        if waiting.rolled_back() or not self._hold_parts():
            return
        self._warn_of(late)
        before = board.get("written")
        path = snapshot.write(self._memory, self._buffer_policy, self.hook_tensors, late)
        restored = board.get("restore")
        if waiting.rolled_back() and board.get("checkpoint") > restored:
            atomic_files.discard(path)  # the run has returned to an older one meanwhile
            board.put("checkpoint", restored)
        else:
            self._log.checkpoint()
            if self._memory.now() - before > RELEASED_AFTER:
                present = [rank for rank in range(board.workers) if board.alive[rank] and rank not in late]
                snapshot.release(self._memory, present)
        board.put("saving", 0)
        self._memory.wakeup.ring_all()

    def _hold_parts(self) -> bool:
        """Keep workers from changing their parts. False if one is about to end, and puts its last part there."""
        board = self._board
        board.put("saving", 1)
        fence()
        ending = any(n == FINAL or (n == LEFT and board.alive[rank]) for rank, n in enumerate(board.saved))
        if ending:
            board.put("saving", 0)
        return not ending

    def _warn_of(self, late: list[int]) -> None:
        for rank in sorted(set(late) - self._reported_late):
            what = f"worker:{rank} has not finished a step for {self._memory.plan.patience:g} s"
            self._control.send({"warn": f"{what}: checkpoints hold an earlier part of it until it does"})
        self._reported_late = set(late)

    # the last checkpoint

    def keep_last(self) -> None:
        """Copy this worker's part of the last checkpoint. Without a server it must be of the step that all have
        ended with: a worker that was stopped inside a step says so, and one that does not take part has none."""
        board, left = self._board, self._board.run[STOP] == RUNNING
        if self._calls is not None or self._memory.plan.script:  # a script's steps are its own
            self._keep_undisturbed(FINAL)
        elif not board.alive[self._rank]:
            board.saved[self._rank] = 0
        elif self._cells.untouched():
            self._keep_undisturbed(LEFT if left and not self._chief else FINAL)
        elif not left:
            board.put("midway", 1)

    def _keep_undisturbed(self, number: int) -> None:
        """Copy this worker's last part, but not while the chief writes the checkpoint before."""
        board = self._board
        # from another node the part is sent once its number is there, so the number must not come first
        if not self._chief and self._memory.beside(0):
            board.saved[self._rank] = number  # first: from now on the chief does not begin to write
            fence()
            while not self._memory.wakeup.wait(lambda: bool(not board.get("saving") or not board.alive[0]), 0.05):
                pass
        self.keep(number)

    def keep_servers(self) -> None:
        """The servers' part of the last checkpoint. If one of them dies while it is taken, all return once more."""
        calls, board = self._calls, self._board
        while calls is not None and board.run[STOP] != FAILED and not self._kept_by(calls):
            calls.forget()

    def _kept_by(self, calls: CallClient) -> bool:
        """Whether the servers have copied their part; False if the run has returned to a checkpoint."""
        board, memory, waiting = self._board, self._memory, self._waiting
        if waiting.rolled_back():
            waiting.generation = calls.generation = generation = board.get("generation")
            memory.wakeup.wait(lambda: all(one == generation for one in board.server_generation))
            calls.go_back(generation)
        self._restore_absent()
        mailbox = calls.ask(SAVE)
        memory.wakeup.wait(lambda: calls.ready(mailbox) or waiting.rolled_back() or board.run[STOP] == FAILED)
        return not waiting.rolled_back()

    def _restore_absent(self) -> None:
        """Restore the parts of workers that have gone: they do not return to a checkpoint themselves."""
        board, memory, generation = self._board, self._memory, self._waiting.generation
        absent = [rank for rank in range(board.workers) if board.followed[rank] != generation]
        saved = snapshot.find(memory, board.get("restore")) if absent else None
        for rank in absent:
            assert saved is not None
            snapshot.restore_worker(memory, rank, saved)
            snapshot.keep_worker(memory, rank, None)
            board.followed[rank] = generation

    def complete(self) -> bool:
        """Without a server: whether all parts of the last checkpoint are of one step."""
        memory = self._memory
        if memory.scheme.decentralised and memory.node.secret is not None:
            self._await_far_parts()
        return self._calls is not None or bool(memory.plan.script) or snapshot.evened(memory, FINAL, LEFT)

    def _await_far_parts(self) -> None:
        """The word that a worker of another node has left may arrive before its last part, which is in the mean."""
        board, memory = self._board, self._memory
        far = [r for r in range(board.workers) if not memory.beside(r) and board.lost[r] < board.life[r]]
        until = memory.now() + int(FAR * 1e9)
        while any(board.saved[r] < LEFT for r in far) and board.run[STOP] != FAILED and memory.now() < until:
            memory.wakeup.wait(lambda: all(board.saved[r] >= LEFT for r in far), 0.02)

    def write_last(self) -> None:
        """All parts are there: write the last checkpoint."""
        snapshot.write(self._memory, self._buffer_policy, self.hook_tensors)
        self._log.checkpoint()
        if self._exact and not snapshot.common(self._memory):
            self._control.send({"warn": "the run was aborted between two steps: its last checkpoint is not exact"})
