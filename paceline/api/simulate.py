"""`paceline.simulate`: trains a task under a scheme in virtual time."""

import dataclasses
import math
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from paceline.compressor import Compressor
from paceline.compute_times import ComputeTime, parse_times
from paceline.config import build, work
from paceline.config.exact import check_task, settled
from paceline.config.optimizer_argument import OptimizerArgument, ScheduleArgument, with_optimizer
from paceline.config.options import Quorum, checked, declared
from paceline.config.simulation import Simulation
from paceline.config.validate import check_device
from paceline.errors import RunError, UsageError
from paceline.fields import Feed
from paceline.hook import Hook
from paceline.inside import kind
from paceline.inside.sliced_task import sliced
from paceline.report import chrome_trace
from paceline.report.simulation_progress import progress
from paceline.result import Evaluations, Point, Result, epochs_of
from paceline.runtime.timeline import Timeline
from paceline.runtime.traffic import traffic_of
from paceline.schedules import Unit
from paceline.scheme import Scheme
from paceline.simulator.cost import Cost, NetworkLink, parse_link, parse_links
from paceline.simulator.engine import SimulationEngine
from paceline.simulator.faults import Fault, RunSize, check_faults, planned
from paceline.simulator.hook_session import hooked
from paceline.task import Task

Watch = Callable[[SimulationEngine], None]
OBJECTS = {
    "compress",
    "hooks",
    "compute",
    "network",
    "links",
    "access",
    "faults",
    "trace",
}  # settings that may be objects or strings


class StabilityWarning(UserWarning):
    """Values beyond a known limit of stability."""


