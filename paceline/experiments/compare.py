"""`paceline.compare`: many runs of several schemes on equal work, and a report of what differs."""

from __future__ import annotations

import fcntl
import hashlib
import inspect
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import paceline
from paceline.api.simulate import simulate as simulated
from paceline.api.train import folder_name
from paceline.compute_times import parse_times
from paceline.config import build
from paceline.config.comparison import ComparisonSettings
from paceline.config.options import checked, declared
from paceline.config.validate import planned
from paceline.errors import UsageError
from paceline.experiments import report
from paceline.experiments.arms import Arm, SchemesArgument, Sweep, arms_of
from paceline.experiments.cells import CellOutcome, RunCell
from paceline.experiments.child import updates_of
from paceline.experiments.comparison import Comparison
from paceline.experiments.length import Length, length_of
from paceline.experiments.pool import CellPool
from paceline.experiments.progress import CellProgress, shown_progress
from paceline.experiments.staleness_theory import ExpectedStaleness, expected_staleness
from paceline.experiments.summary import ArmSummary, Findings
from paceline.experiments.tuning import Tuned, tuned
from paceline.fields import Feed, finite
from paceline.runs.atomic_files import write_json
from paceline.task import Task

SHARED = ("servers", "batch", "feed", "compress", "exact", "micro")  # settings of runs in both worlds
VIRTUAL = ("compute", "speeds", "network", "batched", "faults")
NO_TIME = 1e-9  # virtual seconds, in which nothing happens


def compare(
    task: str | Task,
    schemes: SchemesArgument,
    *,
    workers: int | Sequence[int] = 4,
    servers: int = 1,
    real: bool = False,
    simulate: bool = False,
    seeds: int = 3,
    seed: int = 0,
    samples: int | None = None,
    seconds: float | None = None,
    target: str = "",
    sweep: Iterable[str] | Mapping[str, Iterable[Any]] = (),
    budget: float = 0.5,
    batch: int | None = None,
    feed: Feed | None = None,
    compress: str = "",
    exact: bool = False,
    micro: int | None = None,
    compute: str = "exponential:1.0",
    speeds: Sequence[float] = (),
    network: str = "",
    batched: bool = False,
    faults: Iterable[str] = (),
    points: int = 30,
    jobs: int | None = None,
    directory: str | Path | None = None,
    task_options: Mapping[str, Any] | None = None,
    say: Callable[[str], None] | None = None,
    **hyper: Any,
) -> Comparison:
    """Compare schemes on a task: each is run with `seeds` seeds, on equal work (`samples`), for equal time (`seconds`),
    or until a `target` is reached ("accuracy=0.97"). Runs are simulated, or real processes with `real`.

    `schemes`: names, "sync,async" or a list; classes and objects; or a dictionary that gives each a label.
    `sweep={"lr": (0.01, 0.03, 0.1)}` chooses the best value for each scheme, by runs of `budget` times the length with
    a seed of their own. Without it every scheme has its own values, or those in `hyper`: `lr=0.1` is for all schemes
    that have it; `**{"downpour.lr": 0.02}` for one.

    The outcome of every run is kept in `directory`, which has the page, figures and tables in the end. The same call
    goes on where it was interrupted. `ComparisonSettings` declares every argument.
    """
    arguments = locals()
    words = [f"{k}={','.join(map(str, v))}" for k, v in sweep.items()] if isinstance(sweep, Mapping) else list(sweep)
    given = {
        name: arguments[name] for name in inspect.signature(compare).parameters if name in declared(ComparisonSettings)
    }
    given |= {"sweep": words, "workers": _numbers(workers), "speeds": tuple(speeds), "faults": list(faults)}
    given["directory"] = None if directory is None else str(directory)
    known = {name: value for name, value in given.items() if value is not None}
    asked = ComparisonSettings(**checked("compare", ComparisonSettings, known))
    if asked.real and asked.simulate:
        raise UsageError("runs are real or simulated: give one of real and simulate")
    _check_world(asked)
    return _Experiment(task, schemes, asked, dict(task_options or {}), hyper, say).run()


def _numbers(given: int | Sequence[int]) -> tuple[int, ...]:
    return (given,) if isinstance(given, int) else tuple(given)


def _check_world(asked: ComparisonSettings) -> None:
    if not asked.real:
        return
    defaults = ComparisonSettings()
    for name in VIRTUAL:
        if getattr(asked, name) != getattr(defaults, name):
            raise UsageError(f"{name} is of the simulator: omit it, or omit real")


