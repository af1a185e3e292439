"""`paceline.plan`: how schemes scale on machines that are not there yet."""

from __future__ import annotations

import hashlib
import inspect
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from paceline.api.train import folder_name
from paceline.config import build
from paceline.config.options import Quorum, checked, declared
from paceline.config.planning import SAMPLES, SCHEMES, PlanningSettings
from paceline.errors import UsageError
from paceline.experiments.arms import Arm, SchemesArgument, arms_of
from paceline.experiments.length import Goal
from paceline.planning import measure, prose, report
from paceline.planning.check import checked_cells
from paceline.planning.failures import Failures
from paceline.planning.forecast import Assumptions, check_scheme, throughput, without
from paceline.planning.learning import Needed, needed_samples, sizes_within
from paceline.planning.plan_cells import ENOUGH, CheckedCell, Forecast, Known, Limit, PlanCell
from paceline.planning.sensitivity import variations
from paceline.planning.spelling import Stragglers, duration, network_of, worker_numbers
from paceline.scheme import Scheme
from paceline.task import Task

OBSTACLES = ("network", "processor", "stragglers")
SMALL_GAIN = 1.1  # an obstacle whose removal gains less is none


def plan(
    task: str | Task,
    schemes: SchemesArgument = SCHEMES,
    *,
    workers: str | Sequence[int] = "2..256",
    servers: int = 1,
    batch: int | None = None,
    network: str | Sequence[str] = "10gbit,100us",
    gpu: bool = False,
    gradient_time: str | float = "",
    stragglers: str = "measured",
    failures: float = 0.0,
    restart: float = 60.0,
    checkpoint_every: float = 60.0,
    quorum: Quorum = "shrink",
    samples: int | None = None,
    target: str = "",
    budget: float = 120.0,
    price: float = 0.0,
    sensitivity: bool = True,
    check: bool = False,
    seed: int = 0,
    directory: str | Path | None = None,
    task_options: Mapping[str, Any] | None = None,
    say: Callable[[str], None] | None = None,
    **hyper: Any,
) -> Forecast:
    """Forecast how schemes scale to numbers of workers on a `network`, a node for each worker and each server.

    Measured here: the time of a gradient (or `gradient_time`), the size of the vector, the arithmetic of each scheme
    and what messages cost the processor. Simulated: the times of every scheme, with gradients that cost nothing. What
    `failures` per node and hour cost is added by a formula. With a `target` ("accuracy=0.95") simulations with real
    gradients find how many samples it needs, for as many numbers of workers as `budget` seconds allow.

    `schemes` and `hyper` are given as to `compare`. `check` trains here, with a few workers, and compares.
    `PlanningSettings` declares every argument; docs/plan.md tells what is assumed.
    """
    arguments = locals()
    given = {name: arguments[name] for name in inspect.signature(plan).parameters if name in declared(PlanningSettings)}
    given["workers"] = workers if isinstance(workers, str) else ",".join(map(str, workers))
    given["network"] = [network] if isinstance(network, str) else list(network)
    given["gradient_time"] = str(gradient_time)
    given["directory"] = None if directory is None else str(directory)
    known = {name: value for name, value in given.items() if value is not None}
    asked = PlanningSettings(**checked("plan", PlanningSettings, known))
    return _Planning(task, schemes, asked, dict(task_options or {}), hyper, say).run()


