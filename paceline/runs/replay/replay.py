"""`paceline.replay`: repeats a recorded run in this process and compares its bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from paceline.config import build, from_plan
from paceline.errors import UsageError
from paceline.result import digest
from paceline.runs import accounts, fingerprint, order_history
from paceline.runs.data_digest import data_of
from paceline.runs.order_history import History
from paceline.runs.replay.engine import ReplayDifference, ReplayEngine
from paceline.runs.run_directory import RunDirectory
from paceline.scheme import Scheme
from paceline.state import Vector
from paceline.task import Task


@dataclass(frozen=True)
class Replayed:
    """The outcome of a replay. `match`: every bit that could be compared was the same."""

    match: bool
    updates: int
    gradients: int
    digest: str
    recorded_digest: str | None  # None: the run has saved nothing, or `until` or `what_if` was given
    recorded_updates: int | None  # the update of that digest: a failed run may have reached more than it saved
    checkpoints: list[int]  # checkpoints that matched
    difference: ReplayDifference | None = None
    hints: list[str] = field(default_factory=list)
    cut: bool = False  # the log has no end: the replay goes as far as the log
    metrics: dict[str, float] = field(default_factory=dict)  # only with `until` or `what_if`
    vector: Vector = field(default_factory=lambda: torch.empty(0), repr=False)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        plain = {name: value for name, value in vars(self).items() if name != "vector"}
        return plain | {"difference": None if self.difference is None else vars(self.difference)}


@contextmanager
def _restoring_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@_restoring_threads()
def replay(
    run: str | Path,
    *,
    until: int | None = None,
    what_if: Mapping[str, Any] | None = None,
    since: int = 0,
    task: Task | None = None,
    scheme: Scheme | None = None,
    watch: Callable[[int], None] = lambda _: None,
) -> Replayed:
    """Repeat a recorded run and compare it with its record, gradient by gradient, call by call.

    `until` stops at that update and gives its state. `what_if` changes hyper-parameters of the server from update
    `since` on, with the same order of events. `task` and `scheme` are needed if the run was given objects.
    """
    directory = RunDirectory.open(run)
    if until is not None and until < 0:
        raise UsageError(f"until must be at least 0, not {until}")
    launches = order_history.recorded(directory)
    given = {name: value for name, value in (("task", task), ("scheme", scheme)) if value is not None}
    matched: list[int] = []
    gradients, cut, saved = 0, False, None
    claimed, recorded = accounts.claimed(directory) if until is None and what_if is None else (None, None)
    for number, launch in enumerate(launches):
        last = number == len(launches) - 1
        kind, job = _of(launch, given)
        torch.set_num_threads(launch.plan.threads)
        changed = None if what_if is None else (since, _checked(kind, what_if, launch.plan.workers))
        engine = ReplayEngine(launch, kind, job, until=until, what_if=changed, watch=watch, claimed=claimed)
        if until is not None and not last and launches[number + 1].start_step() < until:
            engine.until = None
        engine.run()
        gradients, cut = gradients + engine.gradients, cut or launch.cut
        matched, saved = matched + engine.matched, engine.saved or saved
        if engine.difference is not None or last or (until is not None and engine.updates >= until):
            break
    if until is not None and engine.difference is None and engine.updates < until:
        raise UsageError(f"the record ends at update {engine.updates:,}; there is no update {until:,} in it")
    model = engine.model()
    own = digest(model)
    if claimed is not None and engine.difference is None and engine.updates < claimed:
        cut = True  # a full disk may have ended the log
    if saved is None and engine.updates == claimed:
        saved = own
    if cut and saved is None:
        recorded = None
    if engine.difference is None and recorded is not None and recorded != saved:
        assert claimed is not None
        what = "other bits" if saved is not None else "no moment at which it could have been saved"
        engine.difference = ReplayDifference(claimed, "the end", f"the vector that the run has saved has {what} here")
    asked = until is not None or what_if is not None
    return Replayed(
        match=engine.difference is None,
        updates=engine.updates,
        gradients=gradients,
        digest=own,
        recorded_digest=recorded,
        recorded_updates=claimed if recorded is not None else None,
        checkpoints=matched,
        difference=engine.difference,
        hints=hints(launch, directory, job) if engine.difference is not None else [],
        cut=cut,
        metrics=job.evaluate(model, job.buffers() or None) if asked else {},
        vector=model,
    )


def _of(launch: History, given: dict[str, Any]) -> tuple[Scheme, Task]:
    plan = launch.plan
    for name in ("task", "scheme"):
        if name in launch.about["unnamed"] and name not in given:
            again = f"paceline.replay(run, {name}=…)"
            raise UsageError(f"the run was given its {name} as an object, which has no name: give it again, {again}")
    scheme, task = from_plan.scheme_of(plan, given), from_plan.task_of(plan, given)
    if any(not method.atomic for method in scheme.methods.values()):
        raise UsageError(
            f"{scheme.name} has no order: its workers write into one vector without a lock, and no two runs are "
            "alike; its atomic form is `async`, which can be repeated"
        )
    if launch.about["feeding"]:
        what = ", ".join(launch.about["feeding"])
        raise UsageError(f"hooks have changed the run's batches ({what}), and what they gave was not recorded")
    return scheme, task


def _checked(scheme: Scheme, what_if: Mapping[str, Any], workers: int) -> Mapping[str, Any]:
    if not scheme.methods:
        raise UsageError(f"{scheme.name} has no server whose hyper-parameters could be changed")
    build.scheme_of(scheme, what_if).check(workers)
    return what_if


def hints(launch: History, directory: RunDirectory, task: Task) -> list[str]:
    """Why bits may differ: versions and data that have changed since the run."""
    then, now = launch.about["versions"], fingerprint.versions(launch.plan.threads, launch.plan.device)
    found = [f"{name} was {then[name]}, is {now.get(name)}" for name in then if then[name] != now.get(name)]
    data, _ = data_of(task, task.start(launch.plan.seed))
    noted = fingerprint.read(directory.path)
    if noted and data is not None and noted[-1].fingerprint.data not in (None, data):
        found.append("the data are not those of the run")
    return found or ["the versions, the threads, the kind of CPU and the data are the same: the code may differ"]
