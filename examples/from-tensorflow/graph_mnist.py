"""The convolutional network of "Deep MNIST for experts", as a graph of TensorFlow 1: conv 5x5x32, pool, conv 5x5x64,
pool, 1024 units, dropout, softmax.

paceline train examples/from-tensorflow/graph_mnist.py:make --scheme sync lr=0.05 aggregate=3 --workers 4 --steps 500
paceline train examples/from-tensorflow/graph_mnist.py:make --scheme async lr=0.02 --workers 4 --servers 1 --epochs 2
paceline train examples/from-tensorflow/graph_mnist.py:make --scheme downpour lr=0.005 window=5 --workers 4 --epochs 2
paceline train examples/from-tensorflow/graph_mnist.py:make --scheme agn lr=0.05 window=5 --workers 4 --epochs 2

The one line that differs from the guide: dropout draws from the seed of the batch, so that a batch has one gradient.
keep_prob stays a placeholder, 0.5 in training and 1 in an evaluation.
Needs TensorFlow: pip install 'paceline[tensorflow]'
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from guide_data import mnist

import paceline

v1 = tf.compat.v1


def variables(number: int, *shape: int) -> tuple[Any, Any]:
    weights = v1.get_variable(f"w{number}", shape, initializer=v1.truncated_normal_initializer(stddev=0.1))
    return weights, v1.get_variable(f"b{number}", shape[-1:], initializer=v1.constant_initializer(0.1))


def convolved(x: Any, number: int, *shape: int) -> Any:
    w, b = variables(number, *shape)
    return tf.nn.max_pool2d(tf.nn.relu(tf.nn.conv2d(x, w, 1, "SAME") + b), 2, 2, "SAME")


def make() -> paceline.TensorFlowTask:
    with tf.Graph().as_default():
        x = v1.placeholder(tf.float32, [None, 28, 28, 1])
        y = v1.placeholder(tf.int64, [None])
        keep_prob = v1.placeholder(tf.float32, [])
        seed = v1.placeholder(tf.int32, [2])
        pooled = convolved(convolved(x, 1, 5, 5, 1, 32), 2, 5, 5, 32, 64)
        w, b = variables(3, 7 * 7 * 64, 1024)
        hidden = tf.nn.relu(tf.matmul(tf.reshape(pooled, [-1, 7 * 7 * 64]), w) + b)
        dropped = tf.nn.experimental.stateless_dropout(hidden, rate=1 - keep_prob, seed=seed)
        w, b = variables(4, 1024, 10)
        logits = tf.matmul(dropped, w) + b
        loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits))
    right = {"accuracy": lambda scores, digits: (scores.argmax(-1) == digits).mean()}
    return paceline.TensorFlowTask.from_graph(
        loss,
        [x, y],
        output=logits,
        metrics=right,
        seed=seed,
        fed={keep_prob: (0.5, 1.0)},
        name="graph-mnist",
        **mnist(28, 28, 1),
    )
