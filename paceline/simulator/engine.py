"""The simulator: real gradients and real calls in virtual time. A heap of events decides what happens next.

Events are ordered by (time, worker, sequence number), so equal times are settled the same way in every run.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.errors import RunError
from paceline.ops import Call, Grad, Mean, Meet, Op, Pending, Receive, Send, Sleep, Start, content, copied, nbytes
from paceline.result import Staleness
from paceline.runtime.call_scheduler import CallScheduler, Reply
from paceline.runtime.hook_calls import HookCalls
from paceline.runtime.staleness import staleness_of
from paceline.runtime.step_driver import StepDriver
from paceline.runtime.timeline import Timeline
from paceline.sampling import mixed
from paceline.scheme import Scheme
from paceline.simulator.cost import Cost
from paceline.simulator.deadlock import stuck
from paceline.simulator.every_worker import EveryWorker
from paceline.simulator.exchange_lane import ExchangeLane, exchanges
from paceline.simulator.fault_injection import FaultInjector
from paceline.simulator.faults import Fault
from paceline.simulator.gradient_stops import GradientStops
from paceline.simulator.gradients import Gradients, GradientsInFlight, SingleGradients
from paceline.simulator.hook_session import SimulatedSession
from paceline.simulator.means import MeanAnswers, SimulatedMeans
from paceline.simulator.meetings import Over, SimulatedMeetings
from paceline.simulator.messages import SimulatedMessages
from paceline.simulator.recovery import SimulatedRecovery
from paceline.simulator.servers import Servers
from paceline.simulator.simulated_worker import Accounts, Event, SimulatedWorker
from paceline.simulator.trace import SimulationTrace
from paceline.state import State, Vector
from paceline.task import Task, average_buffers
from paceline.worker import Worker


class SimulationEngine:
    """Runs `workers` copies of a scheme's step against one call scheduler. `run` may be called again to continue.

    `checkpoint_every`: the number of updates after which the chief asks for a virtual checkpoint; the start is one.
    `processes`: makes the run exact, with its workers in this number of processes.
    `batched`: gradients in flight are computed at once; times and orders are the same, values up to rounding.
    `device`: where the task computes, and where all vectors are.
    `timeline`: records what each worker does, from when to when.
    """

    def __init__(
        self,
        task: Task,
        scheme: Scheme,
        *,
        workers: int,
        seed: int,
        cost: Cost,
        faults: Sequence[Fault] = (),
        shrink: bool = True,
        servers: int = 1,
        checkpoint_every: int = 0,
        processes: int | None = None,
        batched: bool = False,
        device: torch.device | None = None,
        timeline: Timeline | None = None,
    ) -> None:
        scheme = scheme.fitted(task.parameters())
        self.task, self.scheme, self.cost, self.seed, self.shrink = task, scheme, cost, seed, shrink
        self.workers = workers
        self.now = 0.0
        self.events = self.gradients = self.samples = 0
        self.loss = math.nan  # of the last gradient
        self.stopped: str | None = None  # why a hook asked for the end
        self.recorded: list[dict[str, float]] = []  # what hooks put into the history, with update and seconds
        self._heap: list[Event] = []
        self._sequence = count()
        self._device = device or torch.device("cpu")
        self._x0 = task.start(seed).to(self._device)
        # a run without faults keeps no accounts and no checkpoints, and submits calls to the scheduler directly
        self.watched = bool(faults) or servers > 1 or checkpoint_every > 0
        self.accounts = Accounts()
        self.servers = Servers(self, scheme.server(self._x0, workers), servers, faults) if scheme.methods else None
        if self.servers is not None:
            self._submit = self.servers.submit if self.watched else self.servers.scheduler.submit
        # the workers' own x, each a row: gathered by one call where many are needed
        self._points = self._x0.repeat(workers, 1) if batched else None
        self.seats = [self._seat(rank) for rank in range(workers)]
        self.means, self.meetings = SimulatedMeans(self.seats, shrink), SimulatedMeetings(self.seats, shrink)
        self.messages = SimulatedMessages(self) if scheme.sends_messages() else None
        free = not cost.links and cost.network.latency == 0 and math.isinf(cost.network.bandwidth)
        self._free_network = free and not any(fault.action == "delay" for fault in faults)
        self._park_at: int | None = None
        self._goal = math.inf
        self.rewound = False  # the run has returned to a checkpoint: updates are counted from there
        self.stops = GradientStops(self)
        self.choose_centre()
        self.recovery = SimulatedRecovery(self, checkpoint_every, processes)
        self.injector = FaultInjector(self, faults)
        self._drawn: Gradients = SingleGradients(task)
        self._lane: ExchangeLane | None = None
        if self._points is not None:
            self._drawn = flight = GradientsInFlight(task.batched(workers, seed), workers, self._useful)
            if not self.watched and timeline is None and self._free_network and exchanges(scheme, self._x0):
                self._lane = ExchangeLane(self, flight, self._points, self._heap, self._sequence, self._on_grad)
        self.trace = SimulationTrace(timeline, self) if timeline is not None else None
        for seat in self.seats:
            self.begin(seat)

    def _seat(self, rank: int) -> SimulatedWorker:
        state = self.scheme.worker_state(self._x0, self.workers)
        if self._points is not None and "x" in state:
            state = State.over({name: state.cell(name) for name in state} | {"x": self._points[rank]})
        worker = Worker(rank, self.workers, state, self.seed)
        rng = np.random.Generator(np.random.PCG64(mixed(self.seed, "compute", rank)))
        batches = self.task.batches(rank, self.workers, self.seed)
        hooks = HookCalls((), SimulatedSession(self, worker, print))
        return SimulatedWorker(worker, StepDriver(self.scheme, worker), batches, rng, self.task.buffers(), hooks)

    @property
    def centre(self) -> State:
        """The server's state; without a server that of the lowest living worker, usually the chief; of a decentralised
        run that of the living worker with the fewest updates."""
        if self.scheme.decentralised:
            return EveryWorker(self.seats).last
        return self._chief().worker.state if self.servers is None else self.servers.state

    @property
    def scheduler(self) -> CallScheduler | None:
        """The call scheduler of the (first) server."""
        return None if self.servers is None else self.servers.scheduler

    def _chief(self) -> SimulatedWorker:
        return next((seat for seat in self.seats if seat.worker.alive), self.seats[0])

    def choose_centre(self) -> None:
        """Find the centre again; called when a worker dies or returns."""
        self._centre: State | EveryWorker = EveryWorker(self.seats) if self.scheme.decentralised else self.centre

    def model(self) -> Vector:
        """What is evaluated and saved."""
        centre = self._centre
        return centre.model(self.scheme) if isinstance(centre, EveryWorker) else self.scheme.model(self.centre)

    @property
    def updates(self) -> int:
        """How often the centre has changed."""
        return int(self.centre.v)

    @property
    def staleness(self) -> Staleness:
        """The staleness of the gradients that have entered the centre."""
        ledgers = [] if self.servers is None else [self.servers.scheduler.ledger]
        return staleness_of(ledgers, self.updates, self.gradients)

    def run(
        self,
        updates: int | None = None,
        *,
        seconds: float = math.inf,
        park_at: int | None = None,
        watch: Callable[[SimulationEngine], None] | None = None,
        watch_every: int = 1,
    ) -> None:
        """Run until the centre has changed `updates` times, `seconds` have passed, or every worker has made its first
        `park_at` steps. `watch` is called after each change of the centre; with another `watch_every` than 1 it may
        miss all but multiples of it, with 0 any."""
        self._park_at = park_at
        goal = self._goal = math.inf if updates is None else updates
        if self.servers is not None:
            self.servers.moved()
        for seat in self.seats:
            if seat.parked and seat.worker.alive:
                seat.parked = False
                self.begin(seat)
        lane = self._lane if park_at is None and not any(seat.hooks.any for seat in self.seats) else None
        heap, pop, injector = self._heap, heapq.heappop, self.injector
        last, quiet = self.updates, 0
        patience = 100_000 + 1_000 * self.workers
        with torch.no_grad():
            while (last < goal or self._unfinished()) and self.stopped is None:
                if self.events >= injector.next_event:
                    injector.before_event(self.events)
                if not heap:
                    if park_at is None:
                        raise stuck(self)
                    return
                if lane is not None and lane.open(seconds):
                    boundary = (
                        (last // watch_every + 1) * watch_every if watch is not None and watch_every else math.inf
                    )
                    if lane.run(min(goal, boundary) - 1 - last, seconds):
                        last, quiet = self._centre.v, 0
                        if watch is not None and not watch_every:
                            watch(self)
                        continue
                entry = pop(heap)
                time, rank, _, generation, handler, payload = entry
                if time > seconds:
                    heapq.heappush(heap, entry)
                    self.now = seconds
                    return
                if rank < 0:
                    self.now = time
                    handler(*payload)
                    if self.rewound:
                        self.rewound, last = False, self._centre.v
                else:
                    seat = self.seats[rank]
                    if seat.generation != generation:
                        continue  # of an earlier process: it does not even make time pass
                    self.now = time
                    if time < seat.disturbed_until and time < (held := injector.held(seat, handler, payload)):
                        # at `held` to the bit: sums of differences would reorder the events of one moment
                        heapq.heappush(heap, (held, rank, next(self._sequence), generation, handler, payload))
                        continue
                    handler(seat, *payload)
                self.events += 1
                if self.stops.watched:
                    self.stops.tell(self._centre.v)
                if self._centre.v > last:  # the worker that replaces the chief may be behind at first
                    last, quiet = self._centre.v, 0
                    if watch is not None:
                        watch(self)
                    if last < goal:
                        injector.updated(last)
                else:
                    quiet += 1
                    if quiet > patience:
                        raise RunError(f"{quiet} events without a change of the centre: nothing is ever pushed")

    def _unfinished(self) -> bool:
        """The goal is reached, but a server is behind, or has died inside a call since."""
        return self.recovery.returning or (self.servers is not None and self.servers.behind)

    @property
    def goal(self) -> float:
        """The updates after which `run` ends; infinity if none are given."""
        return self._goal

    def _useful(self) -> float:
        """About how many gradients the rest of the run can use."""
        updates = self._goal - self.updates
        return updates * (self.scheme.gradients_per_update(self.workers) or math.inf)

    @property
    def over(self) -> bool:
        """The goal is reached: servers take no more calls."""
        return bool(self._centre.v >= self._goal)

    def evaluate(self, x: Vector | None = None) -> dict[str, float]:
        """The metrics of the centre's model, or of x."""
        return self.task.evaluate(self.model() if x is None else x.to(self._device), self.model_buffers())

    def model_buffers(self) -> dict[str, Tensor] | None:
        """The buffers with which the centre's model is evaluated."""
        if not self.seats[0].buffers:
            return None
        chief = self._chief().buffers
        trained = [seat.buffers for seat in self.seats if seat.worker.alive and seat.gradients]
        rows = trained or [chief]  # not of workers that are dead or have seen no data
        return chief if self.task.buffer_policy == "chief" else average_buffers(rows)

    def begin(self, seat: SimulatedWorker) -> None:
        """Schedule a worker's next step, after the events of this moment that are in the heap already."""
        self.later(seat, 0.0, self.resume)

    def schedule(self, when: float, handler: Callable[..., None], *payload: Any) -> None:
        """Schedule an event of the whole run, before events of workers at the same moment."""
        heapq.heappush(self._heap, (when, -1, next(self._sequence), 0, handler, payload))

    def later(self, seat: SimulatedWorker, seconds: float, handler: Callable[..., None], *payload: Any) -> None:
        """Schedule an event of one worker; its death makes the event void."""
        when, rank = self.now + seconds, seat.worker.rank
        heapq.heappush(self._heap, (when, rank, next(self._sequence), seat.generation, handler, payload))

    def resume(self, seat: SimulatedWorker, answer: Any = None) -> None:
        """Run a worker until it has to wait."""
        driver, worker = seat.driver, seat.worker
        seat.waits_for = None
        while True:
            if not driver.running:
                if self.injector.struck(seat, "step", worker.t):
                    return
                if self._park_at is not None and worker.t >= self._park_at:
                    seat.parked = True
                    return
                if self.scheme.decentralised and worker.state.v >= self._goal:  # its part of the run is done
                    seat.parked = True
                    return
                if self.watched:
                    if not self.recovery.between(seat):
                        return
                    seat.version = worker.state.v
                seat.hooks.before_step()
                if self.messages is not None and self.watched:
                    self.messages.begin(seat)
                driver.begin()
                answer, seat.met = None, False
            op = driver.advance(answer)
            if op is None:
                worker.t += 1
                if self.watched:
                    self.accounts.finished(seat, counted=self.servers is None and worker.state.v > seat.version)
                if self.messages is not None:
                    self.messages.leave(seat)
                self.deliver_met(self.meetings.changed())
                seat.hooks.after_step()
                if seat.leaves is not None:  # a death without lost gradients; the last worker to leave ends the run
                    if any(other.worker.alive for other in self.seats if other is not seat):
                        self.injector.kill(worker.rank)
                    else:
                        self.stopped = seat.leaves
                    return
                if self.scheme.decentralised or worker.state is self._centre:
                    self.begin(seat)  # the run may end between two steps
                    return
                continue
            seat.awaits += 1
            if isinstance(op, Start):
                answer = self._issue(seat, copied(op.op))
            else:
                pending = op if isinstance(op, Pending) else self._issue(seat, op)
                answer = pending.result
                if pending.done and isinstance(pending.op, Mean):
                    seat.unread -= not pending.waited  # awaited twice, it was read the first time
                    pending.waited = True
                if not pending.done:
                    pending.waited, seat.waits_for = True, pending
            if self.injector.struck(seat, "await", seat.awaits) or seat.waits_for is not None:
                return

    def _issue(self, seat: SimulatedWorker, op: Op[Any]) -> Pending[Any]:
        """Begin an operation; an event completes it."""
        target: Pending[Any] = Pending(op)
        match op:
            case Grad(until=until, within=within):
                seat.issued += 1
                seconds = self.cost.compute(seat.worker.rank, seat.issued - 1, seat.rng)
                if within is not None and seconds > within:
                    self.later(seat, within, self._on_stop, op, target)
                    seconds = math.inf
                if until is not None:
                    self.stops.watch(seat, op, target)
                if seconds < math.inf:
                    self._drawn.begin(seat, op, self.now + seconds)
                    self.later(seat, seconds, self._on_grad, op, target)
            case Call():
                assert self.servers is not None
                if not op.method.atomic:
                    self.servers.begin_parts(seat, op, target)
                    return target
                seconds = self.message(seat, content(op))
                for shard in self.servers.followers:
                    self.later(seat, seconds, self.servers.arrived, shard, op)
                self.later(seat, seconds, self.on_call, op, target)
            case Mean():
                self.later(seat, self.message(seat, content(op)), self.on_mean, op, target)
            case Meet():
                seconds = self.message(seat, (content(op),) * len(op.to)) if op.to else 0.0
                self.later(seat, seconds, self.on_meet, op, target)
            case Send() if self.messages is not None:
                target.done, target.result = True, self.messages.send(seat, op)
            case Receive() if self.messages is not None:
                target.done, target.result = True, self.messages.receive(seat)
            case Sleep(seconds):
                self.later(seat, seconds, self.deliver, target, None)
        return target

    def deliver(self, seat: SimulatedWorker, target: Pending[Any], result: Any) -> None:
        """Give a worker the result of an operation."""
        if target.done or (target.waited and seat.waits_for is not target):  # an answer belongs to one await
            raise RunError(f"worker:{seat.worker.rank} was answered {target.op}, and waits for {seat.waits_for}")
        target.done, target.result = True, result
        if target.waited:
            self.resume(seat, result)

    def _on_stop(self, seat: SimulatedWorker, op: Grad, target: Pending[Any]) -> None:
        """A worker gives a gradient up, unless it is done."""
        if not target.done:
            self.stops.count += 1
            self._drawn.stop(op)
            self.deliver(seat, target, None)

    # the server's word that a gradient has become useless: a message, which faults know by its handler

    def on_told(self, seat: SimulatedWorker, op: Grad, target: Pending[Any]) -> None:
        self._on_stop(seat, op, target)

    def _on_grad(self, seat: SimulatedWorker, op: Grad, target: Pending[Any]) -> None:
        if target.done:
            return  # it was stopped
        worker = seat.worker
        loss, g, number = self._drawn.take(seat, op)
        seat.hooks.check_loss(loss)
        seat.gradients += 1
        seat.samples += number
        self.gradients += 1
        self.samples += number
        if self.watched:
            self.accounts.draw(seat)
        worker.loss = self.loss = loss
        if seat.norm.asked:
            seat.norm.measure(g)
        seat.hooks.after_gradient(loss)
        if self.stopped is None:  # otherwise this gradient may be the reason, and must not enter anything
            self.deliver(seat, target, g)

    def on_call(self, seat: SimulatedWorker, op: Call[Any], target: Pending[Any]) -> None:
        self.deliver_answers(self._submit(seat.worker.rank, op, (seat.generation, target)))

    def deliver_answers(self, answers: Sequence[Reply]) -> None:
        for rank, (generation, target), result in answers:
            seat = self.seats[rank]
            if seat.generation == generation:
                self.later(seat, self.message(seat, result, inward=True), self.on_answer, target, result)

    # faults know messages by their handlers, so answers and means have one each

    def on_answer(self, seat: SimulatedWorker, target: Pending[Any], result: Any) -> None:
        self.deliver(seat, target, result)

    def on_met(self, seat: SimulatedWorker, target: Pending[Any], result: Any) -> None:
        seat.unread += isinstance(target.op, Mean) and not target.waited
        self.deliver(seat, target, result)

    def on_mean(self, seat: SimulatedWorker, op: Mean, target: Pending[Any]) -> None:
        self.deliver_means(self.means.arrive(seat.worker.rank, op, target))

    def deliver_means(self, met: MeanAnswers) -> None:
        apart = self.injector.apart([rank for rank, _, _ in met]) - self.now if self.watched else 0.0
        for rank, target, mean in met:
            seat = self.seats[rank]
            if self.watched and self.servers is None:
                self.accounts.carried(seat)
            carried: Any = mean
            if target.op.packed is not None and target.op.packed.payloads:  # the others' payloads, of one size
                carried = (content(target.op),) * (len(met) - 1)
            self.later(seat, max(self.message(seat, carried, inward=True), apart), self.on_met, target, mean)

    def on_meet(self, seat: SimulatedWorker, op: Meet, target: Pending[Any]) -> None:
        self.deliver_met(self.meetings.arrive(seat.worker.rank, op, target))

    def deliver_met(self, over: Over) -> None:
        apart = self.injector.apart([rank for rank, _, _ in over]) - self.now if self.watched and over else 0.0
        for rank, target, result in over:
            seat, carried = self.seats[rank], (content(target.op),) * len(result.vectors)  # all of one size
            seconds = self.message(seat, carried, inward=True) if carried else 0.0
            self.later(seat, max(seconds, apart), self.on_met, target, result)

    def message(self, seat: SimulatedWorker, carried: Any, *, inward: bool = False) -> float:
        """The seconds that a message of a worker takes; `inward`: to the worker."""
        if self._free_network:
            return 0.0
        return self.injector.late(seat, inward, self.cost.message(seat.worker.rank, nbytes(carried)))

    def means_under_way(self) -> list[float]:
        """When the means arrive that are on their way to living workers; of one that has arrived and is not awaited
        yet, when the next event is."""
        arrivals = [event[0] for event in self._living_events() if event[4] == self.on_met]
        return arrivals or (self.next_event() if any(seat.unread for seat in self.seats) else [])

    def next_event(self) -> list[float]:
        """When the next event of a living worker is; nothing if there is none."""
        return sorted(event[0] for event in self._living_events())[:1]

    def _living_events(self) -> list[Event]:
        return [event for event in self._heap if event[1] >= 0 and event[3] == self.seats[event[1]].generation]
