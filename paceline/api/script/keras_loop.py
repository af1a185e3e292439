"""The loop of a Keras script as a worker: `pace.step(lambda: loss(y, model(x, training=True)))`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from paceline.api.script.keras_gradients import Differentiate, LossFunction, differentiation
from paceline.api.script.keras_model import KerasScript
from paceline.api.script.script_loop import ScriptLoop
from paceline.errors import UsageError
from paceline.hook import Hook
from paceline.processes.roles.worker_session import WorkerSession


class KerasPace(ScriptLoop):
    """The training of a Keras script: `with paceline.attach(model, …) as pace: for … in pace.share(data): …`"""

    _task: KerasScript
    shows_loss = "give it with the gradient"

    def __init__(self, session: WorkerSession, task: KerasScript, hooks: Sequence[Hook], around: ExitStack) -> None:
        super().__init__(session, task, hooks, around)
        self._differentiate: Differentiate = differentiation(task.model, task.trained)

    def step(self, function: LossFunction | None = None, *arguments: object, size: int | None = None) -> bool:
        """Compute the gradient of a loss, give it to the session, and set the model to the parameters of the next step;
        False at the end.

        function:  gives the loss, a scalar tensor. Without arguments it is called as it is:
                   `pace.step(lambda: loss(y, model(x, training=True)))`.
        arguments: of the function, which is compiled then (tf.function, jax.jit; the torch backend runs it as it is):
                   `pace.step(loss_of, x, y)`. It must be a function of its arguments and the model, defined once.
        size:      samples that the gradient is of; default: those from share() since the last step."""
        self._inside("step()")
        if not callable(function):
            given = "nothing" if function is None else f"a {type(function).__name__}"
            raise UsageError(
                f"pace.step() was given {given}: a Keras model needs the loss as a function, "
                "pace.step(lambda: loss(y, model(x, training=True)))"
            )
        if self._out is None:
            return False
        self._task.check_weights()
        loss, found = self._differentiate(function, arguments)
        if all(one is None for one in found):
            raise UsageError("the loss does not depend on the model: no weight has a gradient")
        self.give(found, float(loss), size)
        return not self.done

    def give(self, gradients: Sequence[Any], loss: float | None, size: int | None) -> None:
        """Give the session a gradient, a tensor of the backend or None for each weight."""
        if self._out is not None:
            self._task.write(gradients, self._out)
            self._task.keep_buffers()
            self._give(loss, size)