class _Planning:
    """One call of `plan`, from its arguments to its report."""

    def __init__(
        self,
        task: str | Task,
        schemes: SchemesArgument,
        asked: PlanningSettings,
        task_options: dict[str, Any],
        hyper: dict[str, Any],
        say: Callable[[str], None] | None,
    ) -> None:
        self.asked, self.given_task, self.task_options, self.hyper, self._say = asked, task, task_options, hyper, say
        self.sizes = worker_numbers(asked.workers)
        self.networks = [network_of(text) for text in asked.network]
        self.stragglers = Stragglers.read(asked.stragglers)
        self.failures = Failures(asked.failures, asked.restart, asked.checkpoint_every, asked.quorum)
        seconds = duration(asked.gradient_time, "gradient_time") if asked.gradient_time else None
        if seconds is not None and seconds <= 0:
            raise UsageError("plan: gradient_time must be above 0")
        if seconds is not None and asked.gpu:
            raise UsageError("plan: a gradient is measured on the GPU or given: omit gpu or gradient_time")
        if asked.samples is not None and asked.target:
            raise UsageError("plan: the run ends after samples or at a target: give one of them")
        self.seconds, self.device = seconds, measure.device_of(asked.gpu)
        self.arms, self.notes = arms_of(schemes, [1], hyper)
        self.built = {arm.label: self._checked(arm) for arm in self.arms}
        self.task = build.task_of(task, task_options).configured(batch=asked.batch)
        if self.task.feed == "slice":
            raise UsageError("plan: with feed=slice the batch of a worker shrinks as workers join; use shared or shard")
        self.goal = self._goal()
        self.directory = self._directory()

    def _checked(self, arm: Arm) -> Scheme:
        scheme = arm.built()
        check_scheme(arm.label, scheme)
        for size in self.sizes:
            scheme.check(size)
        if self.asked.servers > 1 and scheme.methods and (reason := scheme.indivisible()):
            raise UsageError(f"plan: {arm.label} takes one server: {reason}")
        return scheme

    def _goal(self) -> Goal | None:
        if not self.asked.target:
            return None
        return Goal.read(self.asked.target, self.task.evaluate(self.task.start(0), self.task.buffers() or None))

    def say(self, text: str) -> None:
        if self._say is not None:
            self._say(text)
        else:
            print(text, file=sys.stderr)

    def run(self) -> Forecast:
        given = self._assumptions()
        needed = self._needed(given)
        self.say(f"simulating {len(self.arms)} schemes on {', '.join(map(str, self.sizes))} workers")
        cells = list(self._cells(given, needed))
        found = Forecast(
            task=self.task.name,
            schemes=[arm.label for arm in self.arms],
            sizes=self.sizes,
            given=given,
            failures=self.failures,
            price=self.asked.price,
            samples=None if needed is not None else self.asked.samples or SAMPLES,
            needed=needed,
            cells=cells,
            limits=list(self._limits(given, cells)),
            variations=(),
            checked=(),
            server_schemes=frozenset(label for label, scheme in self.built.items() if scheme.methods),
            notes=self._notes(given, needed),
        )
        best = found.recommended
        if self.asked.sensitivity and best is not None:
            self.say(f"varying the assumptions at {best.workers} workers")
            varied = variations(found, best, self.networks[1:], self._at(best.workers, needed))
            found = replace(found, variations=varied)
        if self.asked.check:
            found = replace(found, checked=self._check(given))
        found = replace(found, words=list(prose.paragraphs(found)))
        return report.written(self.directory, found)

    def _assumptions(self) -> Assumptions:
        if self.seconds is not None:
            gradient = measure.given_gradients(self.seconds)
        else:
            self.say(f"measuring gradients of {self.task.name} on this machine's {self.device}")
            gradient = self._gradients(self.device)
        arithmetic = {
            label: measure.arithmetic_of(scheme, self.task, self.device, 1) for label, scheme in self.built.items()
        }
        x = self.task.start(0)
        return Assumptions(
            gradient=gradient,
            batch=self.task.batch,
            vector_bytes=x.numel() * x.element_size(),
            network=self.networks[0],
            software=measure.loopback(),
            arithmetic=arithmetic,
            stragglers=self.stragglers,
            servers=self.asked.servers,
            seed=self.asked.seed,
        )

    def _gradients(self, device: str) -> measure.GradientTimes:
        if self.goal is None:
            return measure.gradient_times(self.task, device, 1)
        return measure.kept_gradients(self.task, device, self.directory)

    def _needed(self, given: Assumptions) -> Needed | None:
        if self.goal is None:
            return None
        here = given.gradient
        if here.given or here.device != "cpu":
            here = self._gradients("cpu")
        sizes, batches = sizes_within(self.asked.budget, here.mean, len(self.arms), self.sizes)
        self.say(f"training to {self.goal} in the simulator, with {', '.join(map(str, sizes))} workers")
        return needed_samples(
            self.goal,
            self.arms,
            self.given_task,
            self.task,
            given,
            sizes,
            batches,
            self.directory,
            self.task_options,
            self._say,
        )

    def _cells(self, given: Assumptions, needed: Needed | None) -> Iterator[PlanCell]:
        for size in self.sizes:
            yield from self._at(size, needed)(given)

    def _at(self, size: int, needed: Needed | None) -> Callable[..., list[PlanCell]]:
        """A function that gives the cells of a number of workers under other assumptions."""

        def cells(given: Assumptions, failures: Failures | None = None) -> list[PlanCell]:
            return [self._cell(arm.label, size, given, needed, failures or self.failures) for arm in self.arms]

        return cells

    def _cell(
        self, label: str, workers: int, given: Assumptions, needed: Needed | None, failures: Failures
    ) -> PlanCell:
        scheme = self.built[label]
        shown = throughput(label, scheme, workers, given)
        servers = given.servers if scheme.methods else 0
        window = max(1.0, (scheme.gradients_per_update(workers) or workers) / workers)
        step = window * workers * given.batch / shown.samples_per_second
        kept = failures.kept(workers=workers, servers=servers, step=step)
        rate = shown.samples_per_second * kept
        samples: float | None = self.asked.samples or SAMPLES
        known: Known = "simulated"
        if needed is not None:
            samples, simulated = needed.of(label, workers)
            known = "not reached" if samples is None else "simulated" if simulated else "at least"
        seconds = None if samples is None else samples / rate
        nodes = workers + servers
        return PlanCell(
            scheme=label,
            workers=workers,
            nodes=nodes,
            bare=shown.samples_per_second,
            rate=rate,
            efficiency=rate / (workers * given.batch / given.gradient_seconds),
            kept=kept,
            staleness=shown.staleness,
            samples=samples,
            seconds=seconds,
            known=known,
            cost=seconds / 3600 * nodes * self.asked.price if self.asked.price and seconds is not None else None,
        )

    def _limits(self, given: Assumptions, cells: Sequence[PlanCell]) -> Iterator[Limit]:
        """What bounds each scheme at the largest number of workers: the obstacle whose absence gains most, and the one
        that is in the way then."""
        last = self.sizes[-1]
        for arm in self.arms:
            own = {one.workers: one for one in cells if one.scheme == arm.label}
            enough = [size for size, one in own.items() if one.efficiency >= ENOUGH]
            obstacles: list[str] = []
            freed, rate = given, own[last].bare
            for _ in range(2):
                rates = {
                    what: throughput(arm.label, self.built[arm.label], last, without(what, freed)).samples_per_second
                    for what in OBSTACLES
                    if what not in obstacles
                }
                most = max(rates, key=lambda name: rates[name])
                if rates[most] < SMALL_GAIN * rate:
                    break
                obstacles.append(most)
                freed, rate = without(most, freed), rates[most]
            if own[last].kept < 1 / SMALL_GAIN:
                obstacles.append("failures")
                rate /= own[last].kept
            yield Limit(arm.label, max(enough, default=None), tuple(obstacles), rate / own[last].bare)

    def _check(self, given: Assumptions) -> list[CheckedCell]:
        self.say("training on this machine to check the forecast")
        return checked_cells(self.given_task, self.task, self.built, given, self.task_options, self.say)

    def _notes(self, given: Assumptions, needed: Needed | None) -> list[str]:
        notes = list(self.notes) + ([self.task.notice] if self.task.notice else [])
        if given.gradient.torn:
            notes.append(
                f"this machine was busy: during {given.gradient.torn} of {len(given.gradient.seconds)} gradients other "
                "processes had the core, and of these only the time of the processor counts"
            )
        if needed is not None:
            notes += [f"{label}: {reason}" for label, reason in needed.reasons.items()]
        return notes

    def _directory(self) -> Path:
        if self.asked.directory is not None:
            return Path(self.asked.directory).absolute()
        arms = [(arm.label, arm.scheme, dict(arm.hyper)) for arm in self.arms]
        plain = {**asdict(self.asked), "arms": arms, "task": self.task.name, "options": self.task_options}
        text = json.dumps(plain, sort_keys=True, default=str)
        name = f"{folder_name(self.task.name)}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
        return Path("plans").absolute() / name
