"""Training in real processes on this machine: `train` gives the same Result as `simulate`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from paceline import checkpoint, config, role
from paceline.directory import RunDirectory
from paceline.errors import RunError, UsageError
from paceline.hook import Hook
from paceline.launchers.local import Launcher, Outcome
from paceline.plan import Plan
from paceline.report.live import Status
from paceline.result import Point, Result, Staleness
from paceline.scheme import Scheme
from paceline.task import Task
from paceline.watching import Watcher

Tell = Callable[[str, str], None]


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
    settings = {name: value for name, value in settings.items() if value is not None}
    settings.setdefault("workers", 1 if chosen.alone else 2)
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
    for name, low in (("workers", 1), ("threads", 1), ("keep", 1), ("restarts", 0)):
        if getattr(plan, name) < low:
            raise UsageError(f"{name} must be at least {low}, not {getattr(plan, name)}")
    if plan.steps is not None and plan.steps < 1:
        raise UsageError(f"steps must be at least 1, not {plan.steps}")
    if plan.seconds is not None and not plan.seconds > 0:
        raise UsageError(f"seconds must be above 0, not {plan.seconds}")
    if not plan.patience > 0:
        raise UsageError(f"patience must be above 0 seconds, not {plan.patience:g}")
    if plan.quorum not in ("shrink", "hold"):
        raise UsageError(f"quorum must be shrink or hold, not {plan.quorum!r}")
    if scheme.methods:
        if plan.servers < 1:
            raise UsageError(f"{scheme.name} needs a server: servers must be at least 1, not {plan.servers}")
        if plan.servers > 1 and (reason := scheme.whole()):
            raise UsageError(f"{scheme.name} cannot be cut among {plan.servers} servers: {reason}; use --servers 1")
    scheme.check(plan.workers)
    kind = plan.device.partition(":")[0]
    if kind not in ("cpu", "cuda"):
        raise UsageError(f"device must be cpu, cuda or cuda:K, not {plan.device!r}")


def execute(
    plan: Plan, scheme: Scheme, objects: dict[str, Any], *, tell: Tell, watch: Callable[[Status], None]
) -> Result:
    """Run a plan in this process as the launcher; the run directory exists and is ours."""
    directory = RunDirectory.open(plan.directory)
    directory.logs.mkdir(exist_ok=True)
    began = time.monotonic_ns()
    with directory.lock():
        before = directory.history()
        if not plan.script:
            torch.set_num_threads(plan.threads)
            objects = objects | {"ready": role.task_of(plan, objects)}
        watcher = Watcher()
        launcher = Launcher(plan, scheme, objects, tell=tell, watch=lambda one: watch(watcher.status(one)))
        launcher.board.put("began", began)
        outcome = launcher.run()
        result = _result(plan, scheme, outcome, before)
        if outcome.error is not None:
            told = {"error": str(outcome.error)}
            directory.write_result((result.as_dict() if result else {}) | told)
            if isinstance(outcome.error, RunError):
                outcome.error.result = result
            raise outcome.error
        if result is None:
            directory.write_result({"error": "the run was broken off before its first checkpoint"})
            raise KeyboardInterrupt if outcome.interrupted else RunError("the run ended without a result")
        directory.write_result(result.as_dict())
        if outcome.interrupted:
            raise KeyboardInterrupt
    return result


def _result(plan: Plan, scheme: Scheme, outcome: Outcome, before: list[dict[str, Any]]) -> Result | None:
    found = checkpoint.newest(Path(plan.directory) / "checkpoints", lambda _: None)
    if found is None:
        return None
    told = outcome.result or {}
    board = outcome.words
    seconds = max(board["stopped"] - board["first_step"], 0) / 1e9 if board["first_step"] else 0.0
    samples = told.get("samples", board["samples"])
    stale = told.get("staleness", {})
    history = [
        Point(one["update"], one["seconds"], {k: v for k, v in one.items() if k not in ("update", "seconds")})
        for one in [*before, *outcome.history]
    ]
    return Result(
        scheme=scheme.name,
        task=outcome.task or plan.task or "task",
        workers=plan.workers,
        servers=plan.servers,
        updates=told.get("updates", found.step),
        gradients=told.get("gradients", board["gradients"]),
        samples=samples,
        virtual_seconds=None,
        staleness=Staleness(
            mean=stale.get("mean", 0.0),
            max=stale.get("max", 0),
            histogram={int(k): n for k, n in stale.get("histogram", {}).items()},
            outstanding=stale.get("outstanding", 0),
        ),
        metrics=told.get("metrics", {}),
        vector=found.tensors["model"],
        dropped=told.get("dropped", 0),
        seed=plan.seed,
        batch=outcome.batch or plan.batch or 0,
        hyper=config.hyper_of(scheme),
        history=history,
        warnings=[],
        notice=outcome.notice,
        stopped=outcome.stopped or None,
        wall_seconds=seconds,
        samples_per_second=samples / seconds if seconds else 0.0,
        time_to_first_step=(board["first_step"] - board["began"]) / 1e9 if board["first_step"] else None,
        restarts=outcome.restarts,
        rolled_back_updates=board["rolled_back"],
        peak_rss_mb=outcome.peak_rss / 1024,
        directory=plan.directory,
    )
