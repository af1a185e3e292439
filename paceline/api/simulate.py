"""`paceline.simulate`: a scheme on a task in virtual time, from names to a Result."""

from __future__ import annotations

import dataclasses
import math
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch

from paceline.config import build
from paceline.config.exact import check_task, settled
from paceline.errors import RunError, UsageError
from paceline.fields import converted
from paceline.hook import Hook
from paceline.result import Point, Result
from paceline.scheme import Scheme
from paceline.simulator.cost import ComputeTime, Cost, NetworkLink, parse_link, parse_links, parse_times
from paceline.simulator.engine import SimulationEngine
from paceline.simulator.fault_schedule import RunSize, planned
from paceline.simulator.faults import Fault, check_faults
from paceline.simulator.hook_session import Hooked
from paceline.task import Feed, Task

Watch = Callable[[SimulationEngine], None]


class StabilityWarning(UserWarning):
    """Values that cross a known limit of stability."""


def simulate(
    task: str | Task,
    scheme: str | Scheme | type[Scheme],
    *,
    workers: int | None = None,
    steps: int = 1000,
    batch: int | None = None,
    seed: int = 0,
    exact: bool = False,
    micro: int | None = None,
    compute: str | float | ComputeTime = "constant:1.0",
    speeds: Sequence[float] = (),
    network: str | NetworkLink = "",
    links: Iterable[str] | Mapping[int, NetworkLink] = (),
    access: str | float | ComputeTime = "exponential:0.1",
    faults: Iterable[str | Fault] = (),
    quorum: Literal["shrink", "hold"] | None = None,
    servers: int = 1,
    checkpoint_steps: int = 0,
    feed: Feed | None = None,
    shuffle: bool | None = None,
    task_options: Mapping[str, Any] | None = None,
    seconds: float = math.inf,
    every: int = 0,
    curvature: float | None = None,
    threads: int = 1,
    warn: Callable[[str], None] | None = None,
    watch: Watch | None = None,
    hooks: Iterable[str | Hook] = (),
    say: Callable[[str], None] | None = None,
    **hyper: Any,
) -> Result:
    """Train in virtual time until the centre has had `steps` updates (or `seconds` of virtual time have passed).

    Gradients are real, time is not: `compute` says how long one takes, `network` and `links` how long messages take,
    `faults` what goes wrong and when. A run that a fault sets back returns to the newest virtual checkpoint: that of
    the start, or one that is made every `checkpoint_steps` updates. The vector may be cut among several `servers`.
    Hyper-parameters of the scheme follow by name: `window=5, rule="adam"`. Equal arguments give equal bits.

    With `exact` every batch is cut in `micro` parts (default: 8), each a worker of its own in virtual time: the bits
    are those of exact runs of `train`. `every` evaluates on the way; `watch` is called after every update; `hooks` run
    around the workers' steps (`"target:value=0.9"`) and tell people things by `say`.
    """
    if quorum not in (None, "shrink", "hold"):
        raise UsageError(f"quorum must be shrink or hold, not {quorum!r}")
    steps, threads, every = _whole("steps", steps, 1), _whole("threads", threads, 1), _whole("every", every, 0)
    seconds = converted("simulate", "seconds", seconds, float)
    if not seconds > 0:
        raise UsageError(f"seconds must be above 0, not {seconds}")
    if curvature is not None and not 0 <= converted("simulate", "curvature", curvature, float) < math.inf:
        raise UsageError(f"curvature must be a finite number of at least 0, not {curvature}")
    chosen = build.scheme_of(scheme, hyper)
    asked = {"exact": exact, "micro": micro, "workers": workers, "feed": feed, "quorum": quorum}
    wholes = {name: _whole(name, asked[name], 1) for name in ("micro", "workers") if asked[name] is not None}
    given = {name: value for name, value in asked.items() if value is not None} | wholes
    settings = settled(given, chosen, 1 if chosen.alone else 4)
    crew, feed, quorum = settings["workers"], settings.get("feed"), settings.get("quorum")
    chosen.check(crew)
    cost = Cost(
        compute_law=_law(compute),
        network=parse_link(network) if isinstance(network, str) else network,
        speeds=converted("simulate", "speeds", speeds, tuple[float, ...]),
        links=links if isinstance(links, Mapping) else parse_links(_listed(links)),
        access=_law(access),
    )
    cost.check(crew)
    crew_hooks = [build.hook_of(hook) for hook in _listed(hooks)]
    servers, saves = _servers(chosen, servers), _whole("checkpoint_steps", checkpoint_steps, 0)
    there = RunSize(settings["processes"] if exact else crew, servers if chosen.methods else 0, steps)
    struck = planned(_listed(faults), there)
    check_faults(struck, there.workers, there.servers)
    shown: dict[str, Any] = {"workers": settings["processes"], "micro": crew} if exact else {}
    job = build.task_of(task, task_options or {}).configured(batch=batch, feed=feed, shuffle=shuffle)
    if exact:
        check_task(job, crew)
    said = list(chosen.warnings(crew, job.curvature() if curvature is None else curvature))
    if chosen.asynchronous and job.heterogeneous and len(set(cost.speeds)) > 1:
        said.append(
            "workers of different speed on different data: asynchronous pushes favour the fast workers' optimum"
        )
    for text in said:
        if warn is None:
            warnings.warn(text, StabilityWarning, stacklevel=2)
        else:
            warn(text)
    with _threads(threads):
        engine = SimulationEngine(
            job,
            chosen,
            workers=crew,
            seed=seed,
            cost=cost,
            faults=struck,
            shrink=quorum != "hold",
            servers=servers,
            checkpoint_every=saves,
            processes=settings["processes"] if exact else None,
        )
        history: list[Point] = []
        try:
            with Hooked(engine, crew_hooks, say or _to_stderr):
                engine.run(steps, seconds=seconds, watch=_watching(watch, every, history))
        except RunError as error:
            error.result = dataclasses.replace(_result(engine, {}, history, said), **shown)
            raise
        return dataclasses.replace(_result(engine, engine.evaluate(), history, said), **shown)


