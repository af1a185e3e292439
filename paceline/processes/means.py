"""Means over the workers of one machine: all vectors are in shared memory, of the host or of GPUs.

The lowest living member of a group decides which members take part, and writes them to its row of the board. A row
counts only while it is marked valid, so a decision is complete or absent. Vectors are always added in the order of the
ranks: the bits are the simulator's. A mean has one barrier or two: of few or small vectors each member adds up all; of
others each member reduces a slice, and copies the sum when all slices are done. If a member dies before its slice is
done, the lowest living member reduces it: all vectors are still in memory.

Members spin or sleep at a barrier. Only what they sleep for wakes them: the last arrival wakes the member that decides,
the decision and the last slice wake the others.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from paceline.errors import SchemeError
from paceline.ops import Mean
from paceline.processes.memory.board import fence
from paceline.processes.memory.packed_words import mean_key, shape_word
from paceline.processes.memory.run_memory import RunMemory
from paceline.processes.memory.segment import Segment
from paceline.processes.transport import WaitFor
from paceline.runs.order_log import OrderLogWriter, RecordKind
from paceline.state import Vector, mean_into

TWO = 4 << 20  # bytes of a vector up to which two members each add up both
SMALL = 256 << 10  # bytes that a member of a larger group adds up beyond two vectors, rather than wait once more
BLOCK = 512 << 10  # bytes of a sum that stay in a core's cache while vectors are added to it


Empty = Callable[[int, torch.dtype], Vector]  # a vector of some length, not filled


def new_vector(length: int, dtype: torch.dtype) -> Vector:
    return torch.empty(length, dtype=dtype)


def each_adds_all(size: int, members: int) -> bool:
    """Whether each member adds up all vectors of `size` bytes; else it reduces a slice."""
    return size <= TWO if members <= 2 else size * (members - 2) <= SMALL


class SharedMean:
    """A mean that this worker has arrived at."""

    def __init__(self, op: Mean, members: tuple[int, ...], number: int, key: int, place: int, whole: bool) -> None:
        self.op, self.members, self.number, self.key, self.place = op, members, number, key, place
        self.whole = whole  # each member adds up all vectors
        self.lead = -1  # the member that has decided
        self.missing = -1  # a member that was not here when this worker last looked


class Total:
    """The vectors of a mean, in shared memory, and their sum: divided by their number, or weighted."""

    def __init__(
        self, segment: Segment, empty: Empty, v: Vector, places: list[int], weights: list[float], own: int
    ) -> None:
        """`own`: which of the vectors is this worker's; it computes where that one is."""
        self._segment, self._empty, self._places, self._weights = segment, empty, places, weights
        self._dtype, self._home, self.count = v.dtype, v.device, v.numel()
        self._device = self.part(places[own], 0, self.count).device

    def part(self, place: int, low: int, high: int) -> Vector:
        """Some numbers of a vector at an offset."""
        return self._segment.tensor(place + low * self._dtype.itemsize, self._dtype, (high - low,))

    def add_up(self, out: Vector, low: int, high: int) -> None:
        """Write a part of the mean into `out`."""
        vectors = [self.part(place, low, high) for place in self._places]
        step = BLOCK // self._dtype.itemsize
        if high - low <= step or self._device.type != "cpu":
            self._into(out, vectors)
            return
        for start in range(0, high - low, step):
            end = start + step
            self._into(out[start:end], [vector[start:end] for vector in vectors])

    def _into(self, out: Vector, vectors: list[Vector]) -> None:
        device = self._device
        if device.type == "cpu" or all(one.device == device for one in (out, *vectors)):
            mean_into(out, vectors, self._weights)
            return
        here = torch.empty_like(out, device=device)  # others are on other GPUs
        mean_into(here, [vector.to(device) for vector in vectors], self._weights)
        out.copy_(here)

    def all(self) -> Vector:
        """The whole mean, in memory of this process."""
        result = self._new(self._device)
        self.add_up(result, 0, self.count)
        return result

    def copied(self, reduced: Vector) -> Vector:
        """A copy on the device of this worker's vector."""
        return self._new(self._home).copy_(reduced)

    def _new(self, device: torch.device) -> Vector:
        if device.type == "cpu":
            return self._empty(self.count, self._dtype)
        return torch.empty(self.count, dtype=self._dtype, device=device)


