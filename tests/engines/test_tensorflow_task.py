"""TensorFlow's own functions, and graphs of TensorFlow 1, as tasks."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from digits_networks import data, torch_task, weights
from framework_runs import UPDATES, holds_in_processes, trained

if importlib.util.find_spec("tensorflow") is None:
    pytest.skip("tensorflow is not installed", allow_module_level=True)

import tensorflow as tf

import paceline
from paceline import TensorFlowTask, UsageError

# TensorFlow's own, with numpy 2
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

FILE = """
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import paceline


def variables():
    normal = tf.random.normal
    return [tf.Variable(normal((64, 32)) / 8, name="in"), tf.Variable(normal((32, 10)) / 6, name="out")]


def output(held, x):
    return tf.nn.relu(x @ held[0]) @ held[1]


def step(held, x, y, seed=None):
    kept = tf.cast(tf.random.stateless_uniform(tf.shape(x), seed) < 0.9, x.dtype)
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, output(held, x * kept)))


def make():
    found = load_digits()
    samples = (found.data / 16).astype(np.float32), found.target.astype(np.int64)
    right = lambda scores, y: (scores.argmax(-1) == y).mean()
    return paceline.TensorFlowTask(step, variables, samples, predict=output, metrics={"accuracy": right}, name="digits")
"""


def network(held: list[tf.Variable], x: tf.Tensor) -> tf.Tensor:
    return tf.nn.relu(x @ held[0] + held[1]) @ held[2] + held[3]


def step(held: list[tf.Variable], x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, network(held, x)))


def variables() -> list[tf.Variable]:
    return [tf.Variable(one, name=f"w{number}") for number, one in enumerate(weights())]


def right(scores: np.ndarray, y: np.ndarray) -> float:
    return float((scores.argmax(-1) == y).mean())


def from_function() -> TensorFlowTask:
    return TensorFlowTask(step, variables, data(), predict=network, metrics={"accuracy": right})


def from_variables() -> TensorFlowTask:
    held = variables()
    return TensorFlowTask(lambda x, y: step(held, x, y), held, data())


def from_graph(noise: bool = False) -> TensorFlowTask:
    v1 = tf.compat.v1
    with tf.Graph().as_default():
        x, y = v1.placeholder(tf.float64, [None, 64]), v1.placeholder(tf.int64, [None])
        held = [v1.get_variable(f"w{number}", initializer=one) for number, one in enumerate(weights())]
        scores = network(held, tf.nn.dropout(x, 0.5) if noise else x)
        loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=scores))
    return TensorFlowTask.from_graph(loss, [x, y], data(), output=scores, metrics={"accuracy": right})


@pytest.mark.parametrize("make", [from_function, from_variables, from_graph])
@pytest.mark.parametrize("scheme", ["sgd", "sync", "async", "aeasgd"])
def test_the_vectors_of_torch(make: object, scheme: str) -> None:
    settings = {"workers": 1 if scheme == "sgd" else 3, "steps": 50, "lr": 0.1}
    theirs = paceline.simulate(torch_task(), scheme, **settings)
    ours = paceline.simulate(make(), scheme, **settings)
    torch.testing.assert_close(ours.vector, theirs.vector, rtol=0, atol=1e-10)
    assert abs(ours.metrics["loss"] - theirs.metrics["loss"]) < 1e-10


def test_parts_of_a_batch_add_up_to_the_whole() -> None:
    for make in (from_function, from_graph):
        task = make()
        (whole,) = (next(task.configured(batch=30, feed="slice").batches(0, 1, 0)) for _ in range(1))
        x = task.start(0)
        total = task.grad(x, whole)[1]
        cut = task.configured(batch=30, feed="slice")
        parts = [cut.grad(x, next(cut.batches(rank, 4, 0)))[1].clone() for rank in range(4)]
        torch.testing.assert_close(sum(parts) / 4, total, rtol=0, atol=1e-12)


def test_random_numbers_that_are_not_the_batch_s_are_refused() -> None:
    noisy = TensorFlowTask(lambda held, x, y: step(held, tf.nn.dropout(x, 0.5), y), variables, data())
    with pytest.raises(UsageError, match=r"draws random numbers.*RandomUniform.*a parameter `seed`"):
        noisy.grad(noisy.start(0), next(noisy.batches(0, 1, 0)))
    with pytest.raises(UsageError, match=r"the loss of the graph draws random numbers \(RandomUniform\)"):
        from_graph(noise=True)


def test_first_values_of_a_graph_follow_the_seed() -> None:
    v1 = tf.compat.v1
    with tf.Graph().as_default():
        x, y = v1.placeholder(tf.float32, [None, 64]), v1.placeholder(tf.int64, [None])
        held = v1.get_variable("w", (64, 10), initializer=v1.glorot_uniform_initializer())
        loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=x @ held))
    samples = data()[0].astype(np.float32), data()[1]
    first, again = (TensorFlowTask.from_graph(loss, [x, y], samples) for _ in range(2))
    assert torch.equal(first.start(3), again.start(3))
    assert not torch.equal(first.start(3), first.start(4))


@pytest.mark.parametrize("scheme", UPDATES)
def test_real_processes(scheme: str, tmp_path: Path) -> None:
    file = tmp_path / "digits_task.py"
    file.write_text(FILE)
    holds_in_processes(tmp_path, f"{file}:make", scheme)
    values = paceline.load(tmp_path / "killed")
    assert sorted(values) == ["in:0", "out:0"]
    inputs = torch.rand(5, 64)
    scores = paceline.predict(tmp_path / "killed", inputs)
    own = np.maximum(inputs.numpy() @ values["in:0"], 0) @ values["out:0"]
    np.testing.assert_allclose(scores.numpy(), own, atol=1e-4)


@pytest.mark.parametrize("make", [from_variables, from_graph])
def test_variables_and_graphs_of_the_caller_reach_the_processes(make: object, tmp_path: Path) -> None:
    task = make()
    result, _ = trained(tmp_path / "run", task, "sync", steps=20)
    simulated = paceline.simulate(task, "sync", workers=2, steps=20, lr=0.1)
    torch.testing.assert_close(result.vector, simulated.vector, rtol=0, atol=1e-10)
