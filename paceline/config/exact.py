"""Exact runs, whose bits do not depend on the number of processes: what they require of scheme, batch and processes.

Every batch is split into `micro` parts. Each part is a worker of the scheme, and the processes share these workers. So
what a worker computes, and the order in which gradients are added, are the same in any number of processes.
"""

from typing import Any

from paceline.config.plan import Plan
from paceline.errors import UsageError
from paceline.scheme import Scheme
from paceline.task import Task


def settled(settings: dict[str, Any], scheme: Scheme, default: int) -> dict[str, Any]:
    """The settings, with defaults. In exact runs the `workers` asked for become processes; the scheme has `micro`."""
    if not settings.get("exact"):
        if "micro" in settings:
            raise UsageError("micro is for exact runs: the number of parts of every batch; add --exact")
        return {"workers": default} | settings
    if settings.get("quorum") == "shrink":
        raise UsageError("an exact run cannot continue with fewer workers: its quorum is hold; omit --quorum")
    if settings.get("feed", "slice") != "slice":
        raise UsageError(f"an exact run splits one common batch: its feed is slice, not {settings['feed']}")
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
        most = f"an exact run has {micro} micro-batches; a larger --micro allows more processes, and gives other bits"
        raise UsageError(f"workers must be from 1 to {micro}, not {processes}: {most}")
    if reason := scheme.exact(micro):
        raise UsageError(f"{scheme.name} cannot be exact: {reason}")


def check_task(task: Task, micro: int) -> None:
    """Every micro-batch needs a sample."""
    if task.batch < micro:
        raise UsageError(f"{micro} micro-batches cannot share a batch of {task.batch}; raise --batch, or lower --micro")
