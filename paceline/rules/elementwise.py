"""Rules with an arithmetic of their own: that of torch.optim, operation by operation, on ranges of the vector."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.fields import Fraction, Rate
from paceline.rules.rule import SGD, Positive, Rule
from paceline.state import Vector


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
