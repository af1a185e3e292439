"""Rules that run an optimizer of torch, or any class with its interface, on views of the vector."""

from __future__ import annotations

import copy
import inspect
import json
import math
from collections.abc import Hashable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
from torch import Tensor

from paceline.errors import UnknownName
from paceline.fields import Bound, Count, Fraction, Rate, converted
from paceline.rules import optimizers
from paceline.rules.group_schedules import GroupSchedule
from paceline.rules.optimizers import Options, ParameterGroup, Shapes
from paceline.rules.rule import Positive, Rule
from paceline.state import State, Vector


@dataclass(frozen=True)
class TorchRule(Rule, listed=False):
    """A rule that runs an optimizer of torch itself, on the parameters' own shapes."""

    prepared: ClassVar[bool] = False
    path: ClassVar[str] = ""
    separate: ClassVar[bool] = False
    _shapes: ClassVar[Shapes] = ()

    def groups(self) -> tuple[ParameterGroup, ...]:
        """The groups of the optimizer."""
        options = {name: value for name, value in self._options().items() if name != "lr"}
        return (ParameterGroup(self.path, tuple(options.items())),)

    def _options(self) -> dict[str, Any]:
        """The rule's fields as torch's arguments."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        if "beta1" in given:
            given["betas"] = (given.pop("beta1"), given.pop("beta2"))
        return given

    def values(self, v: int, lr: float) -> list[dict[str, Any]]:
        """The options of each group for the update of version v."""
        return [{"lr": self.rate(lr)}]

    def fitted(self, shapes: Shapes) -> Self:
        other = copy.copy(self)
        object.__setattr__(other, "_shapes", shapes)
        return other

    def whole(self) -> str | None:
        if self.separate:
            return "optimizers that are stepped in turns need the whole gradient of a parameter"
        return optimizers.indivisible(self.groups())

    def cells(self, x: Vector) -> dict[str, Tensor]:
        shapes = self._shapes or (tuple(x.shape),)
        found = optimizers.cells_of(self.groups(), shapes, x, separate=self.separate)
        return {f"{self._label}_{name}": cell for name, cell in found.items()}

    @property
    def _label(self) -> str:
        return optimizers.label(self.path)

    def _recipe(self) -> Hashable:
        """What the optimizers are made of."""
        return self.groups()

    def apply(self, state: State, g: Vector, lr: float, at: str = "x") -> None:
        key = at, self._recipe()
        bound = state.bound_tools.get(key)
        if bound is None:
            prefix = f"{self._label}_"
            cells = {name.removeprefix(prefix): state.cell(name) for name in state if name.startswith(prefix)}
            bound = optimizers.BoundOptimizers(self.groups(), getattr(state, at), cells, state.first_coordinate)
            state.bound_tools[key] = bound
        with torch.no_grad() if torch.is_grad_enabled() else nullcontext():
            bound.step(g, self.values(state.v, lr))

    def _update(self, x: Vector, g: Vector, *given: Any) -> None:
        raise AssertionError("an optimizer makes the update")


@dataclass(frozen=True)
class Adadelta(TorchRule):
    """q: moving mean of g^2, e: of d^2;  d <- sqrt(e + eps) / sqrt(q + eps) * g;  x <- x - lr * d"""

    path = "torch.optim:Adadelta"
    rho: Fraction = 0.9
    eps: Positive = 1e-6
    weight_decay: Rate = 0.0


@dataclass(frozen=True)
class Adafactor(TorchRule):
    """Adam's mean square of a matrix from means over its rows and columns; a step is at most d long"""

    path = "torch.optim:Adafactor"
    beta2_decay: Annotated[float, Bound(-math.inf, 0)] = -0.8
    d: Annotated[float, Bound(1)] = 1.0
    weight_decay: Rate = 0.0


@dataclass(frozen=True)
class Adamax(TorchRule):
    """Adam with the largest recent |g| in place of the mean square"""

    path = "torch.optim:Adamax"
    beta1: Fraction = 0.9
    beta2: Fraction = 0.999
    eps: Positive = 1e-8
    weight_decay: Rate = 0.0


@dataclass(frozen=True)
class ASGD(TorchRule):
    """SGD with a rate that decays by lambd and alpha; the mean of x from step t0 on is kept beside x"""

    path = "torch.optim:ASGD"
    lambd: Rate = 1e-4
    alpha: Rate = 0.75
    t0: Rate = 1e6
    weight_decay: Rate = 0.0


