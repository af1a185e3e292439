"""A task of TensorFlow without Keras: a function that gives the loss and its variables, or a graph of TensorFlow 1."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from paceline.errors import UsageError
from paceline.fields import Feed
from paceline.framework_tasks.beginning import Beginning, flat, places
from paceline.framework_tasks.flat_blocks import FlatBlocks
from paceline.framework_tasks.framework_data import taken
from paceline.framework_tasks.framework_start import needed, start_tensorflow
from paceline.framework_tasks.framework_task import FrameworkTask, as_numpy, two_words
from paceline.framework_tasks.keras_functions import shared_tensor, torch_tensor
from paceline.framework_tasks.tensorflow_graph import SavedGraph, drawing_ops
from paceline.state import Vector
from paceline.task import Batch
from paceline.torch_task.batch_parts import Parts
from paceline.torch_task.random_numbers import all_seeded
from paceline.torch_task.samples import Collate


class TensorFlowTask(FrameworkTask):
    """A loss of TensorFlow, the variables that it is differentiated by, and data.

    step:    a function of a batch's parts that gives the loss, a mean over the samples. If it has a parameter `seed`,
             that is two numbers for tf.random.stateless_*, the batch's own. It is traced once by `tf.function`;
    variables: a function that makes the tf.Variables (start(seed): under that seed; `step` then gets their list first),
             or a list of the variables that `step` uses (start: their present values). With a function the processes of
             a run start at once;
    train, test: as KerasTask has them; `prepare`, `collate`, `batch`, `feed` and `shuffle` too;
    predict: of the inputs (after the variables, where a function makes them), the output: for `metrics`, and for
             paceline.predict;
    metrics: by name, functions of (output, target): means over the samples.
    """

    def __init__(
        self,
        step: Callable[..., Any] | None,
        variables: Callable[[], Sequence[Any]] | Sequence[Any] | None,
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
        notice: str | None = None,
    ) -> None:
        needed("tensorflow", "TensorFlowTask", "tensorflow")
        if metrics and predict is None and step is not None:
            raise UsageError("TensorFlowTask: metrics are functions of the output: give predict=, which computes it")
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
            dtype=None,
            notice=notice,
        )
        self.step, self.variables, self.predict, self.metrics = step, variables, predict, dict(metrics or {})
        self._takes_seed = step is not None and "seed" in inspect.signature(step).parameters
        self._graph: SavedGraph | None = None

    @classmethod
    def from_graph(
        cls,
        loss: Any,
        inputs: Sequence[Any],
        train: Any,
        test: Any = None,
        *,
        variables: Sequence[Any] | None = None,
        output: Any = None,
        metrics: Mapping[str, Callable[[Any, Any], Any]] | None = None,
        seed: Any = None,
        fed: Mapping[Any, tuple[Any, Any]] | None = None,
        **settings: Any,
    ) -> Self:
        """A graph of TensorFlow 1 (tf.compat.v1): the tensor of its loss, and the placeholders that are fed with the
        parts of a batch, in their order.

        variables: those to train (default: the trainable ones of the graph). Each process has a session of its own.
        output:    the tensor of the output, for `metrics` and paceline.predict; it is computed from all inputs but the
                   last, the target.
        seed:      a placeholder of two int32 numbers: the batch's seed, for tf.random.stateless_*.
        fed:       other placeholders, each with its values in a gradient and in an evaluation:
                   {keep_prob: (0.5, 1.0)}.
        """
        if metrics and output is None:
            raise UsageError("TensorFlowTask: metrics are functions of the output: give output=, its tensor")
        task = cls(None, None, train, test, metrics=metrics, **settings)
        tf = needed("tensorflow", "TensorFlowTask", "tensorflow")
        task._graph = SavedGraph.of(tf, loss, inputs, variables, output, seed, fed or {})
        return task

    def _start_framework(self) -> None:
        start_tensorflow(needed("tensorflow", "TensorFlowTask", "tensorflow"))

    def _functions(self) -> Any:
        if not self._computation:
            tf = needed("tensorflow", "TensorFlowTask", "tensorflow")
            made = _EagerFunctions(tf, self) if self._graph is None else self._graph.opened(tf, 0)
            self._computation["tensorflow"] = made
        return self._computation["tensorflow"]

    def _made(self, tf: Any, seed: int) -> list[Any]:
        """The variables of a seed."""
        if not callable(self.variables):
            return list(self.variables or ())
        with all_seeded(seed):
            tf.random.set_seed(seed % 2**31)
            return list(self.variables())

    def _begun(self, seed: int) -> Beginning:
        tf = needed("tensorflow", "TensorFlowTask", "tensorflow")
        if self._graph is not None:
            opened = self._functions() if seed == 0 else self._graph.opened(tf, seed)
            weights = opened.first()
        elif seed == 0:
            weights = [(one.name, one.numpy()) for one in self._functions().variables]
        else:
            weights = [(one.name, one.numpy()) for one in self._made(tf, seed)]
        names = [name for name, _ in weights]
        unique = [  # plain variables are all named "Variable:0"
            (name if names.count(name) == 1 else f"{name}#{number}", np.array(value))
            for number, (name, value) in enumerate(weights)
        ]
        return Beginning(*flat(unique, f"task {self.name!r}"))

    def _gradient(self, x: Vector, batch: Batch, out: Vector, buffers: Mapping[str, Tensor]) -> float:
        loss: float = self._functions().gradient(x, as_numpy(batch.data), two_words(batch.seed), batch.weight, out)
        return loss

    def _measured(self, x: Vector, parts: Parts, buffers: Mapping[str, Tensor]) -> dict[str, float]:
        arrays = as_numpy(parts)
        functions = self._functions()
        loss, output = functions.evaluated(x, arrays, wants_output=bool(self.metrics))
        values = {"loss": float(loss)}
        return values | {name: float(metric(output, arrays[-1])) for name, metric in self.metrics.items()}

    def trained_model(self, x: Vector, buffers: Mapping[str, Tensor] | None = None) -> dict[str, np.ndarray]:
        """The trained values of the variables, by name."""
        parameters = self.parameters()
        return {
            name: x[begin:end].reshape(shape).numpy().copy()
            for (name, _), (begin, end, shape) in zip(parameters, places(parameters), strict=True)
        }

    def outputs(self, model: Mapping[str, np.ndarray], inputs: Parts) -> Tensor:
        vector = torch.from_numpy(np.concatenate([model[name].reshape(-1) for name, _ in self.parameters()]))
        with self._working():
            return torch.from_numpy(np.array(self._functions().output(vector, as_numpy(tuple(inputs)))))


class _EagerFunctions:
    """Variables of this process, and what `tf.function` has traced of the task."""

    def __init__(self, tf: Any, task: TensorFlowTask) -> None:
        self._tf, self._task = tf, task
        self.variables = task._made(tf, 0)
        self._leading = [self.variables] if callable(task.variables) else []
        self._blocks = blocks = FlatBlocks(places([("", list(one.shape)) for one in self.variables]))
        self._checked = False

        def assign(vector: Any) -> None:
            for one, value in zip(self.variables, blocks.weights(vector, tf.reshape), strict=True):
                one.assign(value)

        def loss_of(parts: Any, seed: Any) -> Any:
            assert task.step is not None
            loss = task.step(*self._leading, *parts, **({"seed": seed} if task._takes_seed else {}))
            if loss.shape.rank not in (0, None):
                raise UsageError(f"the loss must be one number, the mean over the samples, not of shape {loss.shape}")
            return loss

        def gradient(vector: Any, parts: Any, seed: Any, weight: Any) -> Any:
            assign(vector)
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch(self.variables)
                loss = loss_of(parts, seed)
                loss = loss * tf.cast(weight, loss.dtype)
            found = tape.gradient(loss, self.variables, unconnected_gradients=tf.UnconnectedGradients.ZERO)
            flat = [tf.reshape(tf.convert_to_tensor(one), [-1]) for one in found]
            return loss, blocks.joined(flat, lambda several: tf.concat(several, 0))

        def evaluated(vector: Any, parts: Any, seed: Any) -> Any:
            assign(vector)
            return loss_of(parts, seed)

        def output(vector: Any, inputs: Any) -> Any:
            if task.predict is None:
                raise UsageError(f"task {task.name!r} has no function for the output: give TensorFlowTask predict=")
            assign(vector)
            return task.predict(*self._leading, *inputs)

        self._gradient = tf.function(gradient, reduce_retracing=True)
        self._evaluated = tf.function(evaluated, reduce_retracing=True)
        self._output = tf.function(output, reduce_retracing=True)

    def gradient(self, x: Vector, parts: Any, words: tuple[int, int], weight: float, out: Vector) -> float:
        tf = self._tf
        vector, arrays = self._cut(x), [tf.constant(one) for one in parts]
        given = (vector, arrays, tf.constant(words, tf.int32), tf.constant(weight, tf.float64))
        if not self._checked:
            found = drawing_ops(self._gradient.get_concrete_function(*given).graph.as_graph_def())
            if found:
                raise UsageError(
                    f"`step` draws random numbers that are not the batch's own ({', '.join(found)}): give it "
                    "a parameter `seed`, and draw with tf.random.stateless_*"
                )
            self._checked = True
        loss, gradient = self._gradient(*given)
        self._blocks.write(out, gradient, lambda one: torch_tensor(tf, one))
        return float(loss)

    def _cut(self, x: Vector) -> list[Any]:
        return [shared_tensor(self._tf, one) for one in self._blocks.cut(x)]

    def evaluated(self, x: Vector, parts: Any, *, wants_output: bool) -> tuple[float, Any]:
        tf = self._tf
        arrays = [tf.constant(one) for one in parts]
        loss = self._evaluated(self._cut(x), arrays, tf.constant((0, 0), tf.int32))
        return float(loss), self.output(x, parts[:-1]) if wants_output else None

    def output(self, x: Vector, inputs: Any) -> Any:
        tf = self._tf
        return self._output(self._cut(x), [tf.constant(one) for one in inputs]).numpy()
