"""The loop of a JAX script as a worker: `params = pace.step(grads)`."""

from __future__ import annotations

from types import FunctionType
from typing import Any

from paceline.api.script.jax_params import JaxParams
from paceline.api.script.script_loop import ScriptLoop
from paceline.errors import UsageError


class JaxPace(ScriptLoop):
    """The training of a JAX script: `with paceline.attach(params, …) as pace: … params = pace.step(grads, loss)`"""

    _task: JaxParams
    shows_loss = "pass it, as in pace.step(grads, loss)"

    @property
    def params(self) -> Any:
        """The parameters at which the next gradient is wanted; after the block, the final ones of the centre."""
        return self._task.params

    def step(self, grads: Any = None, loss: Any = None, size: int | None = None) -> Any:
        """Give the gradients to the session; gives the parameters at which the next ones are wanted. At the end of the
        run (`pace.done`) these are the last ones.

        grads: a pytree of the structure of the parameters, as jax.grad gives it;
        loss:  a number, shown and recorded;
        size:  samples that the gradient is of; default: those from share() since the last step."""
        self._inside("step()")
        if grads is None:
            raise UsageError("there is no gradient to give: pass what jax.grad gave, pace.step(grads, loss)")
        if self._out is None:
            return self._task.params
        if isinstance(grads, FunctionType):  # modules that are pytrees may be called, too
            raise UsageError("pace.step() of a JAX pytree takes gradients, not a function: pace.step(grads, loss)")
        self._task.flat.write(grads, self._out)
        self._give(None if loss is None else float(loss), size)
        return self._task.params
