"""Runs whose bits do not depend on how they are run: what that asks of a scheme, its batches and its processes.

Every batch is cut in `micro` parts, each of them a worker of the scheme, and the processes share these workers. What a
worker computes, and the order in which gradients are added, is then the same in any number of processes.
"""

from __future__ import annotations

from typing import Any

from paceline.config.plan import Plan
from paceline.errors import UsageError
from paceline.scheme import Scheme
from paceline.task import Task


def settled(settings: dict[str, Any], scheme: Scheme, default: int) -> dict[str, Any]:
    """Settings in which `workers` are the scheme's: with `exact` those that were asked for are processes."""
    if not settings.get("exact"):
        if "micro" in settings:
            raise UsageError("micro is for exact runs, in which every batch is cut in so many parts; add --exact")
        return {"workers": default} | settings
    if settings.get("quorum") == "shrink":
        raise UsageError("an exact run cannot go on with fewer workers: its quorum is hold; leave --quorum away")
    if settings.get("feed", "slice") != "slice":
        raise UsageError(f"an exact run cuts one common batch: its feed is slice, not {settings['feed']}")
    micro = settings.get("micro", 1 if scheme.alone else Plan.micro)
    processes = settings.get("workers", min(default, max(micro, 1)))
    check(scheme, processes, micro)
    changed = {"micro": micro, "workers": micro, "processes": processes, "quorum": "hold", "feed": "slice"}
    return settings | changed


def check(scheme: Scheme, processes: int, micro: int) -> None:
    """Refuse what would not give the same bits."""
    if micro < 1:
        raise UsageError(f"micro must be at least 1, not {micro}")
    if not 1 <= processes <= micro:
        raise UsageError(
            f"workers must be from 1 to {micro}, not {processes}: an exact run cuts every batch in {micro} "
            "micro-batches, and more processes would find no work; a larger --micro makes more of them, and other bits"
        )
    if reason := scheme.exact(micro):
        raise UsageError(f"{scheme.name} cannot be exact: {reason}")


def check_task(task: Task, micro: int) -> None:
    """Every micro-batch needs a sample."""
    if task.batch < micro:
        raise UsageError(
            f"a batch of {task.batch} cannot be cut in {micro} micro-batches; raise --batch, or lower --micro"
        )
