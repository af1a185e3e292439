"""A Keras model that processes hand to each other: as a function that builds it, or as an archive that is read where
the model computes."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.errors import UsageError
from paceline.torch_task.random_numbers import all_seeded

ASK = "give KerasTask a function that builds the model"


class KerasModel:
    """Builds a model of Keras in the process that needs it, with its loss and metrics. The model that was given is not
    changed: its archive is read."""

    def __init__(self, keras: Any, given: Any, loss: Any, metrics: Any) -> None:
        self.build: Callable[[], Any] | None = None if isinstance(given, keras.Model) else given
        self._archive, self._custom = b"", {}
        if self.build is None:
            if loss is None and getattr(given, "compiled", False):
                loss = given.loss
            if metrics is None and getattr(given, "compiled", False):
                metrics = getattr(given._compile_metrics, "_user_metrics", None)
            self._custom = _custom_objects(given)
            self._archive = _archived(given)
        elif not callable(given):
            raise UsageError(f"KerasTask: model must be a Keras model, or {ASK[10:]}, not a {type(given).__name__}")
        self._loss, self._metrics = _described(keras, loss), _described(keras, metrics)

    def made(self, keras: Any, seed: int) -> Any:
        """A new model: built under the seed, or with the weights of the archive."""
        model = self._read(keras) if self.build is None else self._built(keras, seed)
        if not model.built:
            raise UsageError(f"the Keras model {model.name!r} has no weights yet: give it a keras.Input, or build it")
        if self._loss is None and not model.compiled:
            raise UsageError("KerasTask: the model is not compiled: give loss=, or compile it")
        if self._loss is not None or self._metrics is not None:
            loss = _revived(keras, self._loss) if self._loss is not None else model.loss
            model.compile(optimizer="sgd", loss=loss, metrics=_revived(keras, self._metrics))
        return model

    def _built(self, keras: Any, seed: int) -> Any:
        assert self.build is not None
        with all_seeded(seed):
            keras.utils.set_random_seed(seed % 2**31)
            model = self.build()
        if not isinstance(model, keras.Model):
            raise UsageError(f"KerasTask: the function gave a {type(model).__name__}, not a Keras model")
        return model

    def _read(self, keras: Any) -> Any:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.keras"
            path.write_bytes(self._archive)
            try:
                # lambdas too: the archive was written by the caller's own process, not read from a file
                return keras.saving.load_model(path, custom_objects=self._custom, compile=False, safe_mode=False)
            except (TypeError, ValueError) as error:
                raise UsageError(f"the Keras model cannot be built in another process ({error}); {ASK}") from error


def _archived(model: Any) -> bytes:
    if not model.built:
        raise UsageError(f"the Keras model {model.name!r} has no weights yet: give it a keras.Input, or build it")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.keras"
        try:
            model.save(path)
        except (TypeError, ValueError, NotImplementedError) as error:
            raise UsageError(f"the Keras model cannot be written to an archive ({error}); {ASK}") from error
        return path.read_bytes()


def _custom_objects(model: Any) -> dict[str, Any]:
    """The classes of the user's own layers, which an archive only names."""
    layers = [model, *model._flatten_layers(include_self=False, recursive=True)]
    return {type(one).__name__: type(one) for one in layers if not type(one).__module__.startswith("keras")}


class Described:
    """A loss or metric of Keras as its class and configuration: its variables would start the framework."""

    def __init__(self, made: Any) -> None:
        self.cls, self.config = type(made), made.get_config()

    def revived(self) -> Any:
        return self.cls.from_config(self.config)


def _described(keras: Any, given: Any) -> Any:
    if isinstance(given, list | tuple):
        return [_described(keras, one) for one in given]
    if isinstance(given, dict):
        return {name: _described(keras, one) for name, one in given.items()}
    return Described(given) if isinstance(given, keras.Metric | keras.Loss) else given


def _revived(keras: Any, given: Any) -> Any:
    if isinstance(given, list):
        return [_revived(keras, one) for one in given]
    if isinstance(given, dict):
        return {name: _revived(keras, one) for name, one in given.items()}
    return given.revived() if isinstance(given, Described) else given
