"""A worker's cells and buffers: in shared memory, where they survive its process, and on the device that computes."""

from __future__ import annotations

from paceline.ops import MESSAGE_CELLS
from paceline.processes.memory.run_memory import RunMemory, undone
from paceline.runtime.messages import restore_rows
from paceline.sampling import mixed
from paceline.worker import Worker


class WorkerCells:
    """`worker` and `live` are what training changes: the shared memory itself, of the host or of the GPU that computes;
    where processes cannot share the GPU's memory, copies on the GPU."""

    def __init__(self, memory: RunMemory, rank: int) -> None:
        self._memory, self._board, self._rank = memory, memory.board, rank
        board, plan = memory.board, memory.plan
        self.device = memory.device(rank)
        self.shared = memory.worker_state(rank)
        state = self.shared
        if self.device.type != "cpu" and not memory.on_gpu:
            state = state.on(self.device)
        self.worker = Worker(rank, plan.workers, state, plan.seed)
        self.worker.t = board.t[rank]
        if board.begun[rank] and not plan.exact:  # restarted: not the random numbers of its first life again
            self.worker.rng.manual_seed(mixed(plan.seed, "worker", rank, "again", self.worker.t))
        elif self.worker.t or plan.exact:
            self.worker.rng.set_state(memory.tensor(f"rng.{rank}"))
        self.buffers = memory.buffers(rank)
        self.live = {name: buffer.to(self.device) for name, buffer in self.buffers.items()}
        self._cells = [state.cell(name) for name in state]
        names = undone(memory.scheme, self.shared)
        self._undo = [(name, self.shared.cell(name), memory.tensor(f"undo.{rank}.{name}")) for name in names]
        self._undo_step = memory.tensor(f"undo_step.{rank}").numpy() if names else None  # 1 + the step of the copies
        self._counted = (0, 0)
        self._writes: list[int] | None = None  # write counters of the cells when the step began
        self.count()

    @property
    def updates(self) -> int:
        """Changes of the centre so far, as schedules of this worker count them."""
        # without a server each worker holds the centre: by another's count, schedules would differ among workers
        if not self._memory.scheme.methods and self._board.alive[self._rank]:
            return int(self.worker.state.v)
        if self._memory.plan.exact:  # each step is one update; whether the server has made it yet is chance
            return self.worker.t
        return self._memory.updates

    def reload(self) -> None:
        """Take over what shared memory holds: another process, or a checkpoint, has changed it."""
        self._writes = None
        self.worker.t = self._board.t[self._rank]
        self.count()
        if self.worker.state is not self.shared:
            self.worker.state.restore(self.shared.saved())
            for name, buffer in self.buffers.items():
                self.live[name].copy_(buffer)

    def mirror(self) -> None:
        """Copy the cells of a finished step from the device to shared memory, where they survive the process."""
        if self.worker.state is not self.shared:
            segment, rank = self._memory.segment, self._rank
            for name in self.shared:
                if self.shared.cell(name).dim():
                    place = self._memory.layout.places[f"worker.{rank}.{name}"]
                    segment.pin(place.offset, place.nbytes)
                    self.shared.cell(name).copy_(self.worker.state.cell(name))
            for name, buffer in self.live.items():
                self.buffers[name].copy_(buffer)

    def count(self) -> None:
        """Count the gradients so far: those of a step that is never finished do not count, and are computed again."""
        self._counted = self._board.gradients[self._rank], self._board.samples[self._rank]

    def uncount(self) -> None:
        """Take the gradients of an unfinished step off the count."""
        self._board.gradients[self._rank], self._board.samples[self._rank] = self._counted

    def begin_step(self) -> None:
        """Note how often each cell has been written, for `untouched`; keep what `undo` sets back."""
        self._writes = self._write_counts()
        if self._undo_step is not None:
            self._undo_step[0] = 0  # the copies are not whole
            for _, cell, copy in self._undo:
                copy.copy_(cell)
            self._undo_step[0] = 1 + self._board.t[self._rank]

    def undo(self) -> None:
        """Set the cells back if a step was not finished, in which the worker may have sent or taken messages."""
        if self._undo_step is None or self._undo_step[0] != 1 + self._board.t[self._rank]:
            return
        for name, cell, copy in self._undo:
            if name in MESSAGE_CELLS[2:]:
                restore_rows(cell.numpy(), copy.numpy())
            else:
                cell.copy_(copy)
        self._writes = None

    def end_step(self) -> None:
        """The step is finished: its gradients count, and its cells survive the process."""
        self._writes = None
        board, rank = self._board, self._rank
        self._counted = board.gradients[rank], board.samples[rank]
        if self.worker.state is not self.shared:
            self.mirror()

    def untouched(self) -> bool:
        """Whether the cells are those of a finished step."""
        return self._writes is None or self._write_counts() == self._writes

    def _write_counts(self) -> list[int]:
        return [cell._version for cell in self._cells]
