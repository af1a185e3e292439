"""What an update rule is, and plain SGD, in whose units the sum of a window of local steps is."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache
from typing import Annotated, Any, ClassVar, get_type_hints

import torch
from torch import Tensor

from paceline.fields import Bound, Component, Rate, bounds
from paceline.rules import optimizers
from paceline.rules.blocks import BLOCK, in_blocks
from paceline.rules.optimizers import Shapes
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
    known: ClassVar[dict[str, type[Rule]]] = {}  # by name: the package fills it in
    of_class: ClassVar[Callable[[str], Rule]]  # the rule that runs an optimizer's class
    lr: Rate | None = None

    def __init_subclass__(cls, listed: bool = True, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.name, cls.listed = cls.__name__.lower(), listed

    @classmethod
    def members(cls) -> dict[str, type[Rule]]:
        """Every rule that has a name."""
        return cls.known

    @classmethod
    def from_name(cls, name: str) -> Rule:
        """A rule by its name, or an optimizer by `torch.optim:Adam`, `package.module:Class` or `file.py:Class`."""
        if ":" in name:
            optimizers.optimizer_class(name)
            return cls.of_class(name)
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
