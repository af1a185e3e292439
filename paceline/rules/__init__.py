"""Update rules: torch.optim's arithmetic on the flat vector, with the rule's memory in named cells.

Each rule is a frozen dataclass. `rule.cells(x)` gives its memory; `rule.apply(state, g, lr)` changes x in place.
"""

from __future__ import annotations

import copy
import inspect
import json
import math
from abc import abstractmethod
from collections.abc import Hashable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Annotated, Any, ClassVar, get_type_hints

import torch
from torch import Tensor

from paceline.errors import UnknownName
from paceline.fields import Bound, Component, Count, Fraction, Rate, bounds, converted
from paceline.rules import optimizers
from paceline.rules.blocks import BLOCK, in_blocks
from paceline.rules.group_schedules import GroupSchedule
from paceline.rules.optimizers import Options, ParameterGroup, Shapes
from paceline.state import State, Vector

Positive = Annotated[float, Bound(math.ulp(0))]


@cache
def _hints(kind: type) -> dict[str, Any]:
    """The types of a rule's fields, with bounds. Cached: windowed schemes make a rule in every step."""
    return get_type_hints(kind, include_extras=True)


@dataclass(frozen=True)
class Rule(Component):
    """x <- x - lr * direction(g). `lr` None: the scheme's."""

    kind: ClassVar[str] = "rule"
    linear: ClassVar[bool] = False  # the update is proportional to the scale of the gradients
    prepared: ClassVar[bool] = True  # its memory is complete before the first update
    listed: ClassVar[bool] = True  # has a name; others are made from a path
    memory: ClassVar[tuple[str, ...]] = ()  # its cells: vectors, and the number `step`
    lr: Rate | None = None

    def __init_subclass__(cls, listed: bool = True, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.name, cls.listed = cls.__name__.lower(), listed

    @classmethod
    def members(cls) -> dict[str, type[Rule]]:
        return rules()

    @classmethod
    def from_name(cls, name: str) -> Rule:
        """A rule by its name, or an optimizer by `torch.optim:Adam`, `package.module:Class` or `file.py:Class`."""
        if ":" in name:
            optimizers.optimizer_class(name)
            return OptimizerRule(path=name)
        return super().from_name(name)

    def __post_init__(self) -> None:
        hints = _hints(type(self))
        for field in fields(self):
            value = getattr(self, field.name)
            for bound in bounds(hints[field.name]) if value is not None else ():
                bound.check(self.name, field.name, value)

    def rate(self, lr: float) -> float:
        """The rate in use: the rule's own, or the scheme's."""
        return lr if self.lr is None else self.lr

    def cells(self, x: Vector) -> dict[str, Tensor]:
        """The memory of the rule at the start."""
        step = torch.zeros((), dtype=torch.float32)
        return {f"{self.name}_{name}": step if name == "step" else self._cell(name, x) for name in self.memory}

    def apply(self, state: State, g: Vector, lr: float, at: str = "x") -> None:
        """One update of the cell `at`, in place."""
        x = state.cell(at)
        if self._once() and x.numel() <= BLOCK and not torch.is_grad_enabled():
            self._update(x, g, self.rate(lr))
            return
        memory = {name: state.cell(f"{self.name}_{name}") for name in self.memory}
        rates = self._rates(self.rate(lr), memory.pop("step", None))
        vectors = (x, g, *memory.values())
        if torch.is_grad_enabled():
            with torch.no_grad():
                in_blocks(self._update, vectors, *rates, once=self._once())
        else:
            in_blocks(self._update, vectors, *rates, once=self._once())

    def row(self, x: Vector, gradients: Tensor, lr: float) -> Tensor | None:
        """x after each of several updates, by one gradient (a row) after the other, a row each; x stays as it is. None
        if the rule knows no shorter way than `apply`."""
        return None

    def window(self, state: State, lr: float) -> Window:
        """A window of local steps on state.x, whose sum will be pushed."""
        return Window(self, state, lr)

    def fitted(self, shapes: Shapes) -> Rule:
        """The rule for a vector of parameters with these shapes, if it needs to know them."""
        return self

    def whole(self) -> str | None:
        """Why the vector cannot be sharded under this rule."""
        return None

    def _cell(self, name: str, x: Vector) -> Tensor:
        return torch.zeros_like(x)

    def _rates(self, lr: float, step: Tensor | None) -> tuple[float, ...]:
        """The numbers that `_update` takes for this update; `step`, the cell that counts them, is raised."""
        return (lr,)

    def _once(self) -> bool:
        """Whether the update is a single operation."""
        return False

    @abstractmethod
    def _update(self, x: Vector, g: Vector, *given: Any) -> None:
        """The arithmetic of torch.optim, operation by operation, on a range of the vectors: x, g and the rule's memory;
        then the numbers of `_rates`. Each number of x depends on the same number of the others only."""


class Window:
    """A window of local steps. Their sum is in units of a gradient, so that a server with rate lr moves as far.

    Plain SGD adds the gradients themselves: a window of one is the gradient bit for bit. For another rule the sum is
    (start - end) / lr, the gradient that would have moved plain SGD as far.
    """

    def __init__(self, rule: Rule, state: State, lr: float) -> None:
        self._rule, self._state, self._lr = rule, state, lr
        self._rate = rule.rate(lr)
        self._raw: Vector | None = None
        self._start = None if rule == SGD(rule.lr) else state.x.clone()

    def step(self, g: Vector) -> None:
        """y <- y - lr * direction(g)"""
        if self._raw is None:
            if self._start is None:
                self._raw = g.clone()
            self._rule.apply(self._state, g, self._lr)
        elif torch.is_grad_enabled():
            with torch.no_grad():
                in_blocks(_added, (self._state.cell("x"), g, self._raw), self._rate)
        else:
            in_blocks(_added, (self._state.cell("x"), g, self._raw), self._rate)

    @property
    def sum(self) -> Vector:
        """The sum of the steps since the start."""
        if self._start is not None:
            if self._rate == 0:
                return torch.zeros_like(self._start)
            moved: Vector = (self._start - self._state.x) / self._rate
            return moved
        return torch.zeros_like(self._state.x) if self._raw is None else self._raw


def _added(x: Vector, g: Vector, total: Vector, lr: float) -> None:
    """A step of plain SGD and the sum of the gradients: g is read from memory once for both."""
    total.add_(g)
    x.add_(g, alpha=-lr)


@dataclass(frozen=True)
class SGD(Rule):
    """x <- x - lr * (g + weight_decay * x)"""

    linear: ClassVar[bool] = True
    weight_decay: Rate = 0.0

    def _update(self, x: Vector, g: Vector, lr: float) -> None:
        if self.weight_decay:
            g = g.add(x, alpha=self.weight_decay)
        x.add_(g, alpha=-lr)

    def _once(self) -> bool:
        return not self.weight_decay

    def row(self, x: Vector, gradients: Tensor, lr: float) -> Tensor | None:
        if type(self) is not SGD or self.weight_decay:
            return None
        rate, after = self.rate(lr), torch.empty_like(gradients)
        if x.device.type != "cpu":  # sums of the same numbers in the same order, by one kernel
            torch.mul(gradients, -rate, out=after)
            after[0] += x
            return after.cumsum_(0)
        for g, row in zip(gradients.unbind(), after.unbind(), strict=True):
            x = torch.add(x, g, alpha=-rate, out=row)
        return after


@dataclass(frozen=True)
class Momentum(SGD):
    """m <- momentum * m + g;  x <- x - lr * m"""

    momentum: Fraction = 0.9
    memory = ("buffer",)

    def _once(self) -> bool:
        return False

    def _update(self, x: Vector, g: Vector, buffer: Vector, lr: float) -> None:  # type: ignore[override]
        if self.weight_decay:
            g = g.add(x, alpha=self.weight_decay)
        x.add_(self._direction(g, buffer) if self.momentum else g, alpha=-lr)

    def _direction(self, g: Vector, buffer: Vector) -> Vector:
        return buffer.mul_(self.momentum).add_(g)


@dataclass(frozen=True)
class Nesterov(Momentum):
    """m <- momentum * m + g;  x <- x - lr * (g + momentum * m)"""

    def _direction(self, g: Vector, buffer: Vector) -> Vector:
        return g.add(super()._direction(g, buffer), alpha=self.momentum)


@dataclass(frozen=True)
class Adagrad(Rule):
    """a <- a + g^2;  x <- x - lr * g / (sqrt(a) + eps). TensorFlow starts a at 0.1: initial_accumulator_value."""

    lr_decay: Rate = 0.0
    weight_decay: Rate = 0.0
    initial_accumulator_value: Rate = 0.0
    eps: Rate = 1e-10
    memory = ("sum", "step")

    def _cell(self, name: str, x: Vector) -> Tensor:
        return torch.full_like(x, self.initial_accumulator_value)

    def _rates(self, lr: float, step: Tensor | None) -> tuple[float, ...]:
        return (lr / (1 + (_raised(step) - 1) * self.lr_decay),)

    def _update(self, x: Vector, g: Vector, total: Vector, lr: float) -> None:
        if self.weight_decay:
            g = g.add(x, alpha=self.weight_decay)
        total.addcmul_(g, g, value=1)
        x.addcdiv_(g, total.sqrt().add_(self.eps), value=-lr)


@dataclass(frozen=True)
class RMSprop(Rule):
    """q <- alpha * q + (1 - alpha) * g^2;  x <- x - lr * g / (sqrt(q) + eps)"""

    alpha: Fraction = 0.99
    eps: Positive = 1e-8
    weight_decay: Rate = 0.0
    momentum: Fraction = 0.0
    memory = ("square", "buffer", "step")

    def _rates(self, lr: float, step: Tensor | None) -> tuple[float, ...]:
        _raised(step)
        return (lr,)

    def _update(self, x: Vector, g: Vector, square: Vector, buffer: Vector, lr: float) -> None:
        if self.weight_decay:
            g = g.add(x, alpha=self.weight_decay)
        square.mul_(self.alpha).addcmul_(g, g, value=1 - self.alpha)
        root = square.sqrt().add_(self.eps)
        if self.momentum:
            x.add_(buffer.mul_(self.momentum).addcdiv_(g, root), alpha=-lr)
        else:
            x.addcdiv_(g, root, value=-lr)


@dataclass(frozen=True)
class Adam(Rule):
    """m, q: moving means of g and g^2, without their start-up bias;  x <- x - lr * m / (sqrt(q) + eps)"""

    beta1: Fraction = 0.9
    beta2: Fraction = 0.999
    eps: Positive = 1e-8
    weight_decay: Rate = 0.0
    memory = ("mean", "square", "step")

    def _rates(self, lr: float, step: Tensor | None) -> tuple[float, ...]:
        count = _raised(step)
        return lr, lr / (1 - self.beta1**count), (1 - self.beta2**count) ** 0.5

    def _update(self, x: Vector, g: Vector, mean: Vector, square: Vector, lr: float, size: float, bias: float) -> None:
        if self.weight_decay:
            g = self._decayed(x, g, lr)
        mean.lerp_(g, 1 - self.beta1)
        square.mul_(self.beta2).addcmul_(g, g, value=1 - self.beta2)
        x.addcdiv_(mean, square.sqrt().div_(bias).add_(self.eps), value=-size)

    def _decayed(self, x: Vector, g: Vector, lr: float) -> Vector:
        """The gradient with the decay of the weights."""
        return g.add(x, alpha=self.weight_decay)


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam with decoupled decay: x <- x - lr * weight_decay * x first"""

    weight_decay: Rate = 0.01

    def _decayed(self, x: Vector, g: Vector, lr: float) -> Vector:
        x.mul_(1 - lr * self.weight_decay)
        return g


def _raised(step: Tensor | None) -> float:
    """The number of this update, from 1, in the cell that counts them."""
    assert step is not None
    step += 1
    return step.item()


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

    def fitted(self, shapes: Shapes) -> Rule:
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
    """Momentum made orthogonal by Newton-Schulz iterations; for models whose parameters are all matrices"""

    path = "torch.optim:Muon"
    momentum: Fraction = 0.95
    nesterov: bool = True
    weight_decay: Rate = 0.1
    eps: Positive = 1e-7
    ns_steps: Count = 5


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


def rules() -> dict[str, type[Rule]]:
    """Every rule of this file that has a name, by name."""
    found = (value for value in globals().values() if inspect.isclass(value) and issubclass(value, Rule))
    return {rule.name: rule for rule in found if rule is not Rule and rule.listed}
