"""A task of a Keras model, on the TensorFlow, JAX or torch backend."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.errors import UsageError
from paceline.fields import Feed
from paceline.framework_tasks.beginning import Beginning, flat
from paceline.framework_tasks.framework_data import taken
from paceline.framework_tasks.framework_start import needed, start_jax, start_tensorflow
from paceline.framework_tasks.framework_task import FrameworkTask, as_numpy
from paceline.framework_tasks.keras_functions import BACKENDS, KerasFunctions
from paceline.framework_tasks.keras_model import KerasModel
from paceline.state import Vector
from paceline.task import Batch, BufferPolicy
from paceline.torch_task.batch_parts import Parts, named
from paceline.torch_task.samples import Collate


class KerasTask(FrameworkTask):
    """A Keras 3 model, a loss and data, on the backend that Keras has (KERAS_BACKEND).

    model:   a function that builds the model (start(seed): built under that seed), or a model (start: its present
             weights; it is copied, yours stays as it is). With a function the processes of a run start at once;
    loss, metrics: what `compile` takes; if omitted, those with which the model was compiled. The optimizer of `compile`
             is not used: the scheme's rule updates the weights;
    train, test: arrays in a tuple, a map-style data set, a `keras.utils.PyDataset`, a `tf.data.Dataset`, or a function
             that returns batches; the last part of a batch is the target, the others are the model's inputs;
    batch, shuffle, feed, collate, prepare: as TorchTask has them;
    buffer_policy: what is evaluated of non-trainable state (BatchNorm's): the `average` over workers, or the `chief`'s;
    sample_weights: True: the last part of a batch is the weight of each sample, as `fit` takes it, and the target the
             one before. The loss counts them; metrics do not.

    Dropout draws from the batch's seed. The gradient is compiled once in each process (`tf.function`, `jax.jit`).
    """

    def __init__(
        self,
        model: Any,
        loss: Any = None,
        train: Any = None,
        test: Any = None,
        *,
        metrics: Any = None,
        batch: int | None = None,
        feed: Feed | None = None,
        shuffle: bool | None = None,
        collate: Collate | None = None,
        name: str = "task",
        prepare: Callable[..., Any] | None = None,
        buffer_policy: BufferPolicy = "average",
        sample_weights: bool = False,
        notice: str | None = None,
    ) -> None:
        keras = needed("keras", "KerasTask", "keras")
        self.backend: str = keras.backend.backend()
        if self.backend not in BACKENDS:
            raise UsageError(f"KerasTask takes the backends {', '.join(BACKENDS)}, not {self.backend}")
        if train is None:
            raise UsageError("KerasTask: give train=, the data to train on")
        super().__init__(
            taken(train),
            taken(test),
            batch=batch,
            feed=feed,
            shuffle=shuffle,
            collate=collate,
            name=name,
            prepare=prepare,
            buffer_policy=buffer_policy,
            dtype=None,
            notice=notice,
        )
        self.answers = 2 if sample_weights else 1
        self._keras_model = KerasModel(keras, model, loss, metrics)
        self._settings = (keras.config.floatx(), keras.config.image_data_format())
        self._x64 = self.backend == "jax" and bool(sys.modules["jax"].config.jax_enable_x64)

    @property
    def bears_fork(self) -> bool:  # type: ignore[override]
        return self.backend == "torch"

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if "keras" not in sys.modules:
            os.environ["KERAS_BACKEND"] = self.backend
        keras = needed("keras", "KerasTask", "keras")
        found = keras.backend.backend()
        keras.config.set_floatx(self._settings[0])
        keras.config.set_image_data_format(self._settings[1])
        if found != self.backend:
            raise UsageError(f"the task was made with Keras on {self.backend}; here KERAS_BACKEND is {found}")

    def _start_framework(self) -> None:
        if self.backend == "jax":
            start_jax(needed("jax", "KerasTask", "keras"))
        elif self.backend == "tensorflow":
            start_tensorflow(needed("tensorflow", "KerasTask", "tensorflow"))

    def _wide(self) -> AbstractContextManager[Any]:
        """64 bits: of JAX where the caller had switched them on, and of Keras where its numbers have them."""
        double = self._settings[0] == "float64" and self.backend != "tensorflow"
        if not (self._x64 or double):
            return nullcontext()
        contexts = ExitStack()
        if self._x64:
            jax = needed("jax", "KerasTask", "keras")
            home = jax if hasattr(jax, "enable_x64") else needed("jax.experimental", "KerasTask", "keras")
            contexts.enter_context(home.enable_x64(True))
        if double:
            contexts.enter_context(_doubles_kept())
        return contexts

    def _made(self, seed: int) -> KerasFunctions:
        keras = needed("keras", "KerasTask", "keras")
        return BACKENDS[self.backend](keras, self._keras_model.made(keras, seed), self.answers)

    def _functions(self) -> KerasFunctions:
        if not self._computation:
            self._computation["keras"] = self._made(0)
        functions: KerasFunctions = self._computation["keras"]
        return functions

    def _begun(self, seed: int) -> Beginning:
        numpy = needed("keras", "KerasTask", "keras").ops.convert_to_numpy
        with self._wide():
            found = self._functions() if seed == 0 or self._keras_model.build is None else self._made(seed)
            names = [name for name, _ in found.parameters]
            weights = [(name, np.array(numpy(one.value))) for name, one in zip(names, found.weights, strict=True)]
            buffers = {name: torch.from_numpy(np.array(numpy(one.value))) for name, one in found.buffers.items()}
            return Beginning(*flat(weights, f"task {self.name!r}"), buffers)

    def _gradient(self, x: Vector, batch: Batch, out: Vector, buffers: Mapping[str, Tensor]) -> float:
        with self._wide():
            functions = self._functions()
            held = {name: buffers[name] for name in functions.buffers}
            return functions.gradient(x, held, batch.seed, self._checked(batch.data), batch.weight, out)

    def evaluate(self, x: Vector, buffers: Mapping[str, Tensor] | None = None) -> dict[str, float]:
        with self._working(), self._wide():
            self._functions().model.reset_metrics()
        return super().evaluate(x, buffers)

    def _measured(self, x: Vector, parts: Parts, buffers: Mapping[str, Tensor]) -> dict[str, float]:
        keras = needed("keras", "KerasTask", "keras")
        with self._wide():
            functions = self._functions()
            held = {name: buffers[name] for name in functions.buffers}
            loss, output = functions.evaluated(x, held, self._checked(parts))
            given, target, *_ = functions.told_apart([keras.ops.convert_to_tensor(one) for one in as_numpy(parts)])
            functions.model.compute_metrics(given, target, output, None)
        return {"loss": loss}

    def _measured_together(self) -> dict[str, float]:
        with self._wide():
            found = self._functions().model.get_metrics_result()
        return {name: float(value) for name, value in found.items() if name != "loss"}

    def trained_model(self, x: Vector, buffers: Mapping[str, Tensor] | None = None) -> Any:
        """A new Keras model with the weights x, compiled with the task's loss and metrics."""
        with self._working(), self._wide():
            made = self._made(0)
            made.assign(x, self._held(buffers))
            return made.model

    def outputs(self, model: Any, inputs: Parts) -> Tensor:
        arrays = as_numpy(tuple(inputs))
        with self._working(), self._wide(), torch.no_grad():
            keras = needed("keras", "KerasTask", "keras")
            output = model(arrays[0] if len(arrays) == 1 else list(arrays), training=False)
            return torch.from_numpy(np.array(keras.ops.convert_to_numpy(output)))

    def _checked(self, parts: Parts) -> Parts:
        if named(parts) is not None or len(parts) <= self.answers:
            weights = ", then the samples' weights" if self.answers > 1 else ""
            raise UsageError(f"task {self.name!r}: a batch must be a tuple of inputs and a target{weights}")
        return parts


@contextmanager
def _doubles_kept() -> Iterator[None]:
    """On JAX and torch Keras has some operations on numbers of 64 bits give 32 (products of matrices on torch, tanh on
    JAX), by a table of its own. Here they give 64; without that table they are as Keras has them."""
    table = getattr(sys.modules.get("keras.src.backend.common.dtypes"), "BIT64_TO_BIT32_DTYPE", {})
    before = table.get("float64")
    table["float64"] = "float64"
    try:
        yield
    finally:
        if before is not None:
            table["float64"] = before