def simulate(
    task: str | Task,
    scheme: str | Scheme | type[Scheme],
    *,
    workers: int | None = None,
    steps: int = 1000,
    samples: int | None = None,
    epochs: float | None = None,
    batch: int | None = None,
    seed: int = 0,
    compress: str | Compressor = "",
    exact: bool = False,
    micro: int | None = None,
    inside: str = "",
    compute: str | float | ComputeTime = "constant:1.0",
    speeds: Sequence[float] = (),
    network: str | NetworkLink = "",
    links: Iterable[str] | Mapping[int, NetworkLink] = (),
    access: str | float | ComputeTime = "exponential:0.1",
    faults: Iterable[str | Fault] = (),
    quorum: Quorum | None = None,
    servers: int = 1,
    checkpoint_steps: int = 0,
    feed: Feed | None = None,
    shuffle: bool | None = None,
    task_options: Mapping[str, Any] | None = None,
    seconds: float = math.inf,
    every: int = 0,
    curvature: float | None = None,
    batched: bool = False,
    device: str = "cpu",
    threads: int = 1,
    warn: Callable[[str], None] | None = None,
    watch: Watch | None = None,
    hooks: Iterable[str | Hook] = (),
    say: Callable[[str], None] | None = None,
    optimizer: OptimizerArgument | None = None,
    schedule: ScheduleArgument | None = None,
    schedule_unit: Unit = "updates",
    trace: str | Path | Timeline | None = None,
    **hyper: Any,
) -> Result:
    """Train in virtual time until the centre has had `steps` updates (or `seconds` of virtual time have passed).

    Gradients are real, time is not: `compute` says how long one takes, `network` and `links` how long messages take,
    `faults` what fails and when. Some faults roll the run back to its newest virtual checkpoint: that of the start, or
    one that is made every `checkpoint_steps` updates. The vector may be sharded over several `servers`.
    Hyper-parameters of the scheme follow by name: `window=5, rule="adam"`. Equal arguments give equal bits.
    `Simulation` declares every argument. `samples` or `epochs` in place of `steps` give schemes equal work: they are
    converted to updates, rounded up.

    With `exact` every batch is split into `micro` parts (default: 8), each a worker of its own in virtual time: the
    bits are those of exact runs of `train`. `every` sets the updates between two evaluations; `watch` is called after
    every update, in place of the progress bar of terminals and notebooks; `hooks` run around the workers' steps
    (`"target:value=0.9"`) and write messages by `say`.

    `batched` computes the gradients that are in flight in one call of torch.func.vmap: times, orders and staleness are
    the same, values are equal to rounding. `device`: where the run computes and keeps its vectors ("cuda").

    `compress` is a compressor for what workers send ("topk:0.01"), which messages of the network see:
    docs/compression.md.

    `optimizer`, of torch.optim or a function of the model, takes the place of the scheme's rule; `schedule` (a function
    of the optimizer, or text) counts `schedule_unit`: docs/optimizers.md.

    `trace` is a file for a trace that Perfetto and Chrome show, or a `Timeline` that is filled: `Timeline(until=20.0)`
    has what each worker did (gradient, wait, call, mean, …) in the first 20 units of virtual time: docs/trace.md.
    """
    arguments = locals()
    given = {name: arguments[name] for name in declared(Simulation) if name not in OBJECTS}
    given = work.one_unit(given, default=Simulation.steps)
    asked = checked("simulate", Simulation, {name: value for name, value in given.items() if value is not None})
    chosen = build.compressing(build.scheme_of(scheme, hyper), compress)
    settings = settled(asked, chosen, 1 if chosen.alone else 4)
    crew, curvature = settings["workers"], settings.get("curvature")
    chosen.check(crew)
    job = build.task_of(task, task_options or {}).configured(
        batch=settings.get("batch"), feed=settings.get("feed"), shuffle=settings.get("shuffle")
    )
    kind.check(settings["inside"], exact=exact, device=settings["device"])
    job = sliced(job, settings["inside"])
    place = _placed(settings["device"])
    length = {unit: settings[unit] for unit in ("samples", "epochs") if unit in settings}
    steps = settings.get("steps", steps)
    if length:
        steps = work.in_updates(chosen, crew, job.batch, job.feed, job.epoch_size, **length)
    chosen = build.scheme_of(chosen, work.counted(chosen, crew, job))
    if optimizer is not None or schedule is not None:
        given = with_optimizer(chosen, hyper, job, crew, steps, optimizer, schedule, schedule_unit)
        chosen = build.scheme_of(chosen, given)
        chosen.check(crew)
    cost = Cost(
        compute_law=_law(compute),
        network=parse_link(network) if isinstance(network, str) else network,
        speeds=settings["speeds"],
        links=links if isinstance(links, Mapping) else parse_links(_listed(links)),
        access=_law(access),
    )
    cost.check(crew)
    timeline = trace if isinstance(trace, Timeline) else None if trace is None else chrome_trace.for_file(trace)
    crew_hooks = [build.hook_of(hook) for hook in _listed(hooks)]
    if settings["batched"]:
        _check_batched(crew_hooks, exact=exact)
    servers = _servers(chosen, settings["servers"])
    there = RunSize(settings["processes"] if exact else crew, servers if chosen.methods else 0, steps)
    struck = planned(_listed(faults), there)
    check_faults(struck, there.workers, there.servers)
    shown: dict[str, Any] = {"batched": settings["batched"], "device": settings["device"]}
    if exact:
        shown |= {"workers": settings["processes"], "micro": crew}
    if exact:
        check_task(job, crew)
    said = list(chosen.warnings(crew, job.curvature() if curvature is None else curvature))
    if chosen.asynchronous and not chosen.fair and job.heterogeneous and len(set(cost.speeds)) > 1:
        said.append(
            "workers of different speed on different data: asynchronous pushes favour the fast workers' optimum; "
            "rescaled, ringleader, ace and malenia do not"
        )
    said.extend(job.warnings(crew))
    if chosen.compressor is not None:
        said.extend(chosen.compressor.warnings())
    for text in said:
        if warn is None:
            warnings.warn(text, StabilityWarning, stacklevel=2)
        else:
            warn(text)
    if place.type != "cpu":
        job = job.on(place)
    # random numbers of a GPU are those of the current one
    current = torch.cuda.device(place) if place.type == "cuda" else nullcontext()
    with torch_threads(settings["threads"]), current:
        engine = SimulationEngine(
            job,
            chosen,
            workers=crew,
            seed=settings["seed"],
            cost=cost,
            faults=struck,
            shrink=settings.get("quorum") != "hold",
            servers=servers,
            checkpoint_every=settings["checkpoint_steps"],
            processes=settings["processes"] if exact else None,
            batched=settings["batched"],
            device=place,
            timeline=timeline,
        )
        history = Evaluations()
        try:
            # `print` is bound inside: where a bar is drawn, it writes above the bar
            with _bar(watch, engine) as look, hooked(engine, crew_hooks, say or partial(print, file=sys.stderr)):
                after_update = _watching(look, settings["every"], history)
                # a bar need not see every update
                pace = settings["every"] if not getattr(look, "every", look is not None) else 1
                engine.run(steps, seconds=settings["seconds"], watch=after_update, watch_every=pace)
        except RunError as error:
            error.result = dataclasses.replace(_result(engine, {}, history, said), **shown)
            raise
        finally:
            if engine.trace is not None and timeline is not None:
                engine.trace.finish()
                timeline.about |= _about(engine)
                if isinstance(trace, str | Path):
                    chrome_trace.write(timeline, Path(trace))
        return dataclasses.replace(_result(engine, engine.evaluate(), history, said), **shown)


