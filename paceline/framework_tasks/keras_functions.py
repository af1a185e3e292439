"""The gradient and the output of a Keras model as functions of one flat vector, on each backend of Keras."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.framework_tasks.beginning import places
from paceline.framework_tasks.flat_blocks import FlatBlocks
from paceline.framework_tasks.framework_start import needed
from paceline.framework_tasks.framework_task import as_numpy, two_words
from paceline.state import Vector
from paceline.torch_task.random_numbers import seeded

COUNTED = re.compile(r"_\d+(?=/|$)")
SEEDS = "seed_generator_state"  # what Keras calls the variable of a seed generator


class KerasFunctions(ABC):
    """A model of this process and what is compiled of it. Weights and state are arguments: no variable of the model is
    written, so that one model serves many workers."""

    def __init__(self, keras: Any, model: Any, answers: int) -> None:
        """`answers`: the last parts of a batch, which are no inputs: the target, and the weights of its samples."""
        self.keras, self.model, self.answers = keras, model, answers
        self.weights = list(model.trainable_variables)
        frozen = {id(one) for layer in model._flatten_layers() for one in layer._trainable_variables}
        self._state = list(model.non_trainable_variables)
        self._seeds = [one for one in self._state if one.name == SEEDS]
        others = [one for one in self._state if one.name != SEEDS and id(one) not in frozen]
        self.buffers = _by_path(others)
        self.parameters = [(name, list(one.shape)) for name, one in _by_path(self.weights).items()]
        self.places = places(self.parameters)
        self.blocks = FlatBlocks(self.places)

    @abstractmethod
    def gradient(
        self, x: Vector, buffers: Mapping[str, Tensor], seed: int, parts: Sequence[Tensor], weight: float, out: Vector
    ) -> float:
        """The loss times the weight; writes its gradient into `out` and the new state into `buffers`."""

    @abstractmethod
    def evaluated(self, x: Vector, buffers: Mapping[str, Tensor], parts: Sequence[Tensor]) -> tuple[float, Any]:
        """The loss and the output of some samples."""

    def loss(
        self,
        weights: Sequence[Any],
        buffers: Sequence[Any],
        seeds: Any,
        parts: Sequence[Any],
        train: bool,
    ) -> tuple[Any, list[Any], Any]:
        """The loss, the new state of the buffers, and the output, of arrays of the backend."""
        held = {id(one): value for one, value in zip(self.buffers.values(), buffers, strict=True)}
        held |= {id(one): self.keras.ops.cast(seeds[i], one.dtype) for i, one in enumerate(self._seeds)}
        state = [held.get(id(one), one.value) for one in self._state]
        given, target, *weighing = self.told_apart(parts)
        mapping = [*zip(self.weights, weights, strict=True), *zip(self._state, state, strict=True)]
        with self.keras.StatelessScope(state_mapping=mapping, collect_losses=True) as scope:
            output = self.model(given, training=train)
            # regularisers and add_loss included
            loss = self.model.compute_loss(given, target, output, *weighing, training=train)
            new = [scope.get_current_value(one) for one in self.buffers.values()]
        return loss, new, output

    def told_apart(self, parts: Sequence[Any]) -> tuple[Any, ...]:
        """What the model is called with, the target, and the weights of the samples if there are any."""
        inputs = parts[: -self.answers]
        return inputs[0] if len(inputs) == 1 else list(inputs), *parts[-self.answers :]

    def words(self, seed: int) -> np.ndarray:
        """The first state of every seed generator of the model."""
        high, low = two_words(seed)
        return np.array([[(low + 0x61C88647 * i) & 0x7FFFFFFF, high] for i in range(len(self._seeds))], np.uint32)

    def assign(self, x: Vector, buffers: Mapping[str, Tensor]) -> None:
        """Write weights and state into the model's own variables."""
        for one, (begin, end, shape) in zip(self.weights, self.places, strict=True):
            one.assign(x[begin:end].reshape(shape).numpy())
        for one, value in zip(self.buffers.values(), buffers.values(), strict=True):
            one.assign(value.numpy())  # by order: Keras numbers the names of a second model of a process on


