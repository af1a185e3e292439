"""A task of JAX: a function that makes a pytree of weights, a loss, and data."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.errors import UsageError
from paceline.fields import Feed
from paceline.framework_tasks.beginning import Beginning, flat, places
from paceline.framework_tasks.flat_blocks import FlatBlocks
from paceline.framework_tasks.framework_data import taken
from paceline.framework_tasks.framework_start import needed, start_jax
from paceline.framework_tasks.framework_task import FrameworkTask, as_numpy, two_words
from paceline.state import Vector
from paceline.task import Batch
from paceline.torch_task.batch_parts import Parts, named
from paceline.torch_task.samples import Collate


class JaxTask(FrameworkTask):
    """A pytree of weights, a loss and data.

    init:    a function of a PRNG key that gives the weights, a pytree such as Flax's parameters or an Equinox module
             (start(seed): of that seed's key); or the pytree itself. Its floating-point arrays are trained; other
             leaves stay as they are;
    loss:    of (weights, *batch), a mean over the samples. If it has a parameter `key`, that is a key of the batch's
             own, for dropout, and None in an evaluation. A batch that is a dictionary is one argument;
    train, test: as TorchTask has them; `prepare`, `collate`, `batch`, `feed` and `shuffle` too;
    predict: of (weights, *inputs), the output: for `metrics`, and for paceline.predict;
    metrics: by name, functions of (output, target): means over the samples;
    dtype:   "float64" casts weights and floating-point inputs, and computes in 64 bits here alone.

    The gradient is compiled once in each process.
    """

    def __init__(
        self,
        init: Any,
        loss: Callable[..., Any],
        train: Any,
        test: Any = None,
        *,
        predict: Callable[..., Any] | None = None,
        metrics: Mapping[str, Callable[[Any, Any], Any]] | None = None,
        batch: int | None = None,
        feed: Feed | None = None,
        shuffle: bool | None = None,
        collate: Collate | None = None,
        name: str = "task",
        prepare: Callable[..., Any] | None = None,
        dtype: torch.dtype | str | None = None,
        notice: str | None = None,
    ) -> None:
        jax = needed("jax", "JaxTask", "jax")
        if metrics and predict is None:
            raise UsageError("JaxTask: metrics are functions of the output: give predict=, which computes it")
        super().__init__(
            taken(train),
            taken(test),
            batch=batch,
            feed=feed,
            shuffle=shuffle,
            collate=collate,
            name=name,
            prepare=prepare,
            buffer_policy="average",
            dtype=dtype,
            notice=notice,
        )
        self.loss, self.predict, self.metrics = loss, predict, dict(metrics or {})
        self._takes_key = "key" in inspect.signature(loss).parameters
        self._x64 = self.dtype is torch.float64 or bool(jax.config.jax_enable_x64)
        holds = any(_is_array(leaf) for leaf in jax.tree.leaves(init))
        if not holds and not callable(init):
            raise UsageError("JaxTask: init must be a function of a PRNG key that gives the weights, or their pytree")
        # arrays of numpy: those of JAX would start it in every process that reads them
        self._init = jax.tree.map(lambda leaf: np.array(leaf) if _is_array(leaf) else leaf, init) if holds else init
        self._given = holds

    def _start_framework(self) -> None:
        start_jax(needed("jax", "JaxTask", "jax"))

    def _wide(self) -> Any:
        """64 bits where the task asks for them."""
        jax = needed("jax", "JaxTask", "jax")
        if bool(jax.config.jax_enable_x64) == self._x64:
            return nullcontext()
        home = jax if hasattr(jax, "enable_x64") else needed("jax.experimental", "JaxTask", "jax")
        return home.enable_x64(self._x64)

    def _tree(self, seed: int) -> Any:
        """The pytree of a seed, with arrays of numpy."""
        jax = needed("jax", "JaxTask", "jax")
        tree = self._init if self._given else self._init(jax.random.key(seed))
        kind = None if self.dtype is None else str(self.dtype).removeprefix("torch.")

        def leaf_of(leaf: Any) -> Any:
            if not _trains(leaf):
                return leaf
            return np.asarray(leaf, kind)

        return jax.tree.map(leaf_of, tree)

    def _begun(self, seed: int) -> Beginning:
        jax = needed("jax", "JaxTask", "jax")
        with self._wide():
            found = jax.tree_util.tree_flatten_with_path(self._tree(seed))[0]
            weights = [(jax.tree_util.keystr(path), leaf) for path, leaf in found if _trains(leaf)]
            return Beginning(*flat(weights, f"task {self.name!r}"))

    def _compiled(self) -> _JaxFunctions:
        if not self._computation:
            self._computation["jax"] = _functions(self)
        computation: _JaxFunctions = self._computation["jax"]
        return computation

    def _gradient(self, x: Vector, batch: Batch, out: Vector, buffers: Mapping[str, Tensor]) -> float:
        high, low = (np.uint32(word) for word in two_words(batch.seed))
        with self._wide():
            compiled = self._compiled()
            weight = x.numpy().dtype.type(batch.weight)
            cut = compiled.blocks.cut(x.detach().numpy())
            loss, gradient = compiled.gradient(cut, _arguments(batch.data), weight, high, low)
            compiled.blocks.write(out, gradient, torch.utils.dlpack.from_dlpack)
            return float(loss)

    def _measured(self, x: Vector, parts: Parts, buffers: Mapping[str, Tensor]) -> dict[str, float]:
        arguments = _arguments(parts)
        with self._wide():
            compiled = self._compiled()
            vector = compiled.blocks.cut(x.detach().numpy())
            values = {"loss": float(compiled.loss(vector, arguments))}
            if self.metrics:
                inputs, target = (arguments, arguments[0]) if named(parts) else (arguments[:-1], arguments[-1])
                output = compiled.predict(vector, inputs)
                values |= {name: float(metric(output, target)) for name, metric in self.metrics.items()}
            return values

    def trained_model(self, x: Vector, buffers: Mapping[str, Tensor] | None = None) -> Any:
        """The pytree with the weights x."""
        jax = needed("jax", "JaxTask", "jax")
        with self._working(), self._wide():
            compiled = self._compiled()
            return compiled.tree_of(compiled.blocks.cut(jax.numpy.array(x.numpy())))

    def outputs(self, model: Any, inputs: Parts) -> Tensor:
        if self.predict is None:
            raise UsageError(f"task {self.name!r} has no function for the output: give JaxTask predict=")
        with self._working(), self._wide():
            return torch.from_numpy(np.array(self.predict(model, *_arguments(inputs))))


@dataclass(frozen=True)
class _JaxFunctions:
    """What a process computes with. Its functions take a vector as its blocks."""

    blocks: FlatBlocks
    tree_of: Callable[[Any], Any]
    gradient: Callable[..., Any]
    loss: Callable[..., Any]
    predict: Callable[..., Any]


def _functions(task: JaxTask) -> _JaxFunctions:
    jax = needed("jax", "JaxTask", "jax")
    numpy = jax.numpy
    leaves, structure = jax.tree.flatten(task._tree(0))
    trained = [index for index, leaf in enumerate(leaves) if _trains(leaf)]
    blocks = FlatBlocks(places(task.parameters()))

    def tree_with(weights: list[Any]) -> Any:
        filled = list(leaves)
        for index, weight in zip(trained, weights, strict=True):
            filled[index] = weight
        return structure.unflatten(filled)

    def split(vector: Any) -> list[Any]:
        return blocks.weights(vector, numpy.reshape)

    def loss_of(weights: list[Any], parts: Any, key: Any) -> Any:
        keys = {"key": key} if task._takes_key else {}
        found = task.loss(tree_with(weights), *parts, **keys)
        if getattr(found, "shape", None) != ():
            shape = getattr(found, "shape", None)
            what = type(found).__name__ if shape is None else f"array of shape {shape}"
            raise UsageError(f"the loss must be one number, the mean over the samples, not a {what}")
        return found

    def gradient(vector: Any, parts: Any, weight: Any, high: Any, low: Any) -> Any:
        key = jax.random.fold_in(jax.random.key(high), low) if task._takes_key else None
        value, found = jax.value_and_grad(lambda weights: loss_of(weights, parts, key) * weight)(split(vector))
        return value, blocks.joined([one.reshape(-1) for one in found], numpy.concatenate)

    def predict(vector: Any, inputs: Any) -> Any:
        assert task.predict is not None
        return task.predict(tree_with(split(vector)), *inputs)

    return _JaxFunctions(
        blocks,
        tree_of=lambda vector: tree_with(split(vector)),
        gradient=jax.jit(gradient),
        loss=jax.jit(lambda vector, parts: loss_of(split(vector), parts, None)),
        predict=jax.jit(predict),
    )


def _arguments(parts: Parts) -> tuple[Any, ...]:
    arguments: tuple[Any, ...] = as_numpy(parts)
    return arguments


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and hasattr(leaf, "shape")


def _trains(leaf: Any) -> bool:
    return _is_array(leaf) and any(kind in str(leaf.dtype) for kind in ("float", "complex"))