class SharedMeans:
    """One worker's side of all means. `paceline.processes.transport.Means` says what each method means."""

    def __init__(self, memory: RunMemory, rank: int, wait_for: WaitFor, empty: Empty = new_vector) -> None:
        """`empty`: gives memory for a result."""
        self.memory, self.rank, self._wait_for, self._empty = memory, rank, wait_for, empty
        self._board = board = memory.board
        self._wakeup = memory.wakeup
        self._hold = memory.plan.quorum == "hold"
        self._everybody = tuple(range(memory.plan.workers))
        self._nobody = bytes(board.joining.nbytes)
        self._column = board.joint_column(rank)
        self._slots = [memory.layout.places[f"slot.{r}"] for r in self._everybody]
        self._sums = [memory.layout.places[f"sum.{r}"] for r in self._everybody]
        grads = [memory.layout.places[f"grad.{rank}.{k}"].offset for k in range(2)]
        self._lent: dict[int, list[tuple[int, int]]] = {key: [] for key in grads}  # place -> its possible readers
        self._grads = frozenset(grads)
        self._readers: list[list[tuple[int, int]]] = [[], []]  # of the words of this worker's last two means
        self._open: SharedMean | None = None
        self.generation = 0
        self.journal: OrderLogWriter | None = None

    def mean(self, op: Mean, *, first: bool) -> Vector:
        return self.leave(self.arrive(op, first=first))

    def arrive(self, op: Mean, *, first: bool) -> SharedMean:
        board, rank = self._board, self.rank
        members = self._everybody if op.among is None else tuple(sorted(op.among))
        if self._open is not None:
            raise SchemeError(f"worker:{rank} started a mean while its last one is open")
        v = op.v if op.v.is_contiguous() else op.v.contiguous()
        size = v.numel() * v.element_size()
        whole = each_adds_all(size, len(members))
        number = board.at_seq[rank] + 1
        half = number % 2
        if self._readers[half] and not self._words_read(
            half
        ):  # groups overlap: a member reads the mean before the last
            self._wait_for_readers(half)
        place = self._place(v, size, number, whole)
        if self.journal is not None:
            self.journal.add(RecordKind.MEAN, number)
            self.journal.flush()
        self.memory.synchronize()
        board.slot[2 * rank + half], board.weight[2 * rank + half] = place, op.weight
        # before the key: the process before may have died inside a mean, which would count as this worker's arrival
        board.reduced[rank] = board.finished[rank] = number - 1
        key = mean_key(None if op.among is None else members, self.generation)
        board.at_key[rank] = key
        board.at_shape[rank] = shape_word(v)
        board.first_await[rank] = first
        board.at_seq[rank] = number
        self._open = meeting = SharedMean(op, members, number, key, place, whole)
        self._wake_decider(members)
        return meeting

    def _place(self, v: Vector, size: int, number: int, whole: bool) -> int:
        """The offset at which the others read v: its own, if v does not change until they have; else that of a slot."""
        segment = self.memory.segment
        place = segment.offset(v)
        if place is not None and (place in self._grads or not whole):
            return place  # after a single barrier others may still read: only gradients, which are lent until then
        slot = self._slots[self.rank]
        half = slot.shape[0] // 2
        if size > half:
            raise SchemeError(f"a mean of {v.numel()} numbers is too large for the shared memory laid out for it")
        place = slot.offset + number % 2 * half
        segment.tensor(place, v.dtype, v.shape).copy_(v)
        return place

    def returned(self, place: int) -> bool:
        readers = self._lent.get(place)
        if readers:
            self._lent[place] = readers = self._still_reading(readers)
        return not readers

    def _still_reading(self, readers: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Of (rank, number of a mean): the workers that have not finished that mean."""
        finished, alive = self._board.finished.tolist(), self._board.alive
        return [(r, n) for r, n in readers if finished[r] < n and alive[r]]

    def _words_read(self, half: int) -> bool:
        """Whether all readers of the words that the next mean replaces have finished."""
        self._readers[half] = self._still_reading(self._readers[half])
        return not self._readers[half]

    def _wait_for_readers(self, half: int) -> None:
        held = self._board.held
        held[self.rank] = 1
        try:
            self._wait_for(lambda: self._words_read(half), "the others to read the mean before the last")
        finally:
            held[self.rank] = 0

    def leave(self, meeting: SharedMean) -> Vector:
        board, rank, members, number, v = self._board, self.rank, meeting.members, meeting.number, meeting.op.v
        self._wait_for(lambda: self._decided(meeting) or self._decide(meeting), "the others at a mean")
        row = board.joint[meeting.lead].tolist()
        present = [r for r in members if row[r]]
        words = [2 * r + row[r] % 2 for r in present]
        own, slots, given = present.index(rank), board.slot.tolist(), board.weight.tolist()
        places, weights = [slots[k] for k in words], [float(given[k]) for k in words]
        total = Total(self.memory.segment, self._empty, v, places, weights, own)
        readers = [(r, row[r]) for r in present if r != rank]
        if meeting.whole:
            result = total.all()
            self._lent[meeting.place] = readers
        else:
            result = self._slices(total, meeting.lead, present, row)
        self._readers[number % 2] = readers
        self.memory.synchronize()
        board.finished[rank] = number
        self._open = None
        fence()
        if board.held.tobytes() != self._nobody:
            self._wakeup.ring_those([r for r, _ in readers if board.held[r]])
        if result.device != v.device:
            result = result.to(v.device)
        return result if v.dim() == 1 else result.view(v.shape)

    def _slices(self, total: Total, lead: int, present: list[int], row: list[int]) -> Vector:
        """Each member reduces its slice; the lowest living member also reduces those of members that have died."""
        rank, reduced, alive = self.rank, self._board.reduced, self._board.alive
        at = self._sums[lead].offset
        undone = present.copy()  # members whose slices are not known to be reduced

        def reduce(member: int) -> None:
            k = present.index(member)
            low, high = (total.count * edge // len(present) for edge in (k, k + 1))
            total.add_up(total.part(at, low, high), low, high)
            self.memory.synchronize()
            reduced[member] = row[member]
            fence()
            if all_done():
                self._wakeup.ring_those(present)

        def all_done() -> bool:
            while undone and reduced[undone[-1]] >= row[undone[-1]]:
                undone.pop()
            return not undone

        def all_reduced() -> bool:
            if all_done():
                return True
            if rank == next(r for r in present if alive[r] or r == rank):
                for member in [r for r in undone if not alive[r] and reduced[r] < row[r]]:
                    reduce(member)
            return not undone

        reduce(rank)
        self._wait_for(all_reduced, "the others' part of a mean")
        return total.copied(total.part(at, 0, total.count))

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
        self._open = None

    def _decided(self, meeting: SharedMean) -> bool:
        """Whether a decision counts this worker in. No two means of a worker have the same number."""
        column = self._column.tolist()
        if meeting.number not in column:
            return False
        valid = self._board.row_valid
        meeting.lead = next((d for d in meeting.members if column[d] == meeting.number and valid[d]), -1)
        return meeting.lead >= 0

    def _decide(self, meeting: SharedMean) -> bool:
        """If this worker is to decide, and all members have arrived: write which members take part."""
        board, rank, members, missing = self._board, self.rank, meeting.members, meeting.missing
        if rank != next(r for r in members if board.alive[r] or r == rank):
            return False  # a lower one decides
        if self._take_in(members):
            return False
        if missing >= 0 and self._absent(missing):
            return False
        present = self._present(meeting)
        if present is None or self._read_by_others():
            return False
        shapes, numbers = board.at_shape.tolist(), board.at_seq.tolist()
        if len({shapes[other] for other in present}) > 1:
            raise SchemeError("a mean of vectors of different lengths")
        if self.journal is not None and (len(present) < len(members) or len({numbers[r] for r in present}) > 1):
            self.journal.text(RecordKind.DECIDED, {str(other): numbers[other] for other in present})
        row = board.joint[rank]
        board.row_valid[rank] = 0
        fence()
        for other in self._everybody:
            row[other] = numbers[other] if other in present else 0
        fence()
        board.row_valid[rank] = 1
        board.held[rank] = 0
        meeting.lead = rank
        self._wakeup.ring_those([other for other in present if other != rank])
        return True

    def _absent(self, other: int) -> bool:
        """Whether a living member is at no mean; one that is at another group's is not told apart here."""
        board = self._board
        waited_for = board.alive[other] and not board.parted[other]
        return bool(waited_for and board.at_seq[other] <= board.finished[other])

    def _present(self, meeting: SharedMean) -> list[int] | None:
        """The members that take part; None if one that is waited for has not arrived."""
        board, members = self._board, meeting.members
        # in this order: a worker that is restarted takes back what its predecessor has finished, then writes its key
        keys, numbers, finished = board.at_key.tolist(), board.at_seq.tolist(), board.finished.tolist()
        rows = [board.joint[d].tolist() for d in members if board.row_valid[d]]
        alive, present = board.alive.tolist(), []
        for other in members:
            here = keys[other] == meeting.key and numbers[other] > finished[other]
            waited_for = alive[other] or self._hold
            if here and waited_for and not any(row[other] == numbers[other] for row in rows):
                present.append(other)
            elif waited_for and not board.parted[other]:
                meeting.missing = other
                return None
        return present

    def _read_by_others(self) -> bool:
        """Whether members of this worker's last decision still read the decision, or its sum."""
        board, rank = self._board, self.rank
        readers = [(other, number) for other, number in enumerate(board.joint[rank].tolist()) if number]
        if not any(other != rank for other, _ in self._still_reading(readers)):
            return False
        board.held[rank] = 1  # they wake this worker when they have finished
        fence()
        return any(other != rank for other, _ in self._still_reading(readers))

    def _take_in(self, members: tuple[int, ...]) -> bool:
        """Without a server: let restarted workers copy this worker's cells while it waits here."""
        board = self._board
        if board.joining.tobytes() == self._nobody or self.memory.scheme.methods or not board.first_await[self.rank]:
            return False
        waiting = [other for other in members if board.joining[other]]
        for other in waiting:
            if board.grant[other] != 1 + self.rank:
                board.grant[other] = 1 + self.rank
                self._wakeup.ring(other)
        return bool(waiting)

    def _wake_decider(self, members: tuple[int, ...]) -> None:
        """Wake the member that decides, if this worker is the last that it waits for."""
        fence()
        alive = self._board.alive
        living = [other for other in members if alive[other]]
        if living and living[0] != self.rank and not any(map(self._absent, living)):
            self._wakeup.ring(living[0])