def _about(engine: SimulationEngine) -> dict[str, Any]:
    """What a timeline says of its run."""
    told = {"scheme": engine.scheme.name, "task": engine.task.name, "workers": engine.workers, "seed": engine.seed}
    return told | {"updates": engine.updates, "gradients": engine.gradients}


def _bar(watch: Watch | None, engine: SimulationEngine) -> AbstractContextManager[Watch | None]:
    """The caller's own function, or the bar of a terminal or notebook."""
    if watch is not None:
        return nullcontext(watch)
    return progress(Console(stderr=True), f"{engine.scheme.name} on {engine.task.name}")


def _servers(scheme: Scheme, servers: int) -> int:
    if servers > 1 and not scheme.methods:
        raise UsageError(f"{scheme.name} has no server: {servers} were asked for")
    if servers > 1 and (reason := scheme.indivisible()):
        raise UsageError(f"{scheme.name} takes one server: {reason}")
    return servers


def _placed(device: str) -> torch.device:
    check_device("device", device)
    if device != "cpu" and not torch.cuda.is_available():
        raise UsageError(f"device {device!r} was asked for, but torch finds no GPU here; omit --device")
    return torch.device(device)


def _check_batched(hooks: Sequence[Hook], *, exact: bool) -> None:
    if exact:
        raise UsageError("an exact run has the bits of single gradients, and batched ones differ by rounding; omit one")
    for hook in hooks:
        if type(hook).feed is not Hook.feed:
            raise UsageError(
                f"the hook {hook.name!r} changes a batch at the moment at which its gradient is due; batched gradients "
                "are computed before that: omit batched, or the hook"
            )


def _law(given: str | float | ComputeTime) -> ComputeTime:
    return given if isinstance(given, ComputeTime) else parse_times(str(given))


def _listed(given: Iterable[Any]) -> list[Any]:
    """A list, also of one item that was given alone."""
    return [given] if isinstance(given, str | Hook | Fault) else list(given)


def _watching(watch: Watch | None, every: int, history: Evaluations) -> Watch | None:
    if every <= 0:
        return watch

    def after_update(engine: SimulationEngine) -> None:
        if engine.updates % every == 0:
            history.append(Point(engine.updates, engine.now, engine.evaluate()))
        if watch is not None:
            watch(engine)

    return after_update


def _result(engine: SimulationEngine, metrics: dict[str, float], history: Evaluations, said: list[str]) -> Result:
    task, scheduler = engine.task, engine.scheduler
    if engine.recovery.returning:  # it ended during a return to a checkpoint: the state of a dead server is no result
        engine.recovery.restore()
    return Result(
        scheme=engine.scheme.name,
        task=task.name,
        workers=engine.workers,
        updates=engine.updates,
        gradients=engine.gradients,
        samples=engine.samples,
        epochs=epochs_of(engine.samples, task.epoch_size),
        virtual_seconds=engine.now,
        staleness=engine.staleness,
        metrics=metrics,
        vector=engine.model().to("cpu", copy=True),
        dropped=0 if scheduler is None else scheduler.ledger.cells.refused,
        seed=engine.seed,
        batch=task.batch,
        hyper=build.hyper_of(engine.scheme),
        history=history,
        warnings=said,
        notice=task.notice,
        stopped=engine.stopped,
        servers=engine.servers.number if engine.watched and engine.servers is not None else 0,
        rolled_back_updates=engine.recovery.rolled_back if engine.watched else None,
        traffic=traffic_of([seat.driver.traffic for seat in engine.seats]),
        compress=str(engine.scheme.compressor or ""),
        fates=engine.accounts.closed(engine.seats) if engine.watched else None,
    )


@contextmanager
def torch_threads(number: int) -> Iterator[None]:
    """Set the number of torch's threads while inside: it can change the bits of a sum."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
