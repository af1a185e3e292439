"""The Keras model of a script: its weights are copied from the run's vector before a step. Any backend of Keras 3."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.api.script.numpy_views import copy_into, numbers_of
from paceline.api.script.script_task import Evaluate, ScriptTask
from paceline.errors import UsageError
from paceline.state import Vector

_COUNTS = {"bool", "int8", "int16", "int32", "int64", "uint8"}  # of buffers, as torch has them too


class KerasScript(ScriptTask):
    """A script's Keras model: trainable weights in the vector, other weights (moving averages) as buffers. The states
    of its random numbers stay its own."""

    def __init__(self, model: Any, evaluate: Evaluate | None, name: str) -> None:
        super().__init__(evaluate, name)
        self.model = model
        self.trained = list(model.trainable_variables)
        named = f"the model {model.name}"
        if not model.built:
            raise UsageError(f"{named} has no weights yet: call it on a batch, or model.build(shape), before attach()")
        if not self.trained:
            raise UsageError(f"{named} has no trainable weights: nothing to train")
        self.dtype = numbers_of([(one.path, one.dtype) for one in self.trained], named)
        if self.dtype == torch.bfloat16:
            raise UsageError(f"{named} has weights of bfloat16: keep them in float32, with the policy mixed_bfloat16")
        bound = [one.path for one in self.trained if getattr(one, "constraint", None) is not None]
        if bound:
            raise UsageError(
                f"{named} has a constraint on {bound[0]}, which optimizers of Keras apply and a scheme does not: "
                "remove it, or write it into the loss"
            )
        self._sizes = [int(np.prod(one.shape)) for one in self.trained]
        self._size = sum(self._sizes)
        weights = {id(one) for one in model.weights} - _frozen(model)
        others = model.non_trainable_variables
        self._kept = _by_name([one for one in others if id(one) in weights and _can_be_kept(one)])
        owned = {id(one) for one in model.weights}
        self._own = [one for one in others if id(one) not in owned]  # states of random numbers
        self._x = self.start(0)
        self._shared: dict[str, Tensor] = {}

    def parameters(self) -> list[tuple[str, list[int]]]:
        return [(name, list(one.shape)) for name, one in _by_name(self.trained).items()]

    def start(self, seed: int) -> Vector:
        vector = torch.empty(self._size, dtype=self.dtype)
        self.write([one.value for one in self.trained], vector)
        return vector

    def buffers(self) -> dict[str, Tensor]:
        return {name: torch.from_numpy(_array(one.value).copy()) for name, one in self._kept.items()}

    @contextmanager
    def standing_at(self, x: Vector, buffers: Mapping[str, Tensor] | None) -> Iterator[Any]:
        present, states = self.buffers(), [_array(one.value).copy() for one in self._own]
        self._set(x, buffers)
        try:
            yield self.model
        finally:
            self._set(self._x, present)
            for one, state in zip(self._own, states, strict=True):
                one.assign(state)

    def seed(self, seed: int) -> None:
        import keras

        keras.utils.set_random_seed(seed % 2**32)
        for number, one in enumerate(self._own):  # of dropout: all workers have made the same ones
            if one.dtype == "uint32" and tuple(one.shape) == (2,):
                one.assign(np.array([(seed + number) % 2**32, 0], dtype=np.uint32))

    # for the loop

    def settle(self, buffers: dict[str, Tensor]) -> None:
        self._shared = buffers
        self._set(self._x, buffers)

    def bind(self, x: Vector, out: Vector) -> None:
        self._x = x.detach()
        self._set(x, None)

    def let_go(self, x: Vector | None = None, buffers: Mapping[str, Tensor] | None = None) -> None:
        self._x = (self._x if x is None else x).detach().clone()
        self._set(self._x, buffers)

    def check_weights(self) -> None:
        """UsageError if the script has changed which weights train."""
        present = self.model.trainable_variables
        if [id(one) for one in present] == [id(one) for one in self.trained]:
            return
        changed = {id(one): one.path for one in (*present, *self.trained)}
        for one in present:
            if any(one is other for other in self.trained):
                del changed[id(one)]
        raise UsageError(
            f"trainable of {', '.join(list(changed.values())[:3])} was changed inside the block: a run trains the "
            "weights that attach() has found trainable. Freeze or unfreeze before attach()"
        )

    def write(self, values: Sequence[Any], out: Vector) -> None:
        """Copy one value per trained weight, tensors of the backend, into a vector. None is 0."""
        first = 0
        for value, size in zip(values, self._sizes, strict=True):
            if value is None:
                out[first : first + size] = 0
            else:
                copy_into(out, first, _array(value))
            first += size

    def _set(self, x: Vector, buffers: Mapping[str, Tensor] | None) -> None:
        # one copy of its own: backends may use the memory of an array that they are given
        copied, first = x.detach().cpu().clone().numpy(), 0
        for one, size in zip(self.trained, self._sizes, strict=True):
            one.assign(copied[first : first + size].reshape(one.shape))
            first += size
        if buffers is not None:
            for name, one in self._kept.items():
                one.assign(buffers[name].detach().cpu().clone().numpy())

    def keep_buffers(self) -> None:
        """Copy the model's buffers to the run."""
        for name, one in self._kept.items():
            self._shared[name].copy_(torch.from_numpy(_array(one.value).copy()))


def _array(value: Any) -> np.ndarray[Any, Any]:
    """A tensor of any backend."""
    return value.detach().cpu().numpy() if isinstance(value, Tensor) else np.asarray(value)


def _can_be_kept(variable: Any) -> bool:
    return str(variable.dtype) in {"float16", "float32", "float64", *_COUNTS}


def _frozen(model: Any) -> set[int]:
    """The weights that would train if their layers were not frozen: they stay in the script."""
    layers = model._flatten_layers()
    return {id(one) for layer in layers for one in layer._trainable_variables if not one.trainable}


def _by_name(variables: Sequence[Any]) -> dict[str, Any]:
    """The variables by their paths, which layers of the same name may share."""
    named: dict[str, Any] = {}
    for one in variables:
        same = sum(other.path == one.path for other in named.values())
        named[f"{one.path}.{same}" if same else one.path] = one
    return named
