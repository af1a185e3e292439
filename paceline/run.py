"""Training in real processes on this machine: `train` gives the same Result as `simulate`."""

from __future__ import annotations

import dataclasses
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, get_args, get_type_hints

import torch

from paceline import (
    checkpoint,
    config,
    exact,
    file_sums,
    fingerprint,
    interrupts,
    recording,
    role,
    snapshots,
    system_limits,
)
from paceline.accounts import Standing, Totals
from paceline.checkpoint import Checkpoint
from paceline.directory import RunDirectory, RunState
from paceline.errors import DataError, PacelineError, RunError, UsageError
from paceline.fingerprint import Fingerprint
from paceline.hook import Hook
from paceline.launchers.local import Launcher
from paceline.launchers.recovery import Outcome
from paceline.plan import Collective, Plan
from paceline.progress import Progress
from paceline.report.live import Status
from paceline.result import Point, Result
from paceline.scheme import Scheme
from paceline.state import Vector
from paceline.task import Task
from paceline.values import converted
from paceline.watching import Watcher

Tell = Callable[[str, str], None]

LOWEST = {"workers": 1, "threads": 1, "keep": 1, "restarts": 0, "servers": 0, "every": 0}
LOWEST_IF_GIVEN = {"steps": 1, "batch": 1, "checkpoint_steps": 1, "eval_steps": 1}
OF_THE_EVALUATOR = {"throttle": "throttle", "delay": "start-delay", "eval_steps": "eval-steps", "best": "best"}
OF_THE_EVALUATOR |= {"eval_device": "eval-device"}


def planned(
    task: str | Task | None,
    scheme: str | Scheme | type[Scheme],
    *,
    hooks: Iterable[str | Hook] = (),
    hyper: Mapping[str, Any] | None = None,
    **settings: Any,
) -> tuple[Plan, Scheme, dict[str, Any]]:
    """A checked plan, its scheme, and the objects that have no name to go by."""
    chosen = config.scheme_of(scheme, hyper or {})
    objects: dict[str, Any] = {}
    if isinstance(task, Task):
        objects["task"] = task
    if not isinstance(scheme, str):
        objects["scheme"] = chosen
    listed = [hooks] if isinstance(hooks, str | Hook) else list(hooks)
    for hook in listed:
        config.hook_of(hook)
    if own := [hook for hook in listed if isinstance(hook, Hook)]:
        objects["hooks"] = own
    hints = get_type_hints(Plan)
    settings = {
        name: value if isinstance(value, dict) else converted("train", name, value, hints[name])
        for name, value in settings.items()
        if value is not None
    }
    settings = exact.settled(settings, chosen, 1 if chosen.alone else 2)
    if not chosen.methods:
        settings["servers"] = 0
    plan = Plan(
        task=task if isinstance(task, str) else None,
        scheme=scheme if isinstance(scheme, str) else None,
        hyper=dict(hyper or {}) if isinstance(scheme, str) else {},
        hooks=[hook for hook in listed if isinstance(hook, str)],
        **settings,
    )
    check(plan, chosen)
    return plan, chosen, objects


def check(plan: Plan, scheme: Scheme) -> None:
    """Refuse what cannot work before anything is started."""
    if plan.exact:
        if plan.script:
            raise UsageError("a script cannot be exact: its loop is that of one worker; write its model as a task")
        exact.check(scheme, plan.hosts, plan.micro)
    for name, low in (LOWEST | LOWEST_IF_GIVEN).items():
        value = getattr(plan, name)
        if value is not None and value < low:
            raise UsageError(f"{name} must be at least {low}, not {value}")
    for name in ("seconds", "patience", "checkpoint_seconds"):
        value = getattr(plan, name)
        if value is not None and not value > 0:
            raise UsageError(f"{name} must be above 0 seconds, not {value:g}")
    for name in ("throttle", "delay"):
        if not 0 <= getattr(plan, name) < math.inf:
            raise UsageError(f"{OF_THE_EVALUATOR[name]} must be at least 0 seconds, not {getattr(plan, name):g}")
    if plan.curvature is not None and not 0 <= plan.curvature < math.inf:
        raise UsageError(f"curvature must be a finite number of at least 0, not {plan.curvature:g}")
    if not plan.evaluator:
        for name, option in OF_THE_EVALUATOR.items():
            if getattr(plan, name):
                raise UsageError(f"{option} is for the evaluator, which this run does not have; add --evaluator")
    if plan.quorum not in ("shrink", "hold"):
        raise UsageError(f"quorum must be shrink or hold, not {plan.quorum!r}")
    if plan.collective not in get_args(Collective):
        raise UsageError(f"collective must be one of {', '.join(get_args(Collective))}, not {plan.collective!r}")
    if plan.collective == "nccl" and not plan.device.startswith("cuda"):
        raise UsageError(f"nccl takes means between GPUs, and this run computes on {plan.device}; add --device cuda")
    if plan.collective == "nccl" and plan.hosts < plan.workers:
        raise UsageError(
            f"nccl needs a GPU and a process for each of the {plan.workers} workers, here are {plan.hosts} processes; "
            "use --collective tcp"
        )
    if plan.start not in ("fork", "exec"):
        raise UsageError(f"start must be fork or exec, not {plan.start!r}")
    if scheme.methods:
        if plan.servers < 1:
            raise UsageError(f"{scheme.name} needs a server: servers must be at least 1, not {plan.servers}")
        if plan.servers > 1 and (reason := scheme.whole()):
            raise UsageError(f"{scheme.name} cannot be cut among {plan.servers} servers: {reason}; use --servers 1")
    scheme.check(plan.workers)
    for name, device in (("device", plan.device), ("eval-device", plan.eval_device or "cpu")):
        if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
            raise UsageError(f"{name} must be cpu, cuda or cuda:K, not {device!r}")


