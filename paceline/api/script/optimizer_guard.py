"""Refuses an optimizer of the script that would change the model, or whose rates would change, behind the scheme."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from paceline.errors import UsageError


class ScriptOptimizer(Optimizer):
    """Stands for the scheme where code wants a torch.optim.Optimizer: GradScaler, or a loop that calls `step()`."""

    def __init__(self, parameters: Sequence[Tensor], step: Callable[[], bool]) -> None:
        super().__init__(parameters, {})
        self._step = step

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if closure is not None:
            raise UsageError("pace.optimizer.step() takes no closure: a scheme computes one gradient per step")
        self._step()


class OptimizerGuard:
    """`given`: the optimizers that attach() took as the scheme's rule; the scheme has copies of their options."""

    def __init__(self, parameters: Iterable[Tensor], given: Sequence[Optimizer]) -> None:
        self._parameters = {id(parameter) for parameter in parameters}
        self._rates = [(group, group["lr"]) for one in given for group in one.param_groups if "lr" in group]

    @contextmanager
    def watching(self) -> Any:
        """Refuse inside to step optimizers of the model's parameters."""
        hook = register_optimizer_step_pre_hook(self._refuse_step)
        try:
            yield
        finally:
            hook.remove()

    def check_rates(self) -> None:
        for group, rate in self._rates:
            if group["lr"] != rate:
                raise UsageError(
                    f"the rate of the optimizer was changed from {rate} to {group['lr']} inside the block, where the "
                    "scheme makes the updates: give the schedule to attach(), as schedule= or lr='cosine:0.1,over=1000'"
                )

    def _refuse_step(self, optimizer: Optimizer, *_: Any) -> None:
        if isinstance(optimizer, ScriptOptimizer):
            return
        if any(id(parameter) in self._parameters for group in optimizer.param_groups for parameter in group["params"]):
            raise UsageError(
                f"{type(optimizer).__name__}.step() would change the model behind the scheme: give the optimizer to "
                "attach(model, optimizer=…), and call pace.step() (or pace.optimizer.step()) in its place"
            )
