"""Schedules of an optimizer's groups: any scheduler of torch.optim.lr_scheduler, as a function of the version."""

from __future__ import annotations

import functools
import inspect
import json
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from paceline import user_code
from paceline.errors import UsageError
from paceline.rules import optimizers
from paceline.rules.optimizers import ParameterGroup
from paceline.schedules import Schedule, Unit

MOVED = ("lr", "momentum", "betas")  # what schedulers change
LONGEST_TABLE = 100_000
Factory = Callable[[Optimizer], LRScheduler]
Values = list[dict[str, Any]]  # of each group


class GroupSchedule:
    """The options of groups at each version. `told` is plain data: {"unit", "per"}, and one of {"factor": a schedule},
    {"scheduler": a path, "options"} or {"table": [[position, values of each group], …], "length"}.

    The position at version v is v * per, rounded down: the number of steps that the scheduler has made.
    """

    def __init__(self, groups: Sequence[ParameterGroup], told: dict[str, Any]) -> None:
        self._groups, self._told, self._per = groups, told, told["per"]
        self._known: list[Values] = []
        self._step: Callable[[], Values] | None = None
        self._factor = Schedule.read(told["factor"]) if "factor" in told else None

    def values(self, v: int) -> Values:
        """The options of each group for the update of version v."""
        if self._factor is not None:
            factor = self._factor.at(v)
            return [{"lr": dict(group.options)["lr"] * factor} for group in self._groups]
        position = math.floor(v * self._per + 1e-9)
        return self._in_table(position) if "table" in self._told else self._after(position)

    def _in_table(self, position: int) -> Values:
        if position > self._told["length"]:
            unit, length = self._told["unit"], self._told["length"]
            raise UsageError(
                f"the schedule was given for {length} {unit}: a longer run needs it again, or give it as "
                "functools.partial(SchedulerClass, option=value), which has no end"
            )
        rows = self._told["table"]
        low, high = 0, len(rows)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if rows[middle][0] <= position else (low, middle)
        return [{key: optimizers.frozen(value) for key, value in one.items()} for one in rows[low][1]]

    def _after(self, position: int) -> Values:
        if self._step is None:
            cls: Any = user_code.function("scheduler", self._told["scheduler"])
            self._step = stepping(self._groups, functools.partial(cls, **self._told["options"]))
        while len(self._known) <= position:
            self._known.append(self._step())
        return self._known[position]


def stepping(groups: Sequence[ParameterGroup], factory: Factory) -> Callable[[], Values]:
    """A function that gives the options of groups at position 0, then after each step of their schedulers."""
    count = 1 + max((place for group in groups for place in group.parameters or (0,)), default=0)
    made = optimizers.made(groups, [nn.Parameter(torch.zeros(2, 2)) for _ in range(count)])
    schedulers = [_scheduler(factory, optimizer) for optimizer, _ in made]
    options = [dict(group.options) for group in groups]
    first = True

    def step() -> Values:
        nonlocal first
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of schedulers that step without their optimizers
            for scheduler in schedulers if not first else ():
                scheduler.step()
        first = False
        found: Values = [{} for _ in groups]
        for optimizer, numbers in made:
            for number, group in zip(numbers, optimizer.param_groups, strict=True):
                for key in MOVED:
                    if key == "lr" or (key in group and group[key] != options[number].get(key)):
                        found[number][key] = _number(group[key])
        return found

    return step


def _scheduler(factory: Factory, optimizer: Optimizer) -> LRScheduler:
    try:
        scheduler = factory(optimizer)
    except (TypeError, ValueError) as error:
        raise UsageError(f"the scheduler cannot be made: {error}") from error
    if isinstance(scheduler, ReduceLROnPlateau):
        raise UsageError(
            "ReduceLROnPlateau looks at a metric, not at the number of updates: no process could look its rate up; "
            "use another scheduler"
        )
    if not isinstance(scheduler, LRScheduler):
        raise UsageError(f"schedule must give a torch.optim.lr_scheduler, not a {type(scheduler).__name__}")
    return scheduler


def told(groups: Sequence[ParameterGroup], given: Any, unit: Unit, per: float, steps: int | None) -> str:
    """A schedule as JSON: of the text of one, a scheduler's class or `functools.partial` of it, or any factory."""
    plain: dict[str, Any] = {"unit": unit, "per": per}
    if isinstance(given, str):
        schedule = Schedule.read(given)
        if schedule.unit != "updates":
            raise UsageError(f"give the unit of the schedule {given} as schedule_unit={schedule.unit!r}")
        if unit != "updates":
            schedule = schedule.in_unit(unit, per)
        return json.dumps({"unit": unit, "per": per, "factor": str(schedule)})
    cls, options = (given.func, given.keywords) if isinstance(given, functools.partial) else (given, {})
    if inspect.isclass(cls) and issubclass(cls, LRScheduler) and not getattr(given, "args", ()) and _is_plain(options):
        stepping(groups, functools.partial(cls, **options))  # refuse what cannot be made
        return json.dumps(plain | {"scheduler": optimizers.path_of(cls), "options": options})
    if not callable(given):
        raise UsageError(f"schedule must be a function of the optimizer that gives a scheduler, not {given!r}")
    if steps is None:
        raise UsageError("a schedule that is a function is tabulated up to the last update: give steps")
    step, length = stepping(groups, given), math.ceil(steps * per)
    rows: list[list[Any]] = []
    for position in range(length + 1):
        values = step()
        if not rows or rows[-1][1] != values:
            rows.append([position, values])
        if len(rows) > LONGEST_TABLE:
            raise UsageError(
                f"the schedule changes more than {LONGEST_TABLE:,} times: give it as functools.partial(SchedulerClass, "
                "option=value), or in epochs"
            )
    return json.dumps(plain | {"table": rows, "length": length})


def _is_plain(options: dict[str, Any]) -> bool:
    try:
        return bool(json.loads(json.dumps(options)) == options)
    except (TypeError, ValueError):
        return False


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) else value
