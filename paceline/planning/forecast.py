"""The forecast of one cell of a plan: a scheme on a number of workers, in virtual time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from paceline.compute_times import ComputeTime, Constant
from paceline.config import build
from paceline.errors import UsageError
from paceline.planning.laws import WINDOW, SumOf, forecast_law
from paceline.planning.measure import Arithmetic, GradientTimes, Software
from paceline.planning.spelling import Stragglers
from paceline.planning.timed_engine import MessageCosts, TimedEngine
from paceline.planning.timing_task import TimingTask
from paceline.scheme import Scheme
from paceline.simulator.cost import Cost, NetworkLink
from paceline.simulator.engine import SimulationEngine

NUMBERS = 2048  # of the simulated vector: it stands for one of any length
LEAST = 1600  # gradients of a cell
EACH = 10  # gradients of each worker of a cell, at least; as many again are not counted, as the start is not typical


@dataclass(frozen=True)
class Assumptions:
    """All that a forecast is made from, but for the scheme and the number of workers."""

    gradient: GradientTimes
    batch: int
    vector_bytes: int
    network: NetworkLink
    software: Software
    arithmetic: Mapping[str, Arithmetic]  # by the label of the scheme
    stragglers: Stragglers = field(default_factory=Stragglers)
    servers: int = 1
    gradient_factor: float = 1.0  # of the gradient's time, for "what if"
    seed: int = 0

    @property
    def gradient_seconds(self) -> float:
        return self.gradient.mean * self.gradient_factor

    def law(self) -> ComputeTime:
        return forecast_law(self.gradient.law, self.gradient_seconds, self.stragglers)


@dataclass(frozen=True)
class Throughput:
    """What a simulation of a cell has shown."""

    samples_per_second: float
    gradients: int
    seconds: float  # virtual
    staleness: float


def throughput(label: str, scheme: Scheme, workers: int, given: Assumptions) -> Throughput:
    """Simulate the times of a scheme, with gradients that cost nothing and a short vector in place of the real one."""
    arithmetic = given.arithmetic[label]
    shown, times = coarsened(scheme)
    length = max(1, min(NUMBERS, given.vector_bytes // 4))
    costs = MessageCosts(
        network=given.network,
        scale=given.vector_bytes / (4 * length),
        per_message=given.software.per_message,
        per_byte=given.software.per_byte,
        calls=arithmetic.calls,
        servers=given.servers if scheme.methods else 1,
    )
    law = SumOf(given.law(), times, arithmetic.worker)
    return simulated(shown, workers, TimingTask(length, given.batch * times), law, given, costs)


def simulated(
    scheme: Scheme, workers: int, task: TimingTask, law: ComputeTime, given: Assumptions, costs: MessageCosts
) -> Throughput:
    """Measure from the moment at which every worker has made some gradients, on average, to the end."""
    cost = Cost(law, speeds=given.stragglers.speeds(workers))
    window = scheme.gradients_per_update(workers) or workers
    counted = max(LEAST, EACH * workers, 4 * window)
    begin = max(EACH * workers, window)
    meter = _Meter(begin, counted)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        engine = TimedEngine(task, scheme, workers=workers, seed=given.seed, cost=cost, costs=costs)
        engine.run(watch=meter)
    finally:
        torch.set_num_threads(before)
    seconds = engine.now - meter.since
    rate = (engine.samples - meter.samples) / seconds if seconds > 0 else math.inf
    return Throughput(rate, engine.gradients, engine.now, engine.staleness.mean)


class _Meter:
    """Looks at a simulation after each update: from where it counts, and when it has seen enough."""

    def __init__(self, begin: float, counted: float) -> None:
        self._next, self._counted, self._counting = begin, counted, False
        self.since, self.samples = 0.0, 0

    def __call__(self, engine: SimulationEngine) -> None:
        if engine.gradients < self._next:
            return
        if self._counting:
            engine.stopped = "counted"
            return
        self._counting, self._next = True, engine.gradients + self._counted
        self.since, self.samples = engine.now, engine.samples


def coarsened(scheme: Scheme) -> tuple[Scheme, int]:
    """A scheme of local steps with a shorter window, and how many gradients one of its gradients stands for: between
    two exchanges nothing happens, so the time of a window is a sum. The sum is drawn exactly."""
    window = getattr(scheme, "window", None)
    local = scheme.family == "local updates" and not scheme.methods and isinstance(window, int)
    if not local or not isinstance(window, int) or window <= 2 * WINDOW or scheme.gradients_per_update(2) != 2 * window:
        return scheme, 1
    parts = next((parts for parts in range(WINDOW, 2 * WINDOW) if window % parts == 0), None)
    if parts is None:
        return scheme, 1
    return build.scheme_of(scheme, {"window": parts}), window // parts


def check_scheme(label: str, scheme: Scheme) -> None:
    """Refuse what is not for separate machines."""
    if scheme.alone:
        raise UsageError(f"plan: {label} has one worker: there is nothing to scale")
    for method in scheme.methods.values():
        if not method.atomic:
            raise UsageError(
                f"plan: {label} works in the shared memory of one machine; a plan is for separate nodes: omit it"
            )


def without(what: str, given: Assumptions) -> Assumptions:
    """The assumptions with one obstacle gone: `network`, `processor` (what messages and calls cost it) or
    `stragglers`."""
    if what == "network":
        return replace(given, network=NetworkLink())
    if what == "processor":
        free = {label: Arithmetic(one.worker) for label, one in given.arithmetic.items()}
        return replace(given, software=Software(0.0, 0.0), arithmetic=free)
    return replace(given, stragglers=Stragglers(Constant(1.0)))
