"""Callbacks of Keras in a run of a KerasTask, whose loop is the worker's: a hook calls them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import keras
import numpy as np

from paceline import user_code
from paceline.errors import UsageError
from paceline.fields import Count
from paceline.hook import Role, Session
from paceline.hooks._metric import learning_rates
from paceline.hooks._options import Checked
from paceline.hooks._periodic import Timer

NO_OPTIMIZER = (
    "the optimizer of the model makes no updates here: give the schedule to the scheme, lr='cosine:0.1,over=1000'"
)
REFUSED = {
    "LearningRateScheduler": NO_OPTIMIZER,
    "ReduceLROnPlateau": NO_OPTIMIZER,
    "SwapEMAWeights": "it changes the weights of the model; the hook weight-ema evaluates an average of them",
    "BackupAndRestore": "it restores the weights of the model; checkpoints of the run and --resume do that",
}


@dataclass
class Callbacks(Checked, name="keras-callbacks"):
    """The chief calls Keras callbacks that read the model, such as CSVLogger, TensorBoard or ModelCheckpoint.

    `callbacks`: the callbacks, or a function that gives them, which may be named as file.py:NAME. An epoch of theirs is
    `every` updates of the centre. Batches are the chief's. The logs of an epoch have the mean `loss` of the chief's
    batches in it, and the metrics of the centre on the test data as `val_loss`, …. At the end of an epoch the model of
    the callbacks has the weights of the centre. A callback that sets `model.stop_training` (EarlyStopping) ends the
    run; one that changes weights or the learning rate is refused.
    """

    roles: ClassVar[frozenset[Role]] = frozenset({"chief"})
    callbacks: str | Callable[[], Any] = ""
    every: Count = 100

    def __post_init__(self) -> None:
        if isinstance(self.callbacks, keras.callbacks.Callback | Sequence) and not isinstance(self.callbacks, str):
            self.callbacks = partial(_listed, self.callbacks)
        super().__post_init__()
        if isinstance(self.callbacks, str):
            self._function()  # a misspelt name is an error before anything starts
        elif isinstance(self.callbacks, partial):
            self._checked()

    def begin(self, session: Session) -> None:
        self._called = self._checked()
        self._failed, self._batches = False, 0
        self._sum = 0.0  # of the losses of the epoch's batches
        self._model = session.trained_model()
        if not isinstance(self._model, keras.Model):
            raise UsageError(f"{self.name}: the model of the run is a {type(self._model).__name__}: use a KerasTask")
        self._timer = Timer(self.every, None, session.updates, 0.0)
        for one in self._called:
            one.set_params({"epochs": None, "steps": self.every, "verbose": 0})
            one.set_model(self._model)
        self._note(session)
        self._call(session, "on_train_begin")
        self._begin_epoch(session)

    def after_gradient(self, session: Session, loss: float) -> None:
        self._call(session, "on_train_batch_begin", self._batches, {})
        self._sum, self._batches = self._sum + loss, self._batches + 1
        self._call(session, "on_train_batch_end", self._batches - 1, {"loss": loss})

    def after_step(self, session: Session) -> None:
        if self._timer.due(session.updates, 0.0):
            self._end_epoch(session)
            self._begin_epoch(session)

    def failed(self, session: Session, error: BaseException) -> None:
        self._failed = True

    def end(self, session: Session) -> None:
        if self._batches and not self._failed:
            self._end_epoch(session)
        self._call(session, "on_train_end")

    def _begin_epoch(self, session: Session) -> None:
        self._epoch, self._sum, self._batches = session.updates // self.every, 0.0, 0
        self._call(session, "on_epoch_begin", self._epoch, {})

    def _end_epoch(self, session: Session) -> None:
        self._check_unchanged()
        self._model.set_weights(session.trained_model().get_weights())
        self._note(session)
        logs = {"loss": self._sum / self._batches} if self._batches else {}
        logs |= {f"val_{name}": value for name, value in session.evaluate().items()}
        self._call(session, "on_epoch_end", self._epoch, logs)

    def _call(self, session: Session, method: str, *arguments: Any) -> None:
        self._model.stop_training = False
        for one in self._called:
            getattr(one, method)(*arguments)
            if self._model.stop_training:
                self._model.stop_training = False
                session.stop(f"{type(one).__name__} of Keras has set stop_training")

    def _note(self, session: Session) -> None:
        """Remember what the callbacks must not change. They may read the rate of the scheme."""
        rate = learning_rates(session).get("learning_rate")
        if rate is not None:
            self._model.optimizer.learning_rate = rate
        self._rate = float(self._model.optimizer.learning_rate)
        self._weights = self._model.get_weights()

    def _check_unchanged(self) -> None:
        if float(self._model.optimizer.learning_rate) != self._rate:
            raise UsageError(f"{self.name}: a callback has changed the learning rate, but {NO_OPTIMIZER}")
        if not all(map(np.array_equal, self._weights, self._model.get_weights())):
            raise UsageError(f"{self.name}: a callback has changed weights of the model; they are the scheme's alone")

    def _function(self) -> Callable[[], Any]:
        given = self.callbacks
        return user_code.function(f"callbacks of {self.name}", given) if isinstance(given, str) else given

    def _checked(self) -> list[Any]:
        """The callbacks, of which none would own the loop or change the model."""
        made = _listed(self._function()())
        for one in made:
            kind = type(one).__name__
            if not isinstance(one, keras.callbacks.Callback) or isinstance(one, keras.callbacks.CallbackList):
                raise UsageError(f"{self.name}: {one!r} is not a callback of Keras")
            if kind == "FitCallback":
                raise UsageError(
                    f"{self.name}: paceline.keras.Pace is for model.fit; here the run has a scheme already"
                )
            reason = next((REFUSED[cls.__name__] for cls in type(one).__mro__ if cls.__name__ in REFUSED), None)
            if reason is None and getattr(one, "restore_best_weights", False):
                reason = (
                    "it restores weights of the model; --evaluator keeps the best ones (restore_best_weights=False)"
                )
            if reason is not None:
                raise UsageError(f"{self.name}: {kind} cannot be called: {reason}")
        return made


def _listed(given: Any) -> list[Any]:
    return list(given) if isinstance(given, Sequence) else [given]
