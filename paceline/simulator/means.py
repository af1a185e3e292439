"""Collectives in virtual time: a mean is ready when every living member has arrived."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from paceline.errors import SchemeError
from paceline.ops import Group, Mean
from paceline.state import Vector, mean_of

if TYPE_CHECKING:
    from paceline.simulator.simulated_worker import SimulatedWorker

MeanAnswers = list[tuple[int, Any, Vector]]


class SimulatedMeans:
    """The members that have arrived at each open mean. `shrink`: a mean does not wait for dead workers."""

    def __init__(self, seats: Sequence[SimulatedWorker], shrink: bool) -> None:
        self._seats = seats
        self._shrink = shrink
        self._alive = len(seats)
        self._joining: set[int] = set()  # restarted workers that take part from the next step on
        self._open: dict[Group | None, dict[int, tuple[Mean, Any]]] = {}

    def arrive(self, rank: int, op: Mean, ticket: Any) -> MeanAnswers:
        """Gives (rank, ticket, mean) for each member when the last one has arrived, else nothing."""
        arrived = self._open.setdefault(op.among, {})
        if rank in arrived:
            raise SchemeError(f"worker:{rank} started a mean while its last one with the same members is open")
        arrived[rank] = (op, ticket)
        return self._close(op.among)

    def left(self, rank: int) -> MeanAnswers:
        self._alive -= 1
        met: MeanAnswers = []
        for among in list(self._open):
            self._open[among].pop(rank, None)
            met += self._close(among)
        return met

    def comes_later(self, rank: int) -> MeanAnswers:
        """A restarted worker has missed a mean of the others' step: the later ones of that step do not wait for it."""
        self._joining.add(rank)
        return [answer for among in list(self._open) for answer in self._close(among)]

    def joined(self, rank: int) -> None:
        self._alive += 1
        self._joining.discard(rank)

    def forget(self) -> None:
        """Close all means without a result: their members have to arrive again."""
        self._open.clear()
        self._alive = sum(seat.worker.alive for seat in self._seats)

    def _expected(self, among: Group | None) -> int:
        if not self._shrink:
            members = range(len(self._seats)) if among is None else among
            later = any(self._seats[rank].met for rank in self._open[among])
            return sum(not (later and rank in self._joining) for rank in members)
        if among is None:
            return self._alive
        return sum(self._seats[rank].worker.alive for rank in among)

    def _close(self, among: Group | None) -> MeanAnswers:
        arrived = self._open[among]
        if not arrived or len(arrived) < self._expected(among):
            return []
        del self._open[among]
        ranks = sorted(arrived)
        for rank in ranks:
            self._seats[rank].met = True
        ops = [arrived[rank][0] for rank in ranks]
        if len({op.v.shape for op in ops}) > 1:
            raise SchemeError(f"a mean of vectors of different lengths: {[tuple(op.v.shape) for op in ops]}")
        mean = mean_of([op.v for op in ops], [op.weight for op in ops])
        # each member may change its copy
        copies = [mean] + [mean.clone() for _ in ranks[1:]]
        return [(rank, arrived[rank][1], copy) for rank, copy in zip(ranks, copies, strict=True)]

    def explain(self, op: Mean) -> str:
        arrived = self._open.get(op.among, {})
        members = range(len(self._seats)) if op.among is None else op.among
        missing = [rank for rank in members if rank not in arrived]
        return (
            f"mean: {len(arrived)} of {len(members)} have arrived, missing worker {', '.join(map(str, missing[:20]))}"
        )