@dataclass(frozen=True)
class Muon(TorchRule):
    """Momentum made orthogonal by Newton-Schulz iterations, of matrices; others_lr: AdamW's rate for all else"""

    path = "torch.optim:Muon"
    momentum: Fraction = 0.95
    nesterov: bool = True
    weight_decay: Rate = 0.1
    eps: Positive = 1e-7
    ns_steps: Count = 5
    adjust_lr_fn: Literal["original", "match_rms_adamw"] = "original"
    others_lr: Rate | None = None  # None: that of the matrices

    def groups(self) -> tuple[ParameterGroup, ...]:
        """Matrices, and where there are any, AdamW for the parameters of other shapes."""
        options = {name: value for name, value in self._options().items() if name not in ("lr", "others_lr")}
        muon = ParameterGroup(self.path, tuple(options.items()))
        matrices, others = _matrices(self._shapes)
        if not (matrices and others):
            return (muon,)
        decay = (("weight_decay", self.weight_decay),)
        return muon._replace(parameters=matrices), ParameterGroup("torch.optim:AdamW", decay, others)

    def values(self, v: int, lr: float) -> list[dict[str, Any]]:
        rate = self.rate(lr)
        rates = (rate, rate if self.others_lr is None else self.others_lr)
        return [{"lr": one} for one in rates[: len(self.groups())]]

    def apply(self, state: State, g: Vector, lr: float, at: str = "x") -> None:
        # a rule whose options follow a schedule is made again from them, without the shapes
        rule = self if self._shapes else self.fitted(optimizers.shapes_in(state.cell(f"{self._label}_shapes")))
        TorchRule.apply(rule, state, g, lr, at)


@dataclass(frozen=True)
class NAdam(TorchRule):
    """Adam with Nesterov momentum"""

    path = "torch.optim:NAdam"
    beta1: Fraction = 0.9
    beta2: Fraction = 0.999
    eps: Positive = 1e-8
    weight_decay: Rate = 0.0
    momentum_decay: Rate = 0.004
    decoupled_weight_decay: bool = False


@dataclass(frozen=True)
class RAdam(TorchRule):
    """Adam that uses the mean square only once enough gradients are in it"""

    path = "torch.optim:RAdam"
    beta1: Fraction = 0.9
    beta2: Fraction = 0.999
    eps: Positive = 1e-8
    weight_decay: Rate = 0.0
    decoupled_weight_decay: bool = False


@dataclass(frozen=True)
class Rprop(TorchRule):
    """Only the sign of g counts: each number has its own step, which grows while the sign stays. lr: the first one"""

    path = "torch.optim:Rprop"


OWN_OPTIONS = ("grouped", "schedule", "separate")  # not the optimizer's


@dataclass(frozen=True)
class OptimizerRule(TorchRule, listed=False):
    """An optimizer by the path of its class, with options of its own: `rule=torch.optim:Adam rule.amsgrad=true`.

    `grouped`: groups of parameters as JSON, with their options and rates; `schedule`: how these change, as JSON. Both
    are what `optimizer=` and `schedule=` of Python make. `separate`: a parameter whose gradient is 0 throughout is not
    stepped, as one without a gradient: for optimizers that a script steps in turns.
    """

    path: str = ""  # type: ignore[misc]
    options: Options = ()
    grouped: str = ""
    schedule: str = ""
    separate: bool = False  # type: ignore[misc]

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.path)
        super().__post_init__()

    def groups(self) -> tuple[ParameterGroup, ...]:
        return _read(self.grouped) if self.grouped else (ParameterGroup(self.path, self.options),)

    @property
    def _label(self) -> str:
        return "optimizer" if self.grouped else super()._label

    def _recipe(self) -> Hashable:
        return self.grouped or super()._recipe()  # a text is hashed once

    def rate(self, lr: float) -> float:
        return lr if self.grouped else super().rate(lr)

    def values(self, v: int, lr: float) -> list[dict[str, Any]]:
        if not self.grouped:
            return super().values(v, lr)
        return _scheduled(self.grouped, self.schedule).values(v) if self.schedule else [{} for _ in self.groups()]

    def given(self) -> dict[str, Any]:
        own = {name: value for name in OWN_OPTIONS if (value := getattr(self, name))}
        rate = {} if self.lr is None else {"lr": self.lr}
        return rate | dict(self.options) | own

    def with_options(self, given: Mapping[str, Any]) -> OptimizerRule:
        options, changed = dict(self.options), dict[str, Any]()
        signature = inspect.signature(optimizers.optimizer_class(self.path)).parameters
        for name, value in given.items():
            if name in OWN_OPTIONS:
                changed[name] = converted(self.path, name, value, bool) if name == "separate" else value
            elif name == "lr":
                changed["lr"] = converted(self.path, "lr", value, Rate)
            elif name not in signature or name == "params":
                raise UnknownName(f"option of {self.path}", name, [key for key in signature if key != "params"])
            else:
                options[name] = optimizers.frozen(_python(value) if isinstance(value, str) else value)
        return replace(self, options=tuple(sorted(options.items())), **changed)


_read = cache(ParameterGroup.read)


@cache
def _matrices(shapes: Shapes) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The places of the matrices, and of all other parameters."""
    found = tuple(place for place, shape in enumerate(shapes) if len(shape) == 2)
    return found, tuple(place for place in range(len(shapes)) if place not in found)


@cache
def _scheduled(grouped: str, schedule: str) -> GroupSchedule:
    return GroupSchedule(_read(grouped), json.loads(schedule))


def _python(text: str) -> Any:
    """A value of the command line: a number, true, false, none, several with commas, or text."""
    if "," in text:
        return tuple(_python(part) for part in text.split(",") if part)
    with suppress(ValueError):
        return int(text)
    with suppress(ValueError):
        return float(text)
    return {"true": True, "false": False, "none": None}.get(text.lower(), text)