class TorchBackend(KerasFunctions):
    """Weights are views of the vector."""

    def _pieces(self, x: Vector) -> list[Tensor]:
        return [x.detach()[begin:end].view(shape) for begin, end, shape in self.places]

    def gradient(
        self, x: Vector, buffers: Mapping[str, Tensor], seed: int, parts: Sequence[Tensor], weight: float, out: Vector
    ) -> float:
        pieces = [one.requires_grad_() for one in self._pieces(x)]
        with torch.enable_grad(), seeded(seed):  # a Dropout without a seed draws from torch's own numbers
            seeds = torch.from_numpy(self.words(seed).astype(np.int64))
            found = self.loss(pieces, list(buffers.values()), seeds, parts, train=True)
            loss = found[0] * weight
            gradients = torch.autograd.grad(loss, pieces, allow_unused=True)
        for (begin, end, _), one in zip(self.places, gradients, strict=True):
            out[begin:end] = 0.0 if one is None else one.reshape(-1)
        for held, new in zip(buffers.values(), found[1], strict=True):
            held.copy_(new.detach())
        return float(loss.detach())

    def evaluated(self, x: Vector, buffers: Mapping[str, Tensor], parts: Sequence[Tensor]) -> tuple[float, Any]:
        with torch.no_grad():
            seeds = torch.from_numpy(self.words(0).astype(np.int64))
            state = list(buffers.values())
            loss, _, output = self.loss(self._pieces(x), state, seeds, parts, train=False)
        return float(loss), output


class JaxBackend(KerasFunctions):
    """Compiled by `jax.jit`."""

    def __init__(self, keras: Any, model: Any, answers: int) -> None:
        super().__init__(keras, model, answers)
        jax = needed("jax", "KerasTask", "keras")
        blocks = self.blocks

        def split(vector: Any) -> list[Any]:
            return blocks.weights(vector, jax.numpy.reshape)

        def gradient(vector: Any, buffers: Any, seeds: Any, parts: Any, weight: Any) -> Any:
            def weighted(weights: Any) -> Any:
                loss, new, _ = self.loss(weights, buffers, seeds, parts, train=True)
                return loss * weight, new

            (loss, new), found = jax.value_and_grad(weighted, has_aux=True)(split(vector))
            return loss, blocks.joined([one.reshape(-1) for one in found], jax.numpy.concatenate), new

        def evaluated(vector: Any, buffers: Any, seeds: Any, parts: Any) -> Any:
            loss, _, output = self.loss(split(vector), buffers, seeds, parts, train=False)
            return loss, output

        self._gradient, self._evaluated = jax.jit(gradient), jax.jit(evaluated)

    def gradient(
        self, x: Vector, buffers: Mapping[str, Tensor], seed: int, parts: Sequence[Tensor], weight: float, out: Vector
    ) -> float:
        vector, state = x.detach().numpy(), [one.numpy() for one in buffers.values()]
        arrays = as_numpy(tuple(parts))
        words, factor = self.words(seed), vector.dtype.type(weight)
        loss, found, new = self._gradient(self.blocks.cut(vector), state, words, arrays, factor)
        self.blocks.write(out, found, torch.utils.dlpack.from_dlpack)
        for held, one in zip(buffers.values(), new, strict=True):
            held.copy_(torch.utils.dlpack.from_dlpack(one))
        return float(loss)

    def evaluated(self, x: Vector, buffers: Mapping[str, Tensor], parts: Sequence[Tensor]) -> tuple[float, Any]:
        arrays = as_numpy(tuple(parts))
        state = [one.numpy() for one in buffers.values()]
        cut = self.blocks.cut(x.detach().numpy())
        loss, output = self._evaluated(cut, state, self.words(0), arrays)
        return float(loss), output


