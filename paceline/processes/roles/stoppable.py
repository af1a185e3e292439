"""Gradients that are given up when they have become useless."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from paceline.state import Vector
from paceline.task import Batch, GradientStopped, Task

Grad = Callable[[Vector, Batch, Vector, Mapping[str, Tensor] | None], tuple[float, Vector]]


def gradient_unless(
    useless: Callable[[], bool],
    task: Task,
    grad: Grad,
    x: Vector,
    batch: Batch,
    out: Vector,
    buffers: Mapping[str, Tensor] | None,
) -> tuple[float, Vector] | None:
    """Loss and gradient by `grad` of the task; None if it is useless before its end. Then it leaves no trace: the
    buffers are as before, and the mini-batch can be taken again."""
    if useless():
        return None
    before = {name: buffer.clone() for name, buffer in (buffers or {}).items()}
    task.watch(useless)
    try:
        found = grad(x, batch, out, buffers)
        if not useless():
            return found
    except GradientStopped:
        pass
    finally:
        task.watch(None)
    for name, buffer in before.items():
        (buffers or {})[name].copy_(buffer)
    return None
