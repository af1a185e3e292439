"""`optimizer=` and `schedule=` of Python as hyper-parameters: plans, checkpoints and replays hold them as text."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from paceline.config import work
from paceline.errors import UsageError
from paceline.rules import group_schedules, optimizers
from paceline.rules.optimizers import NO_OPTIONS, ParameterGroup
from paceline.schedules import Unit
from paceline.scheme import Scheme, fields
from paceline.task import Task
from paceline.torch_task.flat_module import Originals

Made = Optimizer | Sequence[Optimizer]
OptimizerArgument = Made | Callable[[nn.Module], Made]
ScheduleArgument = str | type[LRScheduler] | Callable[[Optimizer], LRScheduler]


def hyper_for(
    scheme: Scheme,
    given: Mapping[str, Any],
    module: nn.Module,
    optimizer: OptimizerArgument | None,
    schedule: ScheduleArgument | None = None,
    *,
    unit: Unit = "updates",
    per: float = 1.0,
    steps: int | None = None,
    originals: Originals | None = None,
) -> dict[str, Any]:
    """The hyper-parameters of a scheme that has this optimizer as its rule. `given`: the other hyper-parameters.
    `per`: how many of `unit` an update takes; `originals`: the parameters of a model that `module` is a copy of."""
    if optimizer is None:
        raise UsageError("schedule= goes with optimizer=; without one give a schedule as lr='cosine:0.1,over=1000'")
    known = {field.name for field, _ in fields(type(scheme))}
    if "rule" not in known:
        raise UsageError(f"{scheme.name} has no rule that an optimizer could take the place of")
    taken = [key for key in given if key == "rule" or key.startswith("rule.")]
    if "server_rule" not in known:
        taken += [key for key in given if key in ("lr", "server.lr", "server.rule")]
    if taken:
        raise UsageError(f"the optimizer has options and rates of its own: omit {', '.join(taken)}")
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    places = {id(parameter): place for place, parameter in enumerate(trained)}

    def where(parameter: Tensor) -> int | None:
        place = places.get(id(parameter))
        return originals.place(parameter) if place is None and originals is not None else place

    made = optimizer if isinstance(optimizer, Optimizer | list | tuple) else _called(optimizer, module)
    several = list(made) if isinstance(made, list | tuple) else [made]
    for one in several:
        if not isinstance(one, Optimizer):
            raise UsageError(
                f"optimizer must be of torch.optim, or a function of the model that makes one, not {one!r}"
            )
    groups = [group for one in several for group in _groups(one, where)]
    if not any(group.parameters for group in groups):
        raise UsageError("the optimizer has none of the model's parameters: make it of this model's, or by a function")
    optimizers.layout_of(
        tuple(groups), tuple(tuple(one.shape) for one in trained), trained[0].dtype, "cpu"
    )  # refuse what cannot be saved
    hyper = {"rule": groups[0].path, "rule.grouped": optimizers.written(groups)}
    if schedule is not None:
        hyper["rule.schedule"] = group_schedules.told(groups, schedule, unit, per, steps)
    return hyper


def with_optimizer(
    scheme: Scheme,
    given: Mapping[str, Any],
    task: Task,
    workers: int,
    steps: int | None,
    optimizer: OptimizerArgument | None,
    schedule: ScheduleArgument | None,
    unit: Unit,
) -> dict[str, Any]:
    """`hyper_for` of a task, whose batches say how many samples and epochs an update takes."""
    module, originals = module_of(task)
    per = work.units_per_update(scheme, workers, task, unit)
    return hyper_for(scheme, given, module, optimizer, schedule, unit=unit, per=per, steps=steps, originals=originals)


def module_of(task: Task) -> tuple[nn.Module, Originals | None]:
    """The model of a task, and the parameters of the model that it was copied from."""
    flat = getattr(task, "flat", None)
    if flat is None:
        raise UsageError(f"task {task.name!r} has no model of torch that an optimizer could be made of; use rule=")
    return flat.module, getattr(task, "originals", None)


def _called(optimizer: Any, module: nn.Module) -> Any:
    if not callable(optimizer) or (inspect.isclass(optimizer) and issubclass(optimizer, Optimizer)):
        raise UsageError(
            f"optimizer must be an optimizer or a function of the model, not {optimizer!r}: "
            "lambda model: torch.optim.AdamW(model.parameters(), lr=0.001)"
        )
    return optimizer(module)


def _groups(optimizer: Optimizer, where: Callable[[Tensor], int | None]) -> Iterable[ParameterGroup]:
    path = optimizers.path_of(type(optimizer))
    if any(_stepped(state) for state in optimizer.state.values()):
        raise UsageError(f"the {type(optimizer).__name__} has made steps already: give a new one, or a function")
    found = []
    for group in optimizer.param_groups:
        places = []
        for parameter in group["params"]:
            place = where(parameter)
            if place is not None:
                places.append(place)
            elif parameter.requires_grad:
                raise UsageError(
                    f"the {type(optimizer).__name__} has a parameter of shape {tuple(parameter.shape)} that the model "
                    "does not have: make it of this model's parameters, or give a function of the model"
                )
        options = {key: _plain(key, value) for key, value in group.items() if key not in NO_OPTIONS}
        found.append(ParameterGroup(path, tuple(options.items()), tuple(places)))
    return found


def _stepped(state: Mapping[str, Any]) -> bool:
    step = state.get("step", 1 if state else 0)
    return bool(step > 0)


def _plain(key: str, value: Any) -> Any:
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, tuple | list):
        return tuple(_plain(key, item) for item in value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise UsageError(f"the optimizer's option {key} is a {type(value).__name__}, which a plan cannot hold")