def ready_task(plan: Plan, objects: dict[str, Any]) -> Task:
    """The task, made once for all processes; what it cannot do is told now."""
    torch.set_num_threads(1)  # this process forks: threads of OpenMP would be missing in its children
    task = role.task_of(plan, objects)
    if plan.exact:
        exact.check_task(task, plan.micro)
    if plan.eval_steps is not None:
        task.limited(plan.eval_steps * task.batch)
    return task


def forkable(plan: Plan, tell: Tell) -> Plan:
    """The plan, with another way to start processes if this one has threads of OpenMP: a fork would not copy them, and
    its first parallel operation would wait for them for ever."""
    threads = torch.get_num_threads()
    if plan.start != "fork" or threads == 1:
        return plan
    tell("warn", f"the task's code sets torch to {threads} threads in the launcher: roles start as with --start exec")
    return dataclasses.replace(plan, start="exec")


def execute(
    plan: Plan,
    scheme: Scheme,
    objects: dict[str, Any],
    *,
    tell: Tell,
    watch: Callable[[Status], None],
    launcher: Callable[..., Launcher] = Launcher,
) -> Result:
    """Run a plan in this process as the launcher; the run directory exists and is ours."""
    directory = RunDirectory.open(plan.directory)
    try:
        return _executed(directory, plan, scheme, objects, tell=tell, watch=watch, launcher=launcher)
    except (KeyboardInterrupt, interrupts.Interrupted):
        directory.write_interrupted()  # unless the launcher has written more
        raise


def _executed(
    directory: RunDirectory,
    plan: Plan,
    scheme: Scheme,
    objects: dict[str, Any],
    *,
    tell: Tell,
    watch: Callable[[Status], None],
    launcher: Callable[..., Launcher],
) -> Result:
    directory.logs.mkdir(exist_ok=True)
    began = time.monotonic_ns()
    with directory.lock():
        x0 = None
        if not plan.script:
            ready: Task = objects.get("ready") or ready_task(plan, objects)
            objects, x0 = objects | {"ready": ready}, ready.start(plan.seed)
            plan = forkable(plan, tell)
        first = _checked_checkpoint(plan, scheme, directory, x0)
        for text in file_sums.changed(directory.path):
            tell("warn", text)
        before = directory.history(lambda text: tell("warn", text))
        recording.trim_all(directory.path)  # of a launch that was killed
        plan = dataclasses.replace(plan, launch=recording.next_launch(directory.path))
        totals = Totals.of(last_result(directory), first)
        directory.begin()
        directory.write_plan(dataclasses.asdict(plan))
        launched = _fingerprint(plan, scheme, objects, x0)
        step = first.step if first else 0
        launched = fingerprint.write(directory.path, launched, step, lambda text: tell("warn", text))
        recording.prepare(plan, launched.versions, first, objects)
        watcher = Watcher()
        hooks = role.hooks_of(plan, objects, "chief")

        def look(one: Launcher) -> None:
            status = watcher.status(one)
            progress.note(status)
            watch(status)

        def warn(text: str) -> None:
            mine.outcome.warnings.append(text)
            tell("warn", text)

        with _within_limits(directory):
            mine = launcher(plan, scheme, objects, tell=tell, watch=look)
            progress = Progress(directory, plan, hooks, warn)
            mine.board.put("began", began)
            mine.board.put("restarts", totals.restarts)
            mine.board.put("rolled_back", totals.rolled_back)
            try:
                with interrupts.counted(mine.asked):
                    outcome = mine.run()
            finally:
                progress.end()
        recording.trim_all(directory.path)
        result = result_of(mine.plan, mine.scheme, outcome, before, first)
        if result is not None and _due_at_the_end(plan, result):
            last = Point(result.updates, (outcome.words["stopped"] - began) / 1e9, result.metrics)
            result.history.append(last)
            directory.append_history({"update": last.update, "seconds": last.seconds, **last.metrics})
        if outcome.error is not None:
            told = {"error": str(outcome.error)}
            directory.write_result((result.as_dict() if result else {}) | told)
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
def _within_limits(directory: RunDirectory) -> Iterator[None]:
    """What a limit of the system forbids the launcher becomes the run's error."""
    try:
        yield
    except Exception as error:
        reason = system_limits.explained(error)
        if reason is None:
            raise
        with suppress(PacelineError):  # the same limit may forbid it
            directory.write_result({"error": reason})
        raise RunError(reason) from error


