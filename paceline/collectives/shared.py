"""Means over the workers of one machine: everybody's vector lies in shared memory, each reduces a slice of all.

The lowest living member of a group decides who takes part and writes it down in its row of the board; a row counts
only once it is marked valid, so a decision is there wholly or not at all. Vectors are added in the order of the ranks,
whoever adds them: the bits are the simulator's. Small vectors are added up by each member itself, which saves a second
wait; of large ones each reduces a slice. If a member dies before its slice is done, the lowest living one does it for
it: all vectors are still there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from paceline.board import fence
from paceline.errors import SchemeError
from paceline.journal import DECIDED, MEAN, Journal
from paceline.ops import Mean
from paceline.seeds import mixed
from paceline.stage import Stage
from paceline.state import Vector, mean_into
from paceline.wire import DTYPES

EVERYBODY = 1
SMALL = 2 << 20  # bytes of all vectors together that stay in a core's cache: there each adds them all up itself


class Meeting:
    """A mean that this worker has arrived at."""

    def __init__(self, op: Mean, members: tuple[int, ...], number: int, place: int, small: bool) -> None:
        self.op, self.members, self.number, self.place, self.small = op, members, number, place, small


class SharedMeans:
    """One worker's side of all means."""

    def __init__(self, stage: Stage, rank: int, wait_for: Callable[[Callable[[], bool], str], None]) -> None:
        self.stage, self.rank, self._wait_for = stage, rank, wait_for
        self._board = stage.board
        self._hold = stage.plan.quorum == "hold"
        self._everybody = tuple(range(stage.plan.workers))
        self._slots = [stage.layout.places[f"slot.{r}"] for r in self._everybody]
        self._sums = [stage.layout.places[f"sum.{r}"] for r in self._everybody]
        grads = [stage.layout.places[f"grad.{rank}.{k}"].offset for k in range(2)]
        self._lent: dict[int, list[tuple[int, int]]] = {key: [] for key in grads}  # place -> who may still read it
        self._grads = frozenset(grads)
        self._readers: list[list[tuple[int, int]]] = [[], []]  # of the words of this worker's last two means
        self._open: Meeting | None = None
        self.generation = 0  # the one that this worker has gone back with
        self.journal: Journal | None = None

    def mean(self, op: Mean, *, first: bool) -> Vector:
        """Arrive, wait for the others, and give the mean. `first`: it is the first that this step awaits."""
        return self.leave(self.arrive(op, first=first))

    def arrive(self, op: Mean, *, first: bool) -> Meeting:
        board, rank = self._board, self.rank
        members = self._everybody if op.among is None else tuple(sorted(op.among))
        if rank not in members:
            raise SchemeError(f"worker:{rank} asks for a mean among {op.among}, where it is not a member")
        if self._open is not None:
            raise SchemeError(f"worker:{rank} started a mean while its last one is open")
        v = op.v if op.v.is_contiguous() else op.v.contiguous()
        size = v.numel() * v.element_size()
        small = size * len(members) <= SMALL
        number = board.at_seq[rank] + 1
        if self._readers[number % 2]:  # groups may overlap: a member may still be at the mean before the last
            self._wait_for(lambda: self._words_read(number % 2), "the others to read the mean before the last")
        place = self._place(v, size, number, small)
        if self.journal is not None:
            self.journal.add(MEAN, number)
            self.journal.flush()
        board.slot[2 * rank + number % 2], board.weight[2 * rank + number % 2] = place, op.weight
        key = EVERYBODY if op.among is None else mixed("mean", *members) >> 1 | 2
        board.at_key[rank] = key ^ self.generation << 2  # who has not gone back yet is not met
        board.at_shape[rank] = v.numel() * 16 + DTYPES.index(v.dtype)
        board.first_await[rank] = first
        board.reduced[rank] = board.finished[rank] = number - 1
        board.at_seq[rank] = number
        self._open = meeting = Meeting(op, members, number, place, small)
        self._wake(members)
        return meeting

    def _place(self, v: Vector, size: int, number: int, small: bool) -> int:
        """Where the others find v: where it lies, if it stays as it is until they have read it, else in a slot."""
        segment = self.stage.segment
        place = segment.offset(v)
        if place is not None and (place in self._grads or not small):
            return place  # a small mean is left before all have read it, and then only gradients are left alone
        slot = self._slots[self.rank]
        half = slot.shape[0] // 2
        if size > half:
            raise SchemeError(f"a mean of {v.numel()} numbers is too large for the shared memory laid out for it")
        place = slot.offset + number % 2 * half
        segment.tensor(place, v.dtype, v.shape).copy_(v)
        return place

    def returned(self, place: int) -> bool:
        """Whether nobody reads any more what lies there."""
        board = self._board
        readers = self._lent.get(place)
        if readers:
            self._lent[place] = readers = [(r, n) for r, n in readers if board.finished[r] < n and board.alive[r]]
        return not readers

    def _words_read(self, half: int) -> bool:
        """Whether all readers of the words that the next mean replaces have finished."""
        board = self._board
        self._readers[half] = [(r, n) for r, n in self._readers[half] if board.finished[r] < n and board.alive[r]]
        return not self._readers[half]

    def leave(self, meeting: Meeting) -> Vector:
        """Wait until the mean is there, and take it."""
        board, rank, members = self._board, self.rank, meeting.members
        self._wait_for(lambda: self._decided(meeting) or self._decide(meeting), "the others at a mean")
        lead = next(d for d in members if board.row_valid[d] and board.joint[d][rank] == meeting.number)
        row = board.joint[lead].tolist()
        present = [r for r in members if row[r]]
        v, segment = meeting.op.v, self.stage.segment
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
        """Each reduces its slice; the slices of those who died on the way are done by the lowest living one."""
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
        """Wait for something else, at most `seconds`; the others need nothing of this worker meanwhile."""
        self.stage.bells.wait(ready, seconds)

    def rung(self) -> bool:
        """Whether the others may want something: what they need lies in shared memory."""
        return False

    def answer(self) -> None:
        """Give it to them."""

    def invited(self) -> int | None:
        """For a worker that is back: the one whose cells it may copy now."""
        granted = self._board.grant[self.rank]
        return granted - 1 if granted else None

    def step_aside(self) -> None:
        """This worker is away for a while."""

    def forget(self) -> None:
        """The step was abandoned: this worker stands at no mean."""
        self._board.at_key[self.rank] = 0
        self._board.finished[self.rank] = self._board.at_seq[self.rank]
        self._open = None

    def _decided(self, meeting: Meeting) -> bool:
        board, rank, number = self._board, self.rank, meeting.number
        return any(board.row_valid[d] and board.joint[d][rank] == number for d in meeting.members)

    def _decide(self, meeting: Meeting) -> bool:
        """If it is for this worker to say, and all are here: write down who takes part."""
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
        for other in self._everybody:  # who took part in this worker's last decision may still be reading its sum
            if row[other] and alive[other] and other != rank and board.finished[other] < row[other]:
                return False
        if self.journal is not None and (len(present) < len(members) or len({board.at_seq[r] for r in present}) > 1):
            self.journal.text(DECIDED, {str(other): board.at_seq[other] for other in present})
            self.journal.flush()
        board.row_valid[rank] = 0
        fence()
        for other in self._everybody:
            row[other] = board.at_seq[other] if other in present else 0
        fence()
        board.row_valid[rank] = 1
        self._wake(present)
        return True

    def _take_in(self, members: tuple[int, ...]) -> bool:
        """Where there is no server, let those who are back copy this worker's cells while it stands still."""
        board = self._board
        if self.stage.scheme.methods or not board.first_await[self.rank]:
            return False
        waiting = [other for other in members if board.joining[other]]
        for other in waiting:
            if board.grant[other] != 1 + self.rank:
                board.grant[other] = 1 + self.rank
                self.stage.bells.ring(other)
        return bool(waiting)

    def _wake(self, members: Any) -> None:
        for other in members:
            if other != self.rank:
                self.stage.bells.ring(other)