class TensorFlowBackend(KerasFunctions):
    """Compiled by `tf.function`."""

    def __init__(self, keras: Any, model: Any, answers: int) -> None:
        super().__init__(keras, model, answers)
        tf = self._tf = needed("tensorflow", "KerasTask", "tensorflow")
        blocks = self.blocks

        def split(vector: Any) -> list[Any]:
            return blocks.weights(vector, tf.reshape)

        def gradient(vector: Any, buffers: Any, seeds: Any, parts: Any, weight: Any) -> Any:
            weights = split(vector)
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch(weights)
                loss, new, _ = self.loss(weights, buffers, seeds, parts, train=True)
                loss = loss * tf.cast(weight, loss.dtype)
            found = tape.gradient(loss, weights, unconnected_gradients=tf.UnconnectedGradients.ZERO)
            flat = [tf.reshape(tf.convert_to_tensor(one), [-1]) for one in found]
            return loss, blocks.joined(flat, lambda several: tf.concat(several, 0)), new

        def evaluated(vector: Any, buffers: Any, seeds: Any, parts: Any) -> Any:
            loss, _, output = self.loss(split(vector), buffers, seeds, parts, train=False)
            return loss, output

        self._gradient = tf.function(gradient, reduce_retracing=True)
        self._evaluated = tf.function(evaluated, reduce_retracing=True)

    def gradient(
        self, x: Vector, buffers: Mapping[str, Tensor], seed: int, parts: Sequence[Tensor], weight: float, out: Vector
    ) -> float:
        tf = self._tf
        arrays = [tf.constant(one.numpy()) for one in parts]
        state = [tf.constant(one.numpy()) for one in buffers.values()]
        factor = tf.constant(weight, tf.float64)
        vector = [shared_tensor(tf, one) for one in self.blocks.cut(x)]
        loss, found, new = self._gradient(vector, state, self._words(seed), arrays, factor)
        self.blocks.write(out, found, lambda one: torch_tensor(tf, one))
        for held, one in zip(buffers.values(), new, strict=True):
            held.copy_(torch_tensor(tf, one))
        return float(loss)

    def evaluated(self, x: Vector, buffers: Mapping[str, Tensor], parts: Sequence[Tensor]) -> tuple[float, Any]:
        tf = self._tf
        arrays = [tf.constant(one.numpy()) for one in parts]
        state = [tf.constant(one.numpy()) for one in buffers.values()]
        vector = [shared_tensor(tf, one) for one in self.blocks.cut(x)]
        loss, output = self._evaluated(vector, state, self._words(0), arrays)
        return float(loss), output

    def _words(self, seed: int) -> Any:
        return self._tf.constant(self.words(seed).astype(np.int64).reshape(-1, 2))


BACKENDS: dict[str, type[KerasFunctions]] = {
    "tensorflow": TensorFlowBackend,
    "jax": JaxBackend,
    "torch": TorchBackend,
}

ALIGNED = 64  # bytes: TensorFlow computes only on memory that begins at a multiple


def shared_tensor(tf: Any, x: Tensor) -> Any:
    """A tensor of TensorFlow on the memory of one of torch, where it can be; otherwise a copy."""
    plain = x.detach()
    if plain.data_ptr() % ALIGNED or not plain.is_contiguous():
        return tf.constant(plain.numpy())
    capsule = torch.utils.dlpack.to_dlpack(plain)  # type: ignore[attr-defined]
    return tf.experimental.dlpack.from_dlpack(capsule)


def torch_tensor(tf: Any, one: Any) -> Tensor:
    """A tensor of torch on the memory of one of TensorFlow."""
    found: Tensor = torch.utils.dlpack.from_dlpack(tf.experimental.dlpack.to_dlpack(one))
    return found


def _by_path(variables: Sequence[Any]) -> dict[str, Any]:
    """Variables by their paths. Keras numbers the layers of a process one after another (dense_7): the numbers are left
    out, and counted again within the model, so that the names are the same in every process."""
    found: dict[str, Any] = {}
    for one in variables:
        plain = COUNTED.sub("", one.path)
        path, number = plain, 1
        while path in found:
            number += 1
            path = f"{plain}_{number}"
        found[path] = one
    return found