class _Experiment:
    """One call of `compare`, from its arguments to its report."""

    def __init__(
        self,
        task: str | Task,
        schemes: SchemesArgument,
        asked: ComparisonSettings,
        task_options: dict[str, Any],
        hyper: dict[str, Any],
        say: Callable[[str], None] | None,
    ) -> None:
        self.asked, self.task_options, self._say = asked, task_options, say
        self.given_task = task
        self.arms, self.notes = arms_of(schemes, asked.workers, hyper)
        self.hyper = hyper
        self.sweep = Sweep.read(asked.sweep)
        self.task = build.task_of(task, task_options).configured(batch=asked.batch, feed=asked.feed)
        self.start = self.task.evaluate(self.task.start(asked.seed), self.task.buffers() or None)
        self.length = length_of(asked, self.task, self.start)
        self.metric = self._metric()
        self.seeds = list(range(asked.seed, asked.seed + asked.seeds))
        self.settings = {name: getattr(asked, name) for name in SHARED if getattr(asked, name) is not None}
        if not asked.real:
            self.settings |= {name: getattr(asked, name) for name in VIRTUAL}
        self.identity = self._identity()
        self._check_arms()

    def _metric(self) -> str:
        if self.length.target is not None:
            return self.length.target.metric
        return "accuracy" if "accuracy" in self.start else "loss"

    def _identity(self) -> dict[str, Any]:
        """What determines outcomes beside the settings: changed code of a task must not meet outcomes of the old."""
        found: dict[str, Any] = {"start": finite(self.start), "version": paceline.__version__}
        if isinstance(self.given_task, str) and ".py:" in self.given_task:
            text = Path(self.given_task.rpartition(":")[0]).read_bytes()
            found["file"] = hashlib.sha256(text).hexdigest()
        return found

    def _check_arms(self) -> None:
        """Refuse what cannot work before anything is started: also every combination of swept values."""
        unswept = []
        for arm in self.arms:
            candidates = list(self.sweep.candidates(arm))
            if candidates == [{}] and self.sweep.values:
                unswept.append(arm.label)
            for values in candidates:
                cell = self.cell(arm.with_hyper(values), self.seeds[0], self.length)
                scheme = arm.given
                if self.asked.real:
                    planned(
                        self.given_task,
                        scheme,
                        hyper=cell.hyper,
                        workers=cell.workers,
                        task_options=self.task_options,
                        **self.settings,
                    )
                    updates_of(cell, scheme, self.task)
                else:
                    quiet: dict[str, Any] = {"warn": lambda _: None, "watch": lambda _: None, "seconds": NO_TIME}
                    settings = self.settings | {"batched": False}
                    simulated(self.task, scheme, workers=cell.workers, **settings, **quiet, **cell.hyper)
        if self.asked.batched and self.arms:
            self.task.batched(self.arms[0].workers, self.seeds[0])
        if unswept and len(unswept) == len(self.arms):
            raise UsageError(f"no scheme has a hyper-parameter of the sweep: {', '.join(self.sweep.values)}")
        if unswept:
            self.notes.append(f"not swept, as it has no such hyper-parameter: {', '.join(unswept)}")

    def cell(self, arm: Arm, seed: int, length: Length) -> RunCell:
        target = length.target
        return RunCell(
            label=arm.label,
            scheme=arm.scheme if arm.own is None else f"{arm.scheme} {build.hyper_of(arm.built())}",
            workers=arm.workers,
            hyper=dict(arm.hyper),
            seed=seed,
            real=self.asked.real,
            samples=length.samples,
            seconds=length.seconds,
            target=None if target is None else (target.metric, target.value),
            points=self.asked.points,
            task=self.given_task if isinstance(self.given_task, str) else self.task.name,
            task_options=self.task_options,
            settings=self.settings,
            identity=self.identity,
        )

    def run(self) -> Comparison:
        directory = self._directory()
        with _locked(directory):
            self._write_settings(directory)
            tuning = {arm.label: list(self._tuning_cells(arm)) for arm in self.arms} if self.sweep.values else {}
            number = sum(map(len, tuning.values())) + len(self.arms) * len(self.seeds)
            with shown_progress(number, str(directory), self._say) as progress:
                found = self._performed(directory, [one for some in tuning.values() for _, one in some], progress)
                choices: dict[str, Tuned] = {}
                for arm in self.arms:
                    if trials := tuning.get(arm.label):
                        pairs = [(values, found[one.key]) for values, one in trials]
                        choices[arm.label] = tuned(arm, self.sweep, pairs, self.metric)
                arms = [choices[arm.label].arm if arm.label in choices else arm for arm in self.arms]
                cells = {arm.label: [self.cell(arm, seed, self.length) for seed in self.seeds] for arm in arms}
                # seed by seed: what is there after an interruption is a comparison with fewer seeds
                order = [cells[arm.label][k] for k in range(len(self.seeds)) for arm in arms]
                found |= self._performed(directory, order, progress)
            summaries = [
                ArmSummary(
                    arm,
                    self.seeds,
                    [found[one.key] for one in cells[arm.label]],
                    choices.get(arm.label),
                    self._theory(arm),
                )
                for arm in arms
            ]
            return report.written(directory, self._findings(summaries))

    def _tuning_cells(self, arm: Arm) -> Iterator[tuple[dict[str, str], RunCell]]:
        """Runs with a seed that the comparison does not use: what is chosen by luck must not count."""
        seed, length = self.seeds[-1] + 1, self.length.part(self.asked.budget)
        for values in self.sweep.candidates(arm):
            if values:
                yield values, self.cell(arm.with_hyper(values), seed, length)

    def _performed(self, directory: Path, cells: list[RunCell], progress: CellProgress) -> dict[str, CellOutcome]:
        """The outcomes of cells: read, or made now."""
        found: dict[str, CellOutcome] = {}
        missing = []
        for cell in cells:
            outcome = CellOutcome.read(cell.file(directory))
            if outcome is None:
                missing.append(cell)
            else:
                found[cell.key] = outcome
        progress.skip(len(found))

        def finished(cell: RunCell, outcome: CellOutcome) -> None:
            found[cell.key] = outcome
            progress.finished(cell, outcome)

        own = {arm.label: arm.own for arm in self.arms if arm.own is not None}
        objects: dict[str, Any] = {"schemes": own}
        if not isinstance(self.given_task, str):
            objects["task"] = self.given_task
        cores = len(os.sched_getaffinity(0))
        jobs = self.asked.jobs or (1 if self.asked.real else cores)
        CellPool(directory, objects, jobs, progress.watch, finished).perform(missing)
        return found

    def _theory(self, arm: Arm) -> ExpectedStaleness | None:
        asked = self.asked
        law = None if asked.real or asked.network or asked.faults or asked.exact else parse_times(asked.compute)
        return expected_staleness(arm.built(), arm.workers, law, tuple(asked.speeds))

    def _findings(self, summaries: list[ArmSummary]) -> Findings:
        asked = self.asked
        setting = {"batch": str(self.task.batch), "feed": self.task.feed}
        if not asked.real:
            setting |= {"compute": asked.compute, "network": asked.network or "free"}
            setting |= {"speeds": ", ".join(f"{one:g}" for one in asked.speeds)} if asked.speeds else {}
            setting |= {"faults": "; ".join(asked.faults)} if asked.faults else {}
        setting |= {"servers": str(asked.servers)} if asked.servers > 1 else {}
        setting |= {"compressor": asked.compress} if asked.compress else {}
        setting |= {"exact": "yes"} if asked.exact else {}
        setting |= {"given": " ".join(f"{key}={value}" for key, value in self.hyper.items())} if self.hyper else {}
        if self.sweep.values:
            setting["budget of the sweep"] = f"{self.length.part(asked.budget).text(not asked.real)} per run, one seed"
        notes = list(self.notes) + ([self.task.notice] if self.task.notice else [])
        return Findings(
            self.task.name,
            asked.real,
            self.length,
            self.seeds,
            self.metric,
            summaries,
            setting,
            dict(self.sweep.values),
            notes,
        )

    def _directory(self) -> Path:
        if self.asked.directory is not None:
            return Path(self.asked.directory).absolute()
        arms = [(arm.label, arm.scheme, arm.workers, dict(arm.hyper)) for arm in self.arms]
        plain = {**asdict(self.asked), "jobs": None, "arms": arms, "task": self.task.name, "options": self.task_options}
        text = json.dumps(finite(plain), sort_keys=True, default=str)
        name = f"{folder_name(self.task.name)}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
        return Path("comparisons").absolute() / name

    def _write_settings(self, directory: Path) -> None:
        known = {**asdict(self.asked), "schemes": [arm.label for arm in self.arms], "hyper": self.hyper}
        plain = json.loads(json.dumps(finite(known), default=str))
        write_json(directory / "comparison.json", {"task": self.task.name, "version": paceline.__version__} | plain)


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """One process at a time works on a comparison."""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / ".lock").open("w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"another process works on this comparison: {directory}") from None
        yield
