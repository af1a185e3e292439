"""Update rules: torch.optim's own arithmetic on the flat vector, with the rule's memory in named cells.

Each rule is a frozen dataclass. `rule.cells(x)` gives its memory; `rule.apply(state, g, lr)` changes x in place.
"""

from __future__ import annotations

import inspect
import math
from abc import abstractmethod
from contextlib import nullcontext
from dataclasses import dataclass, fields
from functools import cache
from typing import Annotated, Any, ClassVar, get_type_hints

import torch
from torch import Tensor
from torch.optim.adagrad import adagrad
from torch.optim.adam import adam
from torch.optim.adamw import adamw
from torch.optim.rmsprop import rmsprop
from torch.optim.sgd import sgd

from paceline.fields import Bound, Component, Fraction, Rate, bounds
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
    memory: ClassVar[tuple[str, ...]] = ()  # its cells: vectors, and the number `step`
    lr: Rate | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.name = cls.__name__.lower()

    @classmethod
    def members(cls) -> dict[str, type[Rule]]:
        return rules()

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
        memory = {name: state.cell(f"{self.name}_{name}") for name in self.memory}
        # nullcontext is cheaper, and nearly always enough
        with torch.no_grad() if torch.is_grad_enabled() else nullcontext():
            self._update(getattr(state, at), g, memory, vars(self) | {"lr": self.rate(lr)})

    def window(self, state: State, lr: float) -> Window:
        """A window of local steps on state.x, whose sum will be pushed."""
        return Window(self, state, lr)

    def _cell(self, name: str, x: Vector) -> Tensor:
        return torch.zeros_like(x)

    @abstractmethod
    def _update(self, x: Vector, g: Vector, memory: dict[str, Tensor], rates: dict[str, Any]) -> None:
        """torch.optim's arithmetic. `rates` are the rule's fields, which have the names of torch's arguments."""


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
        if self._start is None:
            if self._raw is None:
                self._raw = g.clone()
            else:
                self._raw += g
        self._rule.apply(self._state, g, self._lr)

    @property
    def sum(self) -> Vector:
        """The sum of the steps since the start."""
        if self._start is not None:
            if self._rate == 0:
                return torch.zeros_like(self._start)
            moved: Vector = (self._start - self._state.x) / self._rate
            return moved
        return torch.zeros_like(self._state.x) if self._raw is None else self._raw


@dataclass(frozen=True)
class SGD(Rule):
    """x <- x - lr * (g + weight_decay * x)"""

    linear: ClassVar[bool] = True
    weight_decay: Rate = 0.0

    def _update(self, x: Vector, g: Vector, memory: dict[str, Tensor], rates: dict[str, Any]) -> None:
        rates.setdefault("momentum", 0.0)
        buffer, nesterov = memory.get("buffer"), isinstance(self, Nesterov)
        sgd([x], [g], [buffer], dampening=0.0, nesterov=nesterov, maximize=False, foreach=False, **rates)


@dataclass(frozen=True)
class Momentum(SGD):
    """m <- momentum * m + g;  x <- x - lr * m"""

    momentum: Fraction = 0.9
    memory = ("buffer",)


@dataclass(frozen=True)
class Nesterov(Momentum):
    """m <- momentum * m + g;  x <- x - lr * (g + momentum * m)"""


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

    def _update(self, x: Vector, g: Vector, memory: dict[str, Tensor], rates: dict[str, Any]) -> None:
        del rates["initial_accumulator_value"]
        adagrad([x], [g], [memory["sum"]], [memory["step"]], maximize=False, foreach=False, **rates)


@dataclass(frozen=True)
class RMSprop(Rule):
    """q <- alpha * q + (1 - alpha) * g^2;  x <- x - lr * g / (sqrt(q) + eps)"""

    alpha: Fraction = 0.99
    eps: Positive = 1e-8
    weight_decay: Rate = 0.0
    momentum: Fraction = 0.0
    memory = ("square", "buffer", "step")

    def _update(self, x: Vector, g: Vector, memory: dict[str, Tensor], rates: dict[str, Any]) -> None:
        buffers = [memory["buffer"]] if self.momentum else []
        rmsprop([x], [g], [memory["square"]], [], buffers, [memory["step"]], centered=False, foreach=False, **rates)


@dataclass(frozen=True)
class Adam(Rule):
    """m, q: moving means of g and g^2, without their start-up bias;  x <- x - lr * m / (sqrt(q) + eps)"""

    beta1: Fraction = 0.9
    beta2: Fraction = 0.999
    eps: Positive = 1e-8
    weight_decay: Rate = 0.0
    function: ClassVar[Any] = adam
    memory = ("mean", "square", "step")

    def _update(self, x: Vector, g: Vector, memory: dict[str, Tensor], rates: dict[str, Any]) -> None:
        cells: Any = ([x], [g], [memory["mean"]], [memory["square"]], [], [memory["step"]])
        type(self).function(*cells, amsgrad=False, maximize=False, foreach=False, **rates)


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam with decoupled decay: x <- x - lr * weight_decay * x first"""

    weight_decay: Rate = 0.01
    function: ClassVar[Any] = adamw


def rules() -> dict[str, type[Rule]]:
    """Every rule of this file, by name."""
    found = (value for value in globals().values() if inspect.isclass(value) and issubclass(value, Rule))
    return {rule.name: rule for rule in found if rule is not Rule}
