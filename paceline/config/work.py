"""How long a run is: given as updates of the centre (steps), samples or epochs, and ended after a number of updates.

Equal work is equal samples: an update of `sync` with four workers takes four batches, one of `async` takes one. So
samples and epochs are converted to updates once, when scheme, workers and task are known, and every run ends at a
number of updates, which is exact.
"""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction
from typing import Any

from paceline.config import build
from paceline.config.plan import Plan
from paceline.errors import UsageError
from paceline.fields import Feed
from paceline.schedules import Schedule, Unit, is_schedule
from paceline.scheme import Scheme
from paceline.task import Task

UNITS = ("steps", "samples", "epochs")


def samples_per_update(scheme: Scheme, workers: int, batch: int, feed: Feed) -> Fraction:
    """The number of samples that enter one update of the centre, on average."""
    gradients = scheme.gradients_per_update(workers)
    if gradients is None:
        raise UsageError(
            f"{scheme.name} does not say how many gradients enter one update, so samples and epochs cannot be "
            "converted to updates: give steps, or define gradients_per_update(workers) in its class"
        )
    if not batch:
        raise UsageError(
            "the size of a batch is not known here: the loader has no batch_size, so samples and epochs cannot be "
            "converted to updates; give steps, or say the size with batch="
        )
    return Fraction(gradients) * Fraction(batch, workers if feed == "slice" else 1)


def units_per_update(scheme: Scheme, workers: int, task: Task, unit: Unit) -> float:
    """How many updates (1), samples or epochs one update of the centre takes: what a schedule counts."""
    if unit == "updates":
        return 1.0
    samples = samples_per_update(scheme, workers, task.batch, task.feed)
    if unit == "samples":
        return float(samples)
    if not task.epoch_size:
        raise UsageError("the length of an epoch is not known here: the data have no length; count updates or samples")
    return float(samples / task.epoch_size)


def counted(scheme: Scheme, workers: int, task: Task) -> dict[str, str]:
    """Hyper-parameters of a scheme that follow a schedule in samples or epochs, with what an update takes of them."""
    found: dict[str, str] = {}
    for key, value in build.hyper_of(scheme).items():
        if is_schedule(value) and (schedule := Schedule.read(value)).unit != "updates" and not schedule.per:
            per = units_per_update(scheme, workers, task, schedule.unit)
            found[key] = str(schedule.in_unit(schedule.unit, per))
    return found


def in_updates(
    scheme: Scheme,
    workers: int,
    batch: int,
    feed: Feed,
    epoch_size: int | None,
    *,
    samples: int | None = None,
    epochs: float | None = None,
) -> int:
    """The updates of the centre, rounded up, that take this number of samples or epochs. `epoch_size`: the samples of
    one epoch, None if unknown."""
    if epochs is not None and epoch_size is None:
        raise UsageError("the length of an epoch is not known here: the data have no length; give samples or steps")
    wanted = Fraction(samples) if samples is not None else Fraction(epochs or 0) * (epoch_size or 0)
    updates = math.ceil(wanted / samples_per_update(scheme, workers, batch, feed))
    return max(1, updates + scheme.updates_at_start(workers))


def one_unit(settings: dict[str, Any], default: int | None = None) -> dict[str, Any]:
    """The settings with one unit of length. `default`: the steps of a run that was given no length; Python cannot tell
    them from steps that were given, so samples and epochs replace them."""
    given = [unit for unit in UNITS if settings.get(unit) is not None]
    if len(given) > 1 and settings.get("steps") == default:
        settings = {name: value for name, value in settings.items() if name != "steps"}
        given = [unit for unit in given if unit != "steps"]
    if len(given) > 1:
        raise UsageError(f"the length of a run has one unit: give one of {', '.join(given)}")
    return settings


def resumed(before: Plan, settings: dict[str, Any]) -> Plan:
    """A plan with other settings; another unit of length replaces the plan's own."""
    one_unit(settings)
    if any(settings.get(unit) is not None for unit in UNITS):
        before = dataclasses.replace(before, steps=None, samples=None, epochs=None)
    return dataclasses.replace(before, **settings)


def settled(plan: Plan, scheme: Scheme, task: Task) -> Plan:
    """The plan with its length in updates."""
    if plan.samples is None and plan.epochs is None:
        return plan
    steps = in_updates(
        scheme, plan.workers, task.batch, task.feed, task.epoch_size, samples=plan.samples, epochs=plan.epochs
    )
    return dataclasses.replace(plan, steps=steps)
