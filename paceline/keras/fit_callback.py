"""`model.fit` as the loop of a worker.

Keras computes the gradient in its own train step, compiled as ever. A `GradientRecorder` stands where the optimizer
was, and keeps it. After each batch the callback gives it to the session, and sets the weights to those of the
next step.
"""

from __future__ import annotations

import atexit
from typing import Any

import keras

from paceline.api.script.attach import attach
from paceline.api.script.keras_loop import KerasPace
from paceline.api.script.keras_model import KerasScript
from paceline.errors import RunError, UsageError
from paceline.keras.data_shares import place
from paceline.keras.gradient_recorder import GradientRecorder

_last: FitCallback | None = None  # that a fit() has begun with


class FitCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Trains under a scheme by `model.fit`: `model.fit(x, y, callbacks=[paceline.keras.Pace("downpour", lr=0.05)])`.

    All arguments are those of `paceline.attach`. The scheme's rule and rate (`rule=`, `lr=`) make the updates; the
    optimizer of `model.compile` makes none, and is the model's again afterwards. The run's end ends `fit`; after it the
    model holds the final weights of the centre.
    """

    def __init__(self, scheme: Any = "async", **settings: Any) -> None:
        super().__init__()
        self._scheme, self._settings = scheme, settings
        self._loop: KerasPace | None = None
        self._task: KerasScript
        self._recorder: GradientRecorder
        self._optimizer: Any = None  # of the model
        self._rate = 0.0
        self._counted = 0.0  # samples that the loss metric has seen in this epoch
        self.rank, self.workers = place()
        self.chief = self.rank == 0

    @property
    def loop(self) -> KerasPace:
        """What `attach` gave: updates, staleness, say(), stop(); during and after `fit`."""
        if self._loop is None:
            raise UsageError("paceline.keras.Pace has no run yet: pass it to model.fit(callbacks=[…])")
        return self._loop

    def on_train_begin(self, logs: Any = None) -> None:
        """Attach the model, and put the recorder in the optimizer's place."""
        global _last
        model = self.model
        _check(model)
        if _last is not None:
            _last._abandoned()
        _last = self
        self._loop = loop = attach(model, self._scheme, **self._settings)
        self._task = loop._task
        self._optimizer = before = model.optimizer
        self._rate = 0.0 if callable(getattr(before, "_learning_rate", None)) else float(before.learning_rate)
        self._recorder = GradientRecorder(self._rate)
        model.optimizer = self._recorder
        self._recorder.build(self._task.trained)
        model.make_train_function(force=True)
        if self.chief:
            loop.say(f"{type(before).__name__} of model.compile() makes no updates: the scheme does")
        atexit.register(self._abandoned)
        loop.__enter__()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Keras resets its metrics."""
        self._counted = 0.0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Give the gradient to the session, and set the weights to those of the next step."""
        loop, model = self.loop, self.model
        if loop.done:
            model.stop_training = True
            return
        if hasattr(model, "jax_state_sync"):  # fit() holds the weights itself meanwhile, on the JAX backend
            model.jax_state_sync()
        if float(self._recorder.learning_rate) != self._rate:
            raise UsageError(
                "a callback has changed the learning rate of the optimizer, which makes no updates here: give the "
                "schedule to the scheme, as in paceline.keras.Pace(…, lr='cosine:0.1,over=1000')"
            )
        self._task.check_weights()
        shown = (logs or {}).get("loss")
        loop.give(self._recorder.gradients(self._task.trained), shown, self._size())
        if loop.done:
            model.stop_training = True

    def on_train_end(self, logs: Any = None) -> None:
        """End the worker's part, and give the model its optimizer back."""
        atexit.unregister(self._abandoned)
        try:
            self.loop.__exit__(None, None, None)
        finally:
            self._give_back()

    def _give_back(self) -> None:
        self.model.optimizer = self._optimizer
        self.model.train_function = None  # which has the recorder in it

    def _size(self) -> int | None:
        """Samples of the batch, by Keras's metric of the loss."""
        metric = next((one for one in self.model.metrics if one.name == "loss" and hasattr(one, "count")), None)
        if metric is None:
            return None
        before, self._counted = self._counted, float(metric.count)
        return max(0, round(self._counted - before)) or None  # a train step of the script may not count

    def _abandoned(self) -> None:
        """fit() has raised: Keras tells callbacks nothing of an exception, so it is noticed at the next
        call of fit(), or at the end of the script."""
        if self._loop is not None and not self._loop.done:
            error = RunError("model.fit() ended with an exception")
            self.loop.__exit__(type(error), error, None)
            self._give_back()


def _check(model: Any) -> None:
    """UsageError for what would train something else than was meant."""
    optimizer = model.optimizer
    if optimizer is None:
        raise UsageError("the model is compiled without an optimizer: model.compile(optimizer='sgd', loss=…)")
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise UsageError(
            "the model scales its loss (mixed_float16), which is its optimizer's part: use mixed_bfloat16 or float32"
        )
    if getattr(model, "steps_per_execution", 1) != 1:
        raise UsageError("steps_per_execution must be 1: a scheme takes the gradient of every batch")
    replicas = getattr(getattr(model, "distribute_strategy", None), "num_replicas_in_sync", 1)
    if replicas > 1 or keras.distribution.distribution() is not None:
        raise UsageError("the model is distributed by Keras itself: start a worker for each device instead")