def last_result(directory: RunDirectory) -> dict[str, Any] | None:
    """How the last launch ended, as far as it can be read."""
    try:
        return directory.result()
    except DataError:  # `verify` says what is wrong with it; the checkpoint has its own count
        return None


def _fingerprint(plan: Plan, scheme: Scheme, objects: dict[str, Any], x0: Vector | None) -> Fingerprint:
    decided = scheme if plan.scheme or not plan.script else None  # a script has yet to say which it wants
    return fingerprint.of(plan, decided, objects.get("ready"), x0, objects.get("hooks", ()))


def _due_at_the_end(plan: Plan, result: Result) -> bool:
    """Whether the last update is one to evaluate at: the chief may have no step after it in which it would."""
    due = bool(plan.every and result.metrics and result.updates % plan.every == 0)
    return due and not any(point.update == result.updates and "loss" in point.metrics for point in result.history)


def _checked_checkpoint(plan: Plan, scheme: Scheme, directory: RunDirectory, x0: Vector | None) -> Checkpoint | None:
    """What the run goes on from. One of another run is refused before this plan takes the place of its own."""
    found = checkpoint.resumed_from(directory.checkpoints, lambda _: None)  # of damaged ones the chief will tell
    if found is not None and not plan.script:
        snapshots.check(plan, scheme, found, x0)
    return found


def result_of(
    plan: Plan,
    scheme: Scheme,
    outcome: Outcome,
    before: list[dict[str, Any]],
    first: Checkpoint | None = None,
) -> Result | None:
    """All that is known at the end, and all of it of what was saved last. `before`: the history so far; `first`: the
    checkpoint that the launch began at."""
    found = checkpoint.newest(Path(plan.directory) / "checkpoints", lambda _: None)
    if found is None:
        return None
    told = outcome.result or {}
    board = outcome.words
    seconds = max(board["stopped"] - board["first_step"], 0) / 1e9 if board["first_step"] else 0.0
    standing = Standing.of(found, scheme, plan.workers)
    already = Standing.of(first, scheme, plan.workers).samples if first else 0
    history = [
        Point(one["update"], one["seconds"], {k: v for k, v in one.items() if k not in ("update", "seconds")})
        for one in [*before, *outcome.history]
    ]
    return Result(
        scheme=scheme.name,
        task=outcome.task or plan.task or "task",
        workers=plan.hosts,
        micro=plan.micro if plan.exact else None,
        servers=plan.servers,
        updates=standing.updates,
        gradients=standing.gradients,
        samples=standing.samples,
        virtual_seconds=None,
        staleness=standing.staleness,
        metrics=told.get("metrics", {}),
        vector=found.tensors["model"],
        dropped=standing.dropped,
        seed=plan.seed,
        batch=outcome.batch or plan.batch or 0,
        hyper=config.hyper_of(scheme),
        history=history,
        warnings=outcome.warnings,
        notice=outcome.notice,
        stopped=outcome.stopped or None,
        wall_seconds=seconds,
        samples_per_second=max(board["samples"] - already, 0) / seconds if seconds else 0.0,
        time_to_first_step=(board["first_step"] - board["began"]) / 1e9 if board["first_step"] else None,
        restarts=board["restarts"],
        rolled_back_updates=board["rolled_back"],
        lost_updates=max(board["reached"] - standing.updates, 0),
        peak_rss_mb=outcome.peak_rss / 1024,
        directory=plan.directory,
        fingerprint=fingerprint.last_of(Path(plan.directory)),
    )
