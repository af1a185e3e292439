"""Meetings of workers in virtual time: over when every living member that has not finished the step has arrived."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from paceline.errors import SchemeError
from paceline.ops import Group, Meet, Met

if TYPE_CHECKING:
    from paceline.simulator.simulated_worker import SimulatedWorker

Over = list[tuple[int, Any, Met]]


class SimulatedMeetings:
    """The members that have arrived at each open meeting. `shrink`: a meeting does not wait for dead workers."""

    def __init__(self, seats: Sequence[SimulatedWorker], shrink: bool) -> None:
        self._seats, self._shrink = seats, shrink
        self._everybody = tuple(range(len(seats)))
        self._open: dict[tuple[Group | None, int], dict[int, tuple[Meet, Any]]] = {}

    def arrive(self, rank: int, op: Meet, ticket: Any) -> Over:
        """Gives (rank, ticket, result) for each member when the last one has arrived, else nothing."""
        arrived = self._open.setdefault((op.among, op.t), {})
        if rank in arrived:
            raise SchemeError(f"worker:{rank} started a meeting while its last one with the same members is open")
        arrived[rank] = (op, ticket)
        return self._close(op.among, op.t)

    def left(self, rank: int) -> Over:
        """A worker has died."""
        for arrived in self._open.values():
            arrived.pop(rank, None)
        return self.changed()

    def changed(self) -> Over:
        """Close the meetings that wait for nobody any more: a worker has died, or has finished its step."""
        return [one for among, t in list(self._open) for one in self._close(among, t)] if self._open else []

    def forget(self) -> None:
        """Close all meetings without a result: their members have to arrive again."""
        self._open.clear()

    def _missing(self, among: Group | None, t: int) -> list[int]:
        arrived = self._open.get((among, t), {})
        members = self._everybody if among is None else among
        return [rank for rank in members if rank not in arrived and self._awaited(self._seats[rank], t)]

    def _awaited(self, seat: SimulatedWorker, t: int) -> bool:
        return (seat.worker.alive or not self._shrink) and seat.worker.t <= t

    def _close(self, among: Group | None, t: int) -> Over:
        arrived = self._open[among, t]
        if arrived and self._missing(among, t):
            return []
        del self._open[among, t]
        present = tuple(sorted(arrived))
        numbers = {rank: arrived[rank][0].number for rank in present}
        return [(rank, arrived[rank][1], self._result(rank, present, numbers, arrived)) for rank in present]

    def _result(
        self, rank: int, present: Group, numbers: dict[int, float], arrived: dict[int, tuple[Meet, Any]]
    ) -> Met:
        own, vectors = arrived[rank][0], {}
        for other in (one for one in own.of if one in arrived):
            theirs = arrived[other][0]
            check_given(rank, own, other, theirs)
            vectors[other] = theirs.v.clone()
        return Met(present, vectors, dict(numbers))

    def explain(self, op: Meet) -> str:
        missing = self._missing(op.among, op.t)
        members = len(self._everybody if op.among is None else op.among)
        there = len(self._open.get((op.among, op.t), {}))
        who = ", ".join(map(str, missing[:20]))
        return f"meeting: {there} of {members} have arrived at step {op.t}, missing worker {who}"


def check_given(rank: int, own: Meet, other: int, theirs: Meet) -> None:
    """Refuse a meeting in which a worker takes what another does not give, or a vector of another length."""
    if rank not in theirs.to:
        raise SchemeError(
            f"worker:{rank} takes the vector of worker {other}, which gives it to {theirs.to or 'nobody'}"
        )
    if theirs.v.shape != own.v.shape:
        raise SchemeError(f"a meeting of vectors of different lengths: {own.v.numel()} and {theirs.v.numel()}")
