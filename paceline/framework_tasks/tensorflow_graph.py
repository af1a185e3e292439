"""A graph of TensorFlow 1 that processes hand to each other as bytes; each opens a session of its own on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from paceline.errors import UsageError
from paceline.state import Vector

# operations that draw from a state of their own: no batch can give them its seed
DRAWING = {
    "Multinomial",
    "ParameterizedTruncatedNormal",
    "RandomGamma",
    "RandomPoissonV2",
    "RandomShuffle",
    "RandomStandardNormal",
    "RandomUniform",
    "RandomUniformInt",
    "TruncatedNormal",
}


def drawing_ops(definition: Any) -> list[str]:
    """The kinds of operations of a graph, its functions included, that draw from a state of their own."""
    nodes = [*definition.node, *(node for one in definition.library.function for node in one.node_def)]
    return sorted({node.op for node in nodes} & DRAWING)


@dataclass(frozen=True)
class SavedGraph:
    """The graph, and the names of what a task needs of it."""

    meta: bytes
    loss: str
    inputs: list[str]
    variables: list[str]
    output: str | None
    seed: str | None  # the placeholder of the batch's seed
    fed: dict[str, tuple[Any, Any]]  # by placeholder: its value in a gradient, and in an evaluation

    @classmethod
    def of(
        cls,
        tf: Any,
        loss: Any,
        inputs: Sequence[Any],
        variables: Sequence[Any] | None,
        output: Any,
        seed: Any,
        fed: Mapping[Any, tuple[Any, Any]],
    ) -> SavedGraph:
        v1, graph = tf.compat.v1, loss.graph
        with graph.as_default():
            chosen = list(v1.trainable_variables() if variables is None else variables)
            if not chosen:
                raise UsageError("TensorFlowTask: the graph has no trainable variables; give variables=")
            if found := sorted(_kinds_before(loss.op) & DRAWING):
                raise UsageError(
                    f"the loss of the graph draws random numbers ({', '.join(found)}) from a state that no batch can "
                    "set: draw with tf.random.stateless_* (dropout: tf.nn.experimental.stateless_dropout) and a "
                    "placeholder of two int32 numbers, which from_graph takes as seed="
                )
            meta = v1.train.export_meta_graph(graph=graph, clear_devices=True).SerializeToString()
        return cls(
            meta,
            loss.name,
            [one.name for one in inputs],
            [one.name for one in chosen],
            None if output is None else output.name,
            None if seed is None else seed.name,
            {one.name: pair for one, pair in fed.items()},
        )

    def opened(self, tf: Any, seed: int) -> GraphSession:
        """A session of this process on the graph. Initial values without a seed of their own are drawn from `seed`."""
        v1 = tf.compat.v1
        meta = v1.MetaGraphDef.FromString(self.meta)
        for number, node in enumerate(meta.graph_def.node):
            if node.op in DRAWING and not node.attr["seed"].i and not node.attr["seed2"].i:
                node.attr["seed"].i, node.attr["seed2"].i = seed % 2**31 + 1, number + 1
        graph = tf.Graph()
        with graph.as_default():
            v1.train.import_meta_graph(meta)
        return GraphSession(tf, graph, self)


class GraphSession:
    """A session, the operations that write a flat vector into the variables, and those that compute the gradient."""

    def __init__(self, tf: Any, graph: Any, saved: SavedGraph) -> None:
        v1 = tf.compat.v1
        threads = torch.get_num_threads()
        config = v1.ConfigProto(
            intra_op_parallelism_threads=threads, inter_op_parallelism_threads=threads, device_count={"GPU": 0}
        )
        self._saved = saved
        with graph.as_default():
            known = {one.name: one for one in v1.global_variables()}
            self._variables = [known[name] for name in saved.variables]
            self._loss = graph.get_tensor_by_name(saved.loss)
            self._inputs = [graph.get_tensor_by_name(name) for name in saved.inputs]
            self._seed = None if saved.seed is None else graph.get_tensor_by_name(saved.seed)
            self._others = [(graph.get_tensor_by_name(name), pair) for name, pair in saved.fed.items()]
            self._output = None if saved.output is None else graph.get_tensor_by_name(saved.output)
            shapes = [one.shape.as_list() for one in self._variables]
            sizes = [int(np.prod(shape, dtype=np.int64)) for shape in shapes]
            self._vector = v1.placeholder(self._variables[0].dtype.base_dtype, [sum(sizes)])
            pieces = tf.split(self._vector, sizes)
            assigned = [
                v1.assign(one, tf.reshape(piece, shape))
                for one, piece, shape in zip(self._variables, pieces, shapes, strict=True)
            ]
            self._assign = tf.group(*assigned)
            found = v1.gradients(self._loss, self._variables, unconnected_gradients="zero")
            self._gradient = tf.concat([tf.reshape(tf.convert_to_tensor(one), [-1]) for one in found], 0)
            initialise = v1.global_variables_initializer()
        self._session = v1.Session(graph=graph, config=config)
        self._session.run(initialise)

    def first(self) -> list[tuple[str, np.ndarray]]:
        """The names and present values of the variables."""
        return list(zip(self._saved.variables, self._session.run(self._variables), strict=True))

    def gradient(self, x: Vector, parts: Any, words: tuple[int, int], weight: float, out: Vector) -> float:
        self._write(x)
        loss, found = self._session.run([self._loss, self._gradient], self._fed(parts) | self._told(words, 0))
        out.copy_(torch.from_numpy(found))
        if weight != 1.0:
            out *= weight
        return float(loss) * weight

    def evaluated(self, x: Vector, parts: Any, *, wants_output: bool) -> tuple[float, Any]:
        self._write(x)
        asked = [self._loss, self._output] if wants_output else [self._loss]
        found = self._session.run(asked, self._fed(parts) | self._told((0, 0), 1))
        return float(found[0]), found[1] if wants_output else None

    def output(self, x: Vector, inputs: Any) -> Any:
        if self._output is None:
            raise UsageError("the task has no tensor of the output: give TensorFlowTask.from_graph output=")
        self._write(x)
        fed = dict(zip(self._inputs[:-1], inputs, strict=True))
        return self._session.run(self._output, fed | self._told((0, 0), 1))

    def _write(self, x: Vector) -> None:
        self._session.run(self._assign, {self._vector: x.detach().numpy()})

    def _told(self, words: tuple[int, int], which: int) -> dict[Any, Any]:
        """What is fed beside the batch: the seed, and others in a gradient (0) or an evaluation (1)."""
        seed = {} if self._seed is None else {self._seed: words}
        return seed | {one: pair[which] for one, pair in self._others}

    def _fed(self, parts: Any) -> dict[Any, Any]:
        if len(parts) != len(self._inputs):
            raise UsageError(f"the graph has {len(self._inputs)} inputs, and a batch {len(parts)} parts")
        return dict(zip(self._inputs, parts, strict=True))


def _kinds_before(last: Any) -> set[str]:
    """The kinds of all operations that one is computed from. Those of a variable's first value are not among them."""
    seen, left = set(), [last]
    while left:
        one = left.pop()
        if one not in seen:
            seen.add(one)
            left += [*(given.op for given in one.inputs), *one.control_inputs]
    return {one.type for one in seen}
