"""What schemes with local steps share: a window of them, the buffers of the local rule, cells of an outer rule."""

from typing import Literal

from torch import Tensor

from paceline.rules import Rule
from paceline.scheme import Vector
from paceline.worker import Worker

Buffers = Literal["local", "reset", "average"]


def whole(window: float) -> int:
    """The steps of a window. A schedule may give a fraction: its whole part counts, at least 1."""
    return max(1, int(window))


async def local_steps(w: Worker, rule: Rule, lr: float, count: int) -> None:
    """`count` steps of a worker on its own x."""
    state = w.state
    for _ in range(count):
        rule.apply(state, await w.grad(state.x), lr)


async def settle_buffers(w: Worker, rule: Rule, how: Buffers) -> None:
    """After an exchange: keep the rule's buffers (momentum, moving means) local, reset them, or take their mean."""
    if how == "local":
        return
    for name, first in rule.cells(w.x).items():
        if how == "reset":
            setattr(w.state, name, first)
        elif first.dim() and first.is_floating_point():
            setattr(w.state, name, await w.mean(w.state.cell(name), whole=True))


def outer_cells(rule: Rule, x: Vector, prefix: str = "outer_") -> dict[str, Tensor]:
    """The cells of a second rule in a worker's state; `w.state.under(prefix)` is its state."""
    return {f"{prefix}{name}": cell for name, cell in rule.cells(x).items()}
