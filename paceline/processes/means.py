"""Means over the workers of one machine: all vectors are in shared memory, and each worker reduces a slice of them.

The lowest living member of a group decides which members take part, and writes them to its row of the board. A row
counts only while it is marked valid, so a decision is complete or absent. Vectors are always added in the order of the
ranks: the bits are the simulator's. Small vectors are added up by each member itself, which saves a second wait; of
large ones each member reduces a slice. If a member dies before its slice is done, the lowest living member reduces it:
all vectors are still in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from paceline.errors import SchemeError
from paceline.ops import Mean
from paceline.processes.memory.board import fence
from paceline.processes.memory.packed_words import mean_key, shape_word
from paceline.processes.memory.run_memory import RunMemory
from paceline.runs.order_log import OrderLogWriter, RecordKind
from paceline.state import Vector, mean_into

SMALL = 2 << 20  # bytes of all vectors together that fit a core's cache: each member adds them up itself


class SharedMean:
    """A mean that this worker has arrived at."""

    def __init__(self, op: Mean, members: tuple[int, ...], number: int, place: int, small: bool) -> None:
        self.op, self.members, self.number, self.place, self.small = op, members, number, place, small


class SharedMeans:
    """One worker's side of all means. `paceline.processes.transport.Means` says what each method means."""

    def __init__(self, memory: RunMemory, rank: int, wait_for: Callable[[Callable[[], bool], str], None]) -> None:
        self.memory, self.rank, self._wait_for = memory, rank, wait_for
        self._board = memory.board
        self._hold = memory.plan.quorum == "hold"
        self._everybody = tuple(range(memory.plan.workers))
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
        small = size * len(members) <= SMALL
        number = board.at_seq[rank] + 1
        if self._readers[number % 2]:  # groups may overlap: a member may still read the mean before the last
            self._wait_for(lambda: self._words_read(number % 2), "the others to read the mean before the last")
        place = self._place(v, size, number, small)
        if self.journal is not None:
            self.journal.add(RecordKind.MEAN, number)
            self.journal.flush()
        board.slot[2 * rank + number % 2], board.weight[2 * rank + number % 2] = place, op.weight
        # before the key: the process before may have died inside a mean, which would count as this worker's arrival
        board.reduced[rank] = board.finished[rank] = number - 1
        board.at_key[rank] = mean_key(None if op.among is None else members, self.generation)
        board.at_shape[rank] = shape_word(v)
        board.first_await[rank] = first
        board.at_seq[rank] = number
        self._open = meeting = SharedMean(op, members, number, place, small)
        self._wake(members)
        return meeting

    def _place(self, v: Vector, size: int, number: int, small: bool) -> int:
        """The offset at which the others read v: its own, if v does not change until they have; else that of a slot."""
        segment = self.memory.segment
        place = segment.offset(v)
        if place is not None and (place in self._grads or not small):
            return place  # of a small mean only gradients: a worker leaves it before the others have read its vector
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
        board = self._board
        return [(r, n) for r, n in readers if board.finished[r] < n and board.alive[r]]

    def _words_read(self, half: int) -> bool:
        """Whether all readers of the words that the next mean replaces have finished."""
        self._readers[half] = self._still_reading(self._readers[half])
        return not self._readers[half]

    def leave(self, meeting: SharedMean) -> Vector:
        board, rank, members = self._board, self.rank, meeting.members
        self._wait_for(lambda: self._decided(meeting) or self._decide(meeting), "the others at a mean")
        lead = next(d for d in members if board.row_valid[d] and board.joint[d][rank] == meeting.number)
        row = board.joint[lead].tolist()
        present = [r for r in members if row[r]]
        v, segment = meeting.op.v, self.memory.segment
        words = [2 * r + row[r] % 2 for r in present]
        vectors = [segment.tensor(board.slot[word], v.dtype, (v.numel(),)) for word in words]
        weights = [board.weight[word] for word in words]
        if meeting.small:
            result = torch.empty(v.numel(), dtype=v.dtype)
            mean_into(result, vectors, weights)
            self._lent[meeting.place] = [(r, row[r]) for r in present if r != rank]
        else:
            total = segment.tensor(self._sums[lead].offset, v.dtype, (v.numel(),))
            self._slices(total, vectors, weights, present, row)
            result = total.clone()
        self._readers[meeting.number % 2] = [(r, row[r]) for r in present if r != rank]
        board.finished[rank] = meeting.number
        self._wake(present)
        self._open = None
        return result.view(v.shape).to(v.device)

    def _slices(
        self, total: Vector, vectors: list[Vector], weights: list[float], present: list[int], row: list[int]
    ) -> None:
        """Each member reduces its slice; the lowest living member also reduces those of members that have died."""
        board, rank, count = self._board, self.rank, total.numel()
        edges = [count * k // len(present) for k in range(len(present) + 1)]

        def reduce(k: int) -> None:
            low, high = edges[k], edges[k + 1]
            if high > low:
                mean_into(total[low:high], [vector[low:high] for vector in vectors], weights)
            board.reduced[present[k]] = row[present[k]]
            self._wake(present)

        def all_reduced() -> bool:
            missing = [k for k, r in enumerate(present) if board.reduced[r] < row[r]]
            if missing and rank == next(r for r in present if board.alive[r] or r == rank):
                for k in missing:
                    if not board.alive[present[k]]:
                        reduce(k)
            return not missing

        reduce(present.index(rank))
        self._wait_for(all_reduced, "the others' part of a mean")

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
        self._board.at_key[self.rank] = 0
        self._board.finished[self.rank] = self._board.at_seq[self.rank]
        self._open = None

    def _decided(self, meeting: SharedMean) -> bool:
        board, rank, number = self._board, self.rank, meeting.number
        return any(board.row_valid[d] and board.joint[d][rank] == number for d in meeting.members)

    def _decide(self, meeting: SharedMean) -> bool:
        """If this worker is to decide, and all members have arrived: write which members take part."""
        board, rank, members = self._board, self.rank, meeting.members
        alive = board.alive
        for other in members:
            if other == rank:
                break
            if alive[other]:
                return False  # a lower one decides
        if self._take_in(members):
            return False
        key = board.at_key[rank]
        present = []
        for other in members:
            here = board.at_key[other] == key and board.at_seq[other] > board.finished[other]
            taken = any(board.row_valid[d] and board.joint[d][other] == board.at_seq[other] for d in members)
            if here and not taken and (alive[other] or self._hold):
                present.append(other)
            elif (alive[other] or self._hold) and not board.parted[other]:
                return False
        shapes = {board.at_shape[other] for other in present}
        if len(shapes) > 1:
            raise SchemeError("a mean of vectors of different lengths")
        row = board.joint[rank]
        for other in self._everybody:  # members of its last decision may still be reading its sum
            if row[other] and alive[other] and other != rank and board.finished[other] < row[other]:
                return False
        if self.journal is not None and (len(present) < len(members) or len({board.at_seq[r] for r in present}) > 1):
            self.journal.text(RecordKind.DECIDED, {str(other): board.at_seq[other] for other in present})
        board.row_valid[rank] = 0
        fence()
        for other in self._everybody:
            row[other] = board.at_seq[other] if other in present else 0
        fence()
        board.row_valid[rank] = 1
        self._wake(present)
        return True

    def _take_in(self, members: tuple[int, ...]) -> bool:
        """Without a server: let restarted workers copy this worker's cells while it waits here."""
        board = self._board
        if self.memory.scheme.methods or not board.first_await[self.rank]:
            return False
        waiting = [other for other in members if board.joining[other]]
        for other in waiting:
            if board.grant[other] != 1 + self.rank:
                board.grant[other] = 1 + self.rank
                self.memory.wakeup.ring(other)
        return bool(waiting)

    def _wake(self, members: Any) -> None:
        for other in members:
            if other != self.rank:
                self.memory.wakeup.ring(other)
