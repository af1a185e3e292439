"""Lets the faults of a simulation strike: deaths, restarts, stops, partitions and delays of processes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from paceline.simulator.faults import Fault, FaultTarget
from paceline.simulator.simulated_worker import SimulatedWorker

if TYPE_CHECKING:
    from paceline.simulator.engine import SimulationEngine


class FaultInjector:
    """Faults strike at a time (an event of its own), an update, an event's number, a worker's step or await."""

    def __init__(self, engine: SimulationEngine, faults: Sequence[Fault]) -> None:
        self._engine = engine
        self._at_update: list[Fault] = []
        self._at_event: list[Fault] = []
        self._delays = any(fault.action == "delay" for fault in faults)
        recovery, servers = engine.recovery, engine.servers
        # messages: sent by a worker, requests to the first server, replies of servers, and all that can be held up
        sent = {engine.on_call, engine.on_mean, engine.on_meet, recovery.on_save}
        self._arrivals = sent | ({servers.arrived} if servers else set())
        self._asked = {engine.on_call, recovery.on_save} | ({servers.on_part} if servers else set())
        self._told = {engine.on_answer, engine.on_told, recovery.on_saved}
        self._messages = self._arrivals | self._asked | self._told | {engine.on_met}
        self._apart: dict[frozenset[int], float] = {}  # two workers -> until when they are cut off from each other
        for fault in sorted(faults, key=lambda fault: fault.when):
            if fault.unit == "time":
                engine.schedule(fault.when, self.strike, fault)
            elif fault.unit == "update":
                self._at_update.append(fault)
            elif fault.unit == "event":
                self._at_event.append(fault)
            elif fault.unit != "call":  # those are the servers' own
                engine.seats[fault.rank].faults.append(fault)
        self.next_event = self._next_event()

    def _next_event(self) -> float:
        """The number of the event before which the next fault strikes."""
        return self._at_event[0].when if self._at_event else math.inf

    def before_event(self, number: int) -> None:
        while self._at_event and number >= self._at_event[0].when:
            self.strike(self._at_event.pop(0))
        self.next_event = self._next_event()

    def updated(self, updates: int) -> None:
        """The centre has changed."""
        while self._at_update and updates >= self._at_update[0].when:
            self.strike(self._at_update.pop(0))

    def struck(self, seat: SimulatedWorker, unit: str, reached: int) -> bool:
        """Let the faults of this step or await strike; True if the worker has lost its step."""
        if not seat.faults:
            return not seat.worker.alive
        generation = seat.generation
        for fault in [one for one in seat.faults if one.unit == unit and reached >= one.when]:
            seat.faults.remove(fault)
            self.strike(fault)
        return seat.generation != generation or not seat.worker.alive

    def strike(self, fault: Fault) -> None:
        until = self._engine.now + fault.duration
        if fault.action == "partition":
            self._partition(fault.place, fault.other, until)
        elif fault.role == "server":
            self._strike_server(fault, until)
        else:
            self._strike_worker(fault, until)

    def _strike_worker(self, fault: Fault, until: float) -> None:
        engine = self._engine
        match fault.action:
            case "kill":
                self.kill(fault.rank)
                if math.isfinite(until):
                    engine.schedule(until, self.strike, Fault("restart", fault.rank, until))
            case "restart":
                self.restart(fault.rank)
            case _:
                for rank in engine.recovery.ranks(fault.rank):
                    self._hold_up(engine.seats[rank], fault, until)

    def _hold_up(self, seat: SimulatedWorker, fault: Fault, until: float) -> None:
        if fault.action == "stop":
            seat.frozen_until = max(seat.frozen_until, until)
            seat.disturbed_until = max(seat.disturbed_until, until)
        elif fault.duration:
            seat.late_until, seat.late_by = until, fault.by
        else:
            seat.next_late_by += fault.by

    def _strike_server(self, fault: Fault, until: float) -> None:
        engine, servers, shard = self._engine, self._engine.servers, fault.rank
        assert servers is not None
        match fault.action:
            case "kill":
                servers.kill(shard)
                if math.isfinite(until):
                    self.bring_back_server(shard, fault.duration)
            case "restart":
                servers.dead[shard] = False
                servers.moved()
            case _:
                servers.frozen_until[shard] = max(servers.frozen_until[shard], until)
                engine.schedule(until, servers.moved)

    def bring_back_server(self, shard: int, seconds: float) -> None:
        engine = self._engine
        until = engine.now + seconds
        engine.schedule(until, self.strike, Fault("restart", shard, until, role="server"))

    def _partition(self, one: FaultTarget, other: FaultTarget | None, until: float) -> None:
        """Messages between the two wait. None is lost: a connection repeats what was not acknowledged."""
        engine, servers = self._engine, self._engine.servers
        if one.role == "server" and (other is None or other.role == "worker"):
            for seat in engine.seats if other is None else [engine.seats[other.index]]:
                _cut(seat, one.index, until)
        if one.role == "worker":
            seat = engine.seats[one.index]
            if engine.messages is not None and (other is None or other.role == "worker"):
                engine.messages.cut_off(one.index, None if other is None else other.index, until)
            if other is None:
                seat.cut_until = max(seat.cut_until, until)
                seat.disturbed_until = max(seat.disturbed_until, until)
            elif other.role == "server":
                _cut(seat, other.index, until)
            else:
                pair = frozenset((one.index, other.index))
                self._apart[pair] = max(self._apart.get(pair, -math.inf), until)
            return
        if servers is not None and (other is None or other.role == "server"):
            shards = {one.index, other.index} if other is not None else {one.index}
            for shard in servers.followers:  # they are cut off from the lead; of other servers they need nothing
                if (shard in shards and (0 in shards or other is None)) or (other is None and one.index == 0):
                    servers.cut_until[shard] = max(servers.cut_until[shard], until)
            engine.schedule(until, servers.moved)

    def held(self, seat: SimulatedWorker, handler: Callable[..., None], payload: Any) -> float:
        """The time until which an event of a disturbed worker has to wait."""
        until = -math.inf if handler in self._arrivals else seat.frozen_until  # a message already sent is not frozen
        if handler in self._messages:
            until = max(until, seat.cut_until)
            if seat.cuts:
                until = max(until, self._cut_off(seat, handler, payload))
        return until

    def _cut_off(self, seat: SimulatedWorker, handler: Callable[..., None], payload: Any) -> float:
        if self._engine.servers is not None and handler == self._engine.servers.arrived:
            return seat.cuts.get(payload[0], -math.inf)
        if handler in self._told:  # an answer needs the parts of all servers
            return max(seat.cuts.values())
        return seat.cuts.get(0, -math.inf) if handler in self._asked else -math.inf

    def apart(self, ranks: Sequence[int]) -> float:
        """The time until which some of these workers cannot reach each other."""
        if not self._apart:
            return -math.inf
        there = set(ranks)
        return max((until for pair, until in self._apart.items() if pair <= there), default=-math.inf)

    def late(self, seat: SimulatedWorker, inward: bool, seconds: float) -> float:
        """The seconds of a message with its delays; it never overtakes an earlier one of the same direction."""
        if not self._delays:
            return seconds
        now = self._engine.now
        seconds += seat.next_late_by + (seat.late_by if now < seat.late_until else 0.0)
        seat.next_late_by = 0.0
        arrival = max(now + seconds, seat.arrivals[inward])
        while now + seconds < arrival:
            seconds = math.nextafter(max(seconds, arrival - now), math.inf)
        seat.arrivals[inward] = arrival
        return seconds

    def kill(self, rank: int) -> None:
        """Kill a worker at once, with the locals of its step, its waiting calls and its messages under way."""
        engine = self._engine
        gone = engine.recovery.ranks(rank) if engine.recovery.exact else (rank,)
        dying = [engine.seats[one] for one in gone if engine.seats[one].worker.alive]
        for seat in dying:
            seat.worker.alive = seat.parked = False
            seat.generation += 1
            seat.waits_for, seat.unread = None, 0
            seat.arrivals = [-math.inf, -math.inf]
            seat.frozen_until = -math.inf  # the process that replaces it is not frozen
            if engine.messages is not None and seat.driver.running:
                engine.messages.died(seat)
            seat.driver.close()
            engine.accounts.died(seat)
            engine.recovery.died(seat.worker.rank)
        engine.choose_centre()
        if not dying:
            return
        if engine.recovery.exact:
            engine.recovery.tear(None)
            return
        engine.deliver_means(engine.means.left(rank))
        engine.deliver_met(engine.meetings.left(rank))
        if engine.servers is not None and not engine.recovery.returning:
            engine.deliver_answers(engine.servers.left(rank))

    def restart(self, rank: int) -> None:
        """Restart a worker with its cells, at the beginning of its step."""
        engine = self._engine
        if engine.recovery.exact:
            for one in engine.recovery.ranks(rank):
                engine.seats[one].worker.alive = True
            engine.choose_centre()
            engine.recovery.try_return()
            return
        seat = engine.seats[rank]
        if seat.worker.alive:
            return
        if engine.servers is None:
            if engine.messages is None and not self._take_over(seat):
                return
        elif not engine.recovery.returning and not engine.servers.missed(rank):
            return
        seat.worker.alive = True
        engine.choose_centre()
        engine.means.joined(rank)
        if engine.recovery.returning:  # it resumes with the others
            return
        if engine.servers is not None:
            engine.deliver_answers(engine.servers.joined(rank))
        if not engine.recovery.returning:  # the lead may have died inside that
            engine.begin(seat)

    def _take_over(self, seat: SimulatedWorker) -> bool:
        """Without a server a restarted worker takes the state of the others, unless it sends messages: that one has its
        own. False if it has to wait for them."""
        engine, rank = self._engine, seat.worker.rank
        near = (engine.seats[other] for other in engine.scheme.donors(rank, engine.workers))
        peer = next((other for other in near if other.worker.alive), None)
        arrivals = engine.means_under_way()  # until the last one the others are at different versions
        if not arrivals and peer is not None and peer.met and peer.driver.running:  # it takes part in a whole step only
            engine.deliver_means(engine.means.comes_later(rank))
            arrivals = engine.next_event()
        if arrivals:
            when = math.nextafter(max(arrivals), math.inf)
            engine.schedule(when, self.strike, Fault("restart", rank, when))
            return False
        if peer is None:  # no worker is alive: the newest cells
            peer = max(engine.seats, key=lambda other: (other.worker.state.v, other is seat, -other.worker.rank))
        if peer is not seat and (engine.shrink or peer.worker.state.v > seat.worker.state.v):
            engine.accounts.forgotten(seat)
            state = seat.worker.state
            own = {name: state.cell(name).clone() for name in engine.scheme.own_cells(len(state.x))}
            state.restore(peer.worker.state.saved() | own)
            seat.worker.t = peer.worker.t
            for name, buffer in peer.buffers.items():
                seat.buffers[name].copy_(buffer)
        return True


def _cut(seat: SimulatedWorker, server: int, until: float) -> None:
    seat.cuts[server] = max(seat.cuts.get(server, -math.inf), until)
    seat.disturbed_until = max(seat.disturbed_until, until)
