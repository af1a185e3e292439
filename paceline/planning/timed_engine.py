"""The simulator with the costs of separate machines: nodes share the server's link and its processor, and a mean takes
what paceline's own exchange of slices takes.

The plain simulator gives every worker a wire of its own and arithmetic for nothing, which is right for asking how a
scheme learns, and wrong for asking where it stops scaling.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.network.means.mean_rooms import SMALL
from paceline.ops import Call, Mean, Meet, Op, Pending, content, nbytes
from paceline.runtime.call_scheduler import Reply
from paceline.simulator.cost import NetworkLink
from paceline.simulator.engine import SimulationEngine
from paceline.simulator.means import MeanAnswers
from paceline.simulator.meetings import Over
from paceline.simulator.simulated_worker import SimulatedWorker


@dataclass(frozen=True)
class MessageCosts:
    """What messages cost. `scale`: bytes of the real vector for each of the simulated one, which is shorter.
    `per_message`, `per_byte`: seconds of the processor at each end; `per_call`: of the server for each message, where
    that differs. `calls`: seconds of arithmetic at the server, by the name of the method. `servers` share the vector,
    so links and arithmetic of the server are that much faster. `mean`: what a mean takes, where it was measured."""

    network: NetworkLink = field(default_factory=NetworkLink)
    scale: float = 1.0
    per_message: float = 0.0
    per_byte: float = 0.0
    calls: Mapping[str, float] = field(default_factory=dict)
    servers: int = 1
    per_call: float | None = None
    mean: float | None = None

    def mean_seconds(self, members: int, size: float, *, gathered: bool = False) -> float:
        """A mean of vectors of `size` bytes: small ones, and `gathered` ones, are sent to all; of others every member
        adds up a slice and sends it to all, which is the traffic of a ring."""
        others = members - 1
        if self.mean is not None or others == 0:
            return self.mean or 0.0
        whole = gathered or size * members <= SMALL
        volume = others * size if whole else 2 * others / members * size
        rounds = 1 if whole else 2
        # a node sends and receives at the same time; its processor does one after the other
        moved = max(volume / self.network.bandwidth, 2 * volume * self.per_byte)
        return rounds * (self.network.latency + 2 * self.per_message * others) + moved

    @property
    def at_server(self) -> float:
        return self.per_message if self.per_call is None else self.per_call

    def travel(self, size: float) -> float:
        """Until a message has left a worker's node, or come into it."""
        return max(size / self.network.bandwidth, size * self.per_byte) + self.per_message


class Queue:
    """One way of a link, which carries one message after the other."""

    def __init__(self) -> None:
        self.free_at = 0.0

    def served(self, now: float, seconds: float) -> float:
        """When it has served a message that comes now."""
        self.free_at = max(now, self.free_at) + seconds
        return self.free_at


class TimedEngine(SimulationEngine):
    """Performs the same operations as any simulation; only when they are done differs."""

    def __init__(self, *args: Any, costs: MessageCosts, **rest: Any) -> None:
        super().__init__(*args, **rest)
        self._costs = costs
        self._inward, self._outward = Queue(), Queue()  # of the server
        self._arrived: deque[tuple[SimulatedWorker, Call[Any], Pending[Any] | None, float]] = deque()
        self._serving, self._answered = False, 0.0  # what its processor does, and until when it sends answers

    def bytes_of(self, carried: Any) -> float:
        return nbytes(carried) * self._costs.scale

    def _issue(self, seat: SimulatedWorker, op: Op[Any]) -> Pending[Any]:
        match op:
            case Call():
                target: Pending[Any] = Pending(op)
                size = self.bytes_of(content(op))
                left = self.now + self._costs.travel(size)
                share = size / (self._costs.network.bandwidth * self._costs.servers)
                there = max(left, self._inward.served(self.now, share)) + self._costs.network.latency
                answered = None if op.method.silent else target
                self.later(seat, there - self.now, self._on_arrival, op, answered, size)
                if answered is None:  # nobody waits for it: the worker goes on when it is sent
                    self.later(seat, left - self.now, self.deliver, target, None)
                return target
            case Mean():
                target = Pending(op)
                self.later(seat, 0.0, self.on_mean, op, target)
                return target
            case Meet():
                target = Pending(op)
                size = self.bytes_of(content(op))
                seconds = self._costs.travel(size * len(op.to)) + self._costs.network.latency if op.to else 0.0
                self.later(seat, seconds, self.on_meet, op, target)
                return target
        return super()._issue(seat, op)

    def _on_arrival(self, seat: SimulatedWorker, op: Call[Any], target: Pending[Any] | None, size: float) -> None:
        self._arrived.append((seat, op, target, size))
        if not self._serving:
            self._serve()

    def _serve(self) -> None:
        """The server's processor takes the next call. What it answers is its work too, before any other call."""
        self._serving = bool(self._arrived)
        if not self._serving:
            return
        seat, op, target, size = self._arrived.popleft()
        costs = self._costs
        seconds = (costs.calls.get(op.method.name, 0.0) + size * costs.per_byte) / costs.servers + costs.at_server
        self.schedule(self.now + seconds, self._on_performed, seat, op, target)

    def _on_performed(self, seat: SimulatedWorker, op: Call[Any], target: Pending[Any] | None) -> None:
        self._answered = self.now
        self.deliver_answers(self._submit(seat.worker.rank, op, (seat.generation, target)))
        self.schedule(self._answered, self._serve)

    def deliver_answers(self, answers: Sequence[Reply]) -> None:
        costs = self._costs
        for rank, (generation, target), result in answers:
            seat = self.seats[rank]
            if seat.generation != generation or target is None:
                continue
            size = self.bytes_of(result)
            self._answered = copied = self._answered + size * costs.per_byte / costs.servers + costs.at_server
            sent = self._outward.served(copied, size / (costs.network.bandwidth * costs.servers))
            there = max(copied + costs.travel(size), sent) + costs.network.latency
            self.later(seat, there - self.now, self.on_answer, target, result)

    def deliver_means(self, met: MeanAnswers) -> None:
        if not met:
            return
        op = met[0][1].op
        gathered = op.packed is not None and bool(op.packed.payloads)
        seconds = self._costs.mean_seconds(len(met), self.bytes_of(content(op)), gathered=gathered)
        for rank, target, mean in met:
            self.later(self.seats[rank], seconds, self.on_met, target, mean)

    def deliver_met(self, over: Over) -> None:
        """A node receives while it sends: only what comes in beyond what it sent takes time of its own."""
        for rank, target, result in over:
            size = self.bytes_of(content(target.op))
            more = max(0, len(result.vectors) - len(target.op.to)) * size
            self.later(self.seats[rank], self._costs.travel(more) if more else 0.0, self.on_met, target, result)

    def message(self, seat: SimulatedWorker, carried: Any, *, inward: bool = False) -> float:
        """Of messages between workers: the way in overlaps with the way out."""
        return 0.0 if inward else self._costs.travel(self.bytes_of(carried)) + self._costs.network.latency
