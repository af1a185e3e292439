"""The network of the CIFAR-10 guide, as a graph of TensorFlow 1: conv 5x5x64, pool, lrn, conv 5x5x64, lrn, pool, 384
units, 192, softmax.

paceline train examples/from-tensorflow/graph_cifar.py:make --scheme async lr=0.02 --workers 4 --servers 1 --epochs 5
paceline train examples/from-tensorflow/graph_cifar.py:make --scheme sync lr=0.1 aggregate=3 --workers 4 --epochs 5
paceline train examples/from-tensorflow/graph_cifar.py:make --scheme agn lr=0.05 window=5 --workers 4 --epochs 5
paceline train examples/from-tensorflow/graph_cifar.py:make --scheme async lr=0.02 task.synthetic=2000 --steps 200

Whole pictures of 32 x 32, without the guide's random crops to 24 x 24; task.parts=1 reads one of the five files.
Needs TensorFlow: pip install 'paceline[tensorflow]'
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from guide_data import cifar

import paceline

v1 = tf.compat.v1


def variables(number: int, spread: float, bias: float, *shape: int) -> tuple[Any, Any]:
    weights = v1.get_variable(f"w{number}", shape, initializer=v1.truncated_normal_initializer(stddev=spread))
    return weights, v1.get_variable(f"b{number}", shape[-1:], initializer=v1.constant_initializer(bias))


def normalised(x: Any) -> Any:
    return tf.nn.lrn(x, 4, bias=1.0, alpha=0.001 / 9, beta=0.75)


def pooled(x: Any) -> Any:
    return tf.nn.max_pool2d(x, 3, 2, "SAME")


def make(parts: int = 5, synthetic: int = 0) -> paceline.TensorFlowTask:
    with tf.Graph().as_default():
        x = v1.placeholder(tf.float32, [None, 32, 32, 3])
        y = v1.placeholder(tf.int64, [None])
        w, b = variables(1, 0.05, 0.0, 5, 5, 3, 64)
        hidden = normalised(pooled(tf.nn.relu(tf.nn.conv2d(x, w, 1, "SAME") + b)))
        w, b = variables(2, 0.05, 0.1, 5, 5, 64, 64)
        hidden = pooled(normalised(tf.nn.relu(tf.nn.conv2d(hidden, w, 1, "SAME") + b)))
        w, b = variables(3, 0.04, 0.1, 8 * 8 * 64, 384)
        decay = tf.nn.l2_loss(w)
        hidden = tf.nn.relu(tf.matmul(tf.reshape(hidden, [-1, 8 * 8 * 64]), w) + b)
        w, b = variables(4, 0.04, 0.1, 384, 192)
        decay += tf.nn.l2_loss(w)
        hidden = tf.nn.relu(tf.matmul(hidden, w) + b)
        w, b = variables(5, 1 / 192, 0.0, 192, 10)
        logits = tf.matmul(hidden, w) + b
        entropy = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits)
        loss = tf.reduce_mean(entropy) + 0.004 * decay
    right = {"accuracy": lambda scores, labels: (scores.argmax(-1) == labels).mean()}
    return paceline.TensorFlowTask.from_graph(
        loss, [x, y], output=logits, metrics=right, name="graph-cifar", **cifar(parts, synthetic)
    )
