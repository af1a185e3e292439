"""Means over the workers of one machine: all vectors are in shared memory, of the host or of GPUs.

The lowest living member of a group decides which members take part, and writes them to its row of the board. A row
counts only while it is marked valid, so a decision is complete or absent. If the same members take part in the next
mean, the mark is raised by one, and the row stays. Vectors are always added in the order of the
ranks: the bits are the simulator's. A mean has one barrier or two: of few or small vectors each member adds up all; of
others each member reduces a slice, and copies the sum when all slices are done. If a member dies before its slice is
done, the lowest living member reduces it: all vectors are still in memory.

Members spin or sleep at a barrier. Only what they sleep for wakes them: the last arrival wakes the member that decides,
the decision and the last slice wake the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from paceline.errors import SchemeError
from paceline.ops import Group, Mean, Meet, Met
from paceline.processes.means.decisions import Decisions, Readers
from paceline.processes.means.mean_form import MeanForm, SharedMean
from paceline.processes.means.vector_sums import BLOCK, VectorSum
from paceline.processes.memory.board import fence
from paceline.processes.memory.packed_words import meeting_key
from paceline.processes.memory.run_memory import RunMemory
from paceline.processes.transport import PARTS_OF_A_MEAN, WaitFor
from paceline.runs.order_log import OrderLogWriter, RecordKind
from paceline.state import Vector

KEPT = 64  # forms of a worker, sums of a form


Empty = Callable[[int, torch.dtype], Vector]  # a vector of some length, not filled


def new_vector(length: int, dtype: torch.dtype) -> Vector:
    return torch.empty(length, dtype=dtype)


class SharedMeans:
    """One worker's side of all means. `paceline.processes.transport.Means` says what each method means."""

    def __init__(self, memory: RunMemory, rank: int, wait_for: WaitFor, empty: Empty = new_vector) -> None:
        """`empty`: gives memory for a result."""
        self.memory, self.rank, self._wait_for, self._empty = memory, rank, wait_for, empty
        self._board = board = memory.board
        self._wakeup = memory.wakeup
        self._workers = memory.plan.workers
        self.decisions = Decisions(memory, rank)
        self._nobody = bytes(board.joining.nbytes)
        self._slot = memory.layout.places[f"slot.{rank}"]
        self._sums = [memory.layout.places[f"sum.{r}"].offset for r in range(self._workers)]
        self._on_gpu = memory.segment.gpus is not None
        grads = [memory.layout.places[f"grad.{rank}.{k}"].offset for k in range(2)]
        self._lent: dict[int, Readers | None] = dict.fromkeys(grads)  # place -> its possible readers
        self._grads = frozenset(grads)
        self._readers: list[Readers | None] = [None, None]  # of the words of this worker's last two means
        self._form: MeanForm | None = None  # of the last mean
        self._forms: dict[tuple[type, Group | None, int, torch.dtype], MeanForm] = {}
        self._told: tuple[MeanForm, int] | None = None  # form and key that this worker's words on the board are of
        self._open: SharedMean | None = None
        # number and members of the last mean of all workers, if a GPU may still work on it: others need not know before
        # they come to the next one, where this worker has waited for its GPU
        self._late: tuple[int, tuple[int, ...]] | None = None
        self._of_all = True  # no mean of a group and no meeting so far: those need not wait for workers of other groups
        self.generation = 0

    @property
    def journal(self) -> OrderLogWriter | None:
        return self.decisions.journal

    @journal.setter
    def journal(self, journal: OrderLogWriter | None) -> None:
        self.decisions.journal = journal

    def mean(self, op: Mean | Meet, *, first: bool) -> Any:
        return self.leave(self.arrive(op, first=first))

    def arrive(self, op: Mean | Meet, *, first: bool) -> SharedMean:
        board, rank, form = self._board, self.rank, self._form
        if self._open is not None:
            raise SchemeError(f"worker:{rank} started a mean while its last one is open")
        if form is None or not form.fits(op, self.generation):
            form = self._form = self._form_of(op)
        number = board.at_seq[rank] + 1
        half = number % 2
        if self._readers[half] is not None and not self._words_read(half):
            self._wait_for_readers(half)  # groups overlap: a member reads the mean before the last
        place = self._place(op.v, form, half)
        if self.journal is not None:
            self.journal.add(RecordKind.MEAN if form.kind is Mean else RecordKind.MEET, number)
            self.journal.flush()
        if self._on_gpu:
            self.memory.synchronize()
            self._finish_late()
        board.vector[half][rank], board.weight[half][rank] = place, op.weight if isinstance(op, Mean) else op.number
        key = form.key if isinstance(op, Mean) else meeting_key(form.members, op.t, self.generation)
        if self._told != (form, key):
            # before the key: the process before may have died inside a mean, which would count as this one's arrival
            board.reduced[rank] = board.finished[rank] = number - 1
            board.at_key[rank], board.at_shape[rank] = key, form.shape
            self._told = form, key
        board.first_await[rank] = first
        board.at_seq[rank] = number
        self._open = meeting = SharedMean(op, form, key, number, place)
        fence()
        if form.position or form.kind is Meet:
            self.decisions.wake_decider(meeting)
        return meeting

    def _form_of(self, op: Mean | Meet) -> MeanForm:
        name = type(op), op.among, op.v.numel(), op.v.dtype
        form = self._forms.get(name)
        if form is None or form.generation != self.generation:
            if len(self._forms) >= KEPT:
                self._forms.clear()
            self._of_all = self._of_all and op.among is None and type(op) is Mean
            form = self._forms[name] = MeanForm(op, self._workers, self.rank, self.generation, on_gpu=self._on_gpu)
        return form

    def _place(self, v: Vector, form: MeanForm, half: int) -> int:
        """The offset at which the others read v: its own, if v does not change until they have; else that of a slot."""
        segment = self.memory.segment
        place = segment.offset(v)  # None: it is elsewhere, or not contiguous
        if place is not None and (place in self._grads or not form.whole):
            return place  # after a single barrier others may still read: only gradients, which are lent until then
        room = self._slot.shape[0] // 2
        if form.size > room:
            raise SchemeError(f"a mean of {form.count} numbers is too large for the shared memory laid out for it")
        place = self._slot.offset + half * room
        segment.tensor(place, v.dtype, v.shape).copy_(v)
        return place

    def returned(self, place: int) -> bool:
        readers = self._lent.get(place)
        if readers is not None:
            self._lent[place] = readers = self.decisions.still_reading(readers)
        return readers is None

    def _words_read(self, half: int) -> bool:
        """Whether all readers of the words that the next mean replaces have finished."""
        readers = self._readers[half]
        self._readers[half] = None if readers is None else self.decisions.still_reading(readers)
        return self._readers[half] is None

    def _wait_for_readers(self, half: int) -> None:
        held = self._board.held
        held[self.rank] = 1
        try:
            self._wait_for(lambda: self._words_read(half), "the others to read the mean before the last")
        finally:
            held[self.rank] = 0

    def leave(self, meeting: SharedMean) -> Any:
        form, number, v = meeting.form, meeting.number, meeting.op.v
        # the decision is about to come: all wait for this worker's part, so it must not begin anything else meanwhile
        if not self._is_decided() and not (self._is_last(form) and self._wakeup.glance(self._is_decided)):
            self._wait_for(self._is_decided, "the others at a mean")
        total = self._agreed(meeting)
        readers: Readers = (form.others if meeting.present is form.members else meeting.present, meeting.row)
        result: Any
        if form.whole and meeting.place in self._grads:
            self._lent[meeting.place] = readers
        if isinstance(meeting.op, Meet):
            result = self._taken(meeting, meeting.op)
        elif form.whole:
            cell = self._begin_cell(meeting.op, total.device)
            room = self._room(form, total.device) if cell is None else cell
            result = total.mean(0, form.count, meeting.weights, room)
            self._end_cell(cell)
        else:
            self._reduce_slices(meeting)  # all of them: now no member reads v any more, which may be the cell's value
            cell = self._begin_cell(meeting.op, v.device)
            result = self._copied(meeting, self._sums[meeting.lead], cell)
            self._end_cell(cell)
        before = self._readers[1 - number % 2]
        if before is not None and before[0] is readers[0]:  # they have arrived here: they have finished the last one
            self._readers[1 - number % 2] = None
        self._readers[number % 2] = readers
        self._open = None
        del meeting.op  # the decision is kept for the next mean, the vector is not
        if self._on_gpu and self._of_all:
            self._late = number, meeting.present
        else:
            if self._on_gpu:
                self.memory.synchronize()
            self._finish(number, meeting.present)
        if form.kind is Meet:
            return result
        if (self._on_gpu or not v.is_cpu) and result.device != v.device:
            result = result.to(v.device)
        return result if v.dim() == 1 else result.view(v.shape)

    def _finish(self, number: int, present: tuple[int, ...]) -> None:
        """This worker has read all that it reads of a mean."""
        board, rank = self._board, self.rank
        board.finished[rank] = number
        fence()
        if board.held.tobytes() != self._nobody:
            self._wakeup.ring_those([r for r in present if r != rank and board.held[r]])

    def _finish_late(self) -> None:
        """Say so of the last mean, once its work on the GPU is done."""
        if self._late is not None:
            late, self._late = self._late, None
            self._finish(*late)

    def _is_last(self, form: MeanForm) -> bool:
        """Whether all members have arrived, and another one decides."""
        numbers, finished = self._board.at_seq.tolist(), self._board.finished.tolist()
        return form.position > 0 and all(numbers[r] > finished[r] for r in form.members)

    def _agreed(self, meeting: SharedMean) -> VectorSum:
        """Read the decision; gives the vectors of those that take part."""
        board, form, half = self._board, meeting.form, meeting.number % 2
        row = meeting.row = meeting.row or self.decisions.row(meeting.lead)
        if form.everybody and row.count(meeting.number) == len(row):
            meeting.present = form.members
            places = tuple(board.vector[half].tolist())
            weights: Sequence[float] = board.weight[half].tolist()
        else:
            present = tuple(r for r in form.members if row[r])
            meeting.present = form.members if len(present) == len(form.members) else present
            places = tuple(board.vector[row[r] % 2][r] for r in present)
            weights = [board.weight[row[r] % 2][r] for r in present]
        meeting.given, meeting.weights = weights, None if weights.count(1.0) == len(weights) else weights
        if meeting.present is not form.members:
            own = meeting.present.index(self.rank)
            meeting.total = VectorSum(self.memory.segment, form.dtype, form.count, places, own)
            return meeting.total
        total = form.sums.get(places)
        if total is None:
            if len(form.sums) >= KEPT:
                form.sums.clear()
            total = VectorSum(self.memory.segment, form.dtype, form.count, places, form.position)
            form.sums[places] = total
        meeting.total = total
        return total

    def _taken(self, meeting: SharedMean, op: Meet) -> Met:
        """The vectors that this worker has come to a meeting for: each is read by those only that ask for it."""
        present, places = meeting.present, meeting.total.places
        found = [(r, place) for r, place in zip(present, places, strict=True) if r in op.of]
        vectors = {r: self._copied(meeting, place).view(op.v.shape) for r, place in found}
        return Met(present, vectors, dict(zip(present, meeting.given, strict=True)))

    def _begin_cell(self, op: Mean, device: torch.device) -> Vector | None:
        """The cell that the result of a mean will be stored in, to write it there. Until `_end_cell` the word `busy` is
        odd, as inside the scheme's own code: the cell may be half written."""
        cell = op.into[0] if len(op.into) == 1 else None
        fits = cell is not None and cell.dim() == 1 and cell.shape == op.v.shape and cell.dtype is op.v.dtype
        if cell is None or not fits or cell.device != device:
            return None
        self._board.busy[self.rank] += 1
        return cell

    def _end_cell(self, cell: Vector | None) -> None:
        if cell is not None:
            self._board.busy[self.rank] += 1

    def _copied(self, meeting: SharedMean, place: int, room: Vector | None = None) -> Vector:
        """A copy of the vector at an offset, on the device of this worker's vector. `room`: where to."""
        form = meeting.form
        vector = meeting.total.view(place, 0, form.count)
        room = self._room(form, meeting.op.v.device) if room is None else room
        return vector.clone() if room is None else room.copy_(vector)

    def _room(self, form: MeanForm, device: torch.device) -> Vector | None:
        """Memory for a result; None for a small one, which gets memory where it is made."""
        if device.type != "cpu":
            return torch.empty(form.count, dtype=form.dtype, device=device)
        return None if form.size <= BLOCK else self._empty(form.count, form.dtype)

    def _reduce_slices(self, meeting: SharedMean) -> None:
        """Reduce this worker's slice, and wait until all slices are reduced."""
        meeting.undone = list(meeting.present)
        self._reduce(meeting, self.rank)
        if not self._done(meeting):
            self._wait_for(self._all_reduced, PARTS_OF_A_MEAN)

    def _reduce(self, meeting: SharedMean, member: int) -> None:
        """Reduce the slice of a member. The last one wakes the others."""
        form, present, total = meeting.form, meeting.present, meeting.total
        low, high = form.bounds(present.index(member), len(present))
        total.mean(low, high, meeting.weights, total.view(self._sums[meeting.lead], low, high))
        if self._on_gpu:
            self.memory.synchronize()
        self._board.reduced[member] = meeting.row[member]
        fence()  # of two that are last at the same time, one at least sees that all slices are reduced
        if self._done(meeting):
            self.decisions.wake(present)

    def _done(self, meeting: SharedMean) -> bool:
        undone, reduced, row = meeting.undone, self._board.reduced, meeting.row
        while undone and reduced[undone[-1]] >= row[undone[-1]]:
            undone.pop()
        return not undone

    def _all_reduced(self) -> bool:
        """Whether all slices are reduced; the lowest living member reduces those of members that have died."""
        meeting = self._open
        assert meeting is not None
        if self._done(meeting):
            return True
        board, rank = self._board, self.rank
        if self.decisions.all_alive():
            return False
        alive, reduced, row = board.alive, board.reduced, meeting.row
        if rank == next(r for r in meeting.present if alive[r] or r == rank):
            for member in [r for r in meeting.undone if not alive[r] and reduced[r] < row[r]]:
                self._reduce(meeting, member)
        return not meeting.undone

    def wait(self, ready: Callable[[], bool], seconds: float) -> None:
        self.memory.wakeup.wait(ready, seconds)

    def rung(self) -> bool:
        return False  # all that other workers need is in shared memory

    def answer(self) -> None: ...

    def invited(self) -> int | None:
        granted = self._board.grant[self.rank]
        return granted - 1 if granted else None

    def step_aside(self) -> None: ...

    def forget(self) -> None:
        self._board.at_key[self.rank] = self._board.held[self.rank] = 0
        self._board.finished[self.rank] = self._board.at_seq[self.rank]
        self._open = self._told = self._late = self.decisions.last = None

    def _is_decided(self) -> bool:
        meeting = self._open
        assert meeting is not None
        return self.decisions.decided(meeting) or self.decisions.decide(meeting)
