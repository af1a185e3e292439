"""Runs a plan in real processes: this process is the launcher."""

import dataclasses
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from paceline import signals
from paceline.config import build, work
from paceline.config.from_plan import forkable, ready_task
from paceline.config.plan import Plan
from paceline.errors import DataError, PacelineError, RunError
from paceline.processes import resource_limits
from paceline.processes.memory import snapshot
from paceline.processes.roles import main, recorder
from paceline.processes.supervisor import profile_summary
from paceline.processes.supervisor.outcome import result_of
from paceline.processes.supervisor.progress import Progress, Watcher
from paceline.processes.supervisor.run_summaries import RunSummaries
from paceline.processes.supervisor.status import Status
from paceline.processes.supervisor.supervisor import Supervisor
from paceline.report.web.scheme_text import listing_of
from paceline.result import Point, Result
from paceline.runs import checkpoint, file_sums, fingerprint
from paceline.runs.accounts import Totals
from paceline.runs.checkpoint import Checkpoint
from paceline.runs.progress_log import ProgressLog
from paceline.runs.run_directory import RunDirectory, RunState
from paceline.scheme import Scheme
from paceline.state import Vector
from paceline.task import Task

Tell = Callable[[str, str], None]


def execute(
    plan: Plan,
    scheme: Scheme,
    objects: dict[str, Any],
    *,
    tell: Tell,
    watch: Callable[[Status], None],
    launcher: Callable[..., Supervisor] = Supervisor,
) -> Result:
    """Run a plan in this process as the launcher. The run directory exists."""
    directory = RunDirectory.open(plan.directory)
    directory.logs.mkdir(exist_ok=True)
    began = time.monotonic_ns()
    with _recording_interrupts(directory), directory.lock():
        x0, fitted = None, scheme
        if not plan.script:
            ready: Task = objects.get("ready") or ready_task(plan, objects)
            objects, x0 = objects | {"ready": ready}, ready.start(plan.seed)
            plan = work.settled(forkable(plan, ready, tell), scheme, ready)
            if changed := work.counted(scheme, plan.workers, ready):
                scheme = build.scheme_of(scheme, changed)
                if plan.scheme is None:
                    objects |= {"scheme": scheme}
                else:
                    plan = dataclasses.replace(plan, hyper=build.hyper_of(scheme))
            fitted = scheme.fitted(ready.parameters())
        first = _checked_checkpoint(plan, fitted, directory, x0)
        for text in file_sums.changed(directory.path):
            tell("warn", text)
        before = directory.history(lambda text: tell("warn", text))
        recorder.trim_all(directory.path)  # logs of a launch that was killed
        plan = dataclasses.replace(plan, launch=recorder.next_launch(directory.path))
        totals = Totals.of(last_result(directory), first)
        directory.begin()
        directory.write_plan(dataclasses.asdict(plan))
        decided = scheme if plan.scheme or not plan.script else None  # a script has yet to choose its scheme
        launched = fingerprint.of(plan, decided, objects.get("ready"), x0, objects.get("hooks", ()))
        x0 = None  # the chief makes its own
        step = first.step if first else 0
        launched = fingerprint.write(directory.path, launched, step, lambda text: tell("warn", text))
        recorder.prepare(plan, launched.versions, first, objects)
        if plan.profile:
            profile_summary.clear(directory.path)
        watcher = Watcher()
        summaries = RunSummaries(plan, listing_of(plan.scheme)["source"]) if plan.summaries else None
        log = ProgressLog(directory.path, plan.launch, began / 1e9, summaries.line if summaries else None)
        hooks = main.hooks_of(plan, objects, "chief")
        names: list[str] = []  # of the roles

        def look(one: Supervisor) -> None:
            status = watcher.status(one)
            progress.note(status)
            watch(status)

        def told(kind: str, text: str) -> None:
            if kind in ("warn", "notice"):
                log.event(kind, text, next((name for name in names if re.match(rf"{name}\b(?!-)", text)), ""))
            tell(kind, text)

        with _within_limits(directory):
            mine = launcher(plan, scheme, objects, tell=told, watch=look)
            names += (str(child.part) for child in mine.children)
            log.begin(names, plan.steps)
            progress = Progress(directory, plan, hooks, mine.warn, log)
            mine.board.put("began", began)
            mine.board.put("restarts", totals.restarts)
            mine.board.put("rolled_back", totals.rolled_back)
            try:
                with signals.counted(mine.asked):
                    outcome = mine.run()
            finally:
                progress.end()
        recorder.trim_all(directory.path)
        profile_summary.write(directory.path, outcome.profile)
        result = result_of(mine.plan, mine.launched.scheme, outcome, before, first)
        if result is not None and _due_at_the_end(plan, result):
            last = Point(result.updates, (outcome.words["stopped"] - began) / 1e9, result.metrics)
            result.history.append(last)
            directory.append_history(last.as_dict())
        if summaries is not None:
            failed = "" if outcome.error is None else str(outcome.error)
            summaries.end(build.hyper_of(mine.launched.scheme), result, failed)
        if outcome.error is not None:
            directory.write_result((result.as_dict() if result else {}) | {"error": str(outcome.error)})
            if isinstance(outcome.error, RunError):
                outcome.error.result = result
            raise outcome.error
        if result is None:
            if outcome.interrupted:
                directory.write_result({"stopped": RunState.INTERRUPTED})
                raise KeyboardInterrupt
            directory.write_result({"error": "the run ended before its first checkpoint"})
            raise RunError("the run ended without a result")
        directory.write_result(result.as_dict())
        if outcome.interrupted:
            raise KeyboardInterrupt
    return result


@contextmanager
def _recording_interrupts(directory: RunDirectory) -> Iterator[None]:
    try:
        yield
    except (KeyboardInterrupt, signals.Interrupted):
        directory.write_interrupted()  # unless the launcher has written a result
        raise


@contextmanager
def _within_limits(directory: RunDirectory) -> Iterator[None]:
    """Turn an error that a limit of the system causes into the error of the run."""
    try:
        yield
    except Exception as error:
        reason = resource_limits.explained(error)
        if reason is None:
            raise
        with suppress(PacelineError):  # the same limit may prevent it
            directory.write_result({"error": reason})
        raise RunError(reason) from error


def last_result(directory: RunDirectory) -> dict[str, Any] | None:
    """The result of the last launch; None if it cannot be read."""
    try:
        return directory.result()
    except DataError:  # `verify` reports it; the checkpoint has counts of its own
        return None


def _due_at_the_end(plan: Plan, result: Result) -> bool:
    """Whether the last update is due for an evaluation that the chief, which has no step after it, has not made."""
    due = bool(plan.every and result.metrics and result.updates % plan.every == 0)
    return due and not any(point.update == result.updates and "loss" in point.metrics for point in result.history)


def _checked_checkpoint(plan: Plan, scheme: Scheme, directory: RunDirectory, x0: Vector | None) -> Checkpoint | None:
    """The checkpoint to resume from. One of another run is refused before this plan replaces that of the run."""
    found = checkpoint.resumed_from(directory.checkpoints, lambda _: None)  # the chief reports damaged ones
    if found is not None and not plan.script:
        snapshot.check(plan, scheme, found, x0)
    return found