def _whole(name: str, value: Any, low: int) -> int:
    number: int = converted("simulate", name, value, int)
    if number < low:
        raise UsageError(f"{name} must be at least {low}, not {number}")
    return number


def _servers(scheme: Scheme, given: int) -> int:
    servers = _whole("servers", given, 1)
    if servers > 1 and not scheme.methods:
        raise UsageError(f"{scheme.name} has no server: {servers} were asked for")
    if servers > 1 and (reason := scheme.whole()):
        raise UsageError(f"{scheme.name} takes one server: {reason}")
    return servers


def _law(given: str | float | ComputeTime) -> ComputeTime:
    return given if isinstance(given, ComputeTime) else parse_times(str(given))


def _listed(given: Iterable[Any]) -> list[Any]:
    """A list, also of one text that came alone."""
    return [given] if isinstance(given, str | Hook | Fault) else list(given)


def _watching(watch: Watch | None, every: int, history: list[Point]) -> Watch | None:
    if every <= 0:
        return watch

    def after_update(engine: SimulationEngine) -> None:
        if engine.updates % every == 0:
            history.append(Point(engine.updates, engine.now, engine.evaluate()))
        if watch is not None:
            watch(engine)

    return after_update


def _result(engine: SimulationEngine, metrics: dict[str, float], history: list[Point], said: list[str]) -> Result:
    task, desk = engine.task, engine.desk
    if engine.recovery.returning:  # it ended on its way back: what a dead server has left is no result
        engine.recovery.restore()
    return Result(
        scheme=engine.scheme.name,
        task=task.name,
        workers=engine.workers,
        updates=engine.updates,
        gradients=engine.gradients,
        samples=engine.samples,
        virtual_seconds=engine.now,
        staleness=engine.staleness,
        metrics=metrics,
        vector=engine.scheme.model(engine.centre).clone(),
        dropped=0 if desk is None else desk.ledger.cells.refused,
        seed=engine.seed,
        batch=task.batch,
        hyper=build.hyper_of(engine.scheme),
        history=history,
        warnings=said,
        notice=task.notice,
        stopped=engine.stopped,
        servers=engine.servers.number if engine.watched and engine.servers is not None else 0,
        rolled_back_updates=engine.recovery.rolled_back if engine.watched else None,
        fates=engine.accounts.closed(engine.seats) if engine.watched else None,
    )


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr)


@contextmanager
def _threads(number: int) -> Iterator[None]:
    """So many threads for torch, and as before afterwards: the number can change the bits of a sum."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
