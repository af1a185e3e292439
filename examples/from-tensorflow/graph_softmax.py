"""Softmax regression on MNIST, as a graph of TensorFlow 1: the network of "MNIST for beginners".

paceline train examples/from-tensorflow/graph_softmax.py:make --scheme async lr=0.1 --workers 4 --servers 1 --steps 1000
paceline train examples/from-tensorflow/graph_softmax.py:make --scheme downpour lr=0.02 window=5 --workers 4 --steps 500
paceline train examples/from-tensorflow/graph_softmax.py:make --scheme agn lr=0.2 window=5 --workers 4 --steps 500
paceline train examples/from-tensorflow/graph_softmax.py:make --scheme hogwild lr=0.1 --workers 4 --steps 1000

Synchronous, three of four gradients make an update, one worker is a backup:

paceline train examples/from-tensorflow/graph_softmax.py:make --scheme sync lr=0.5 aggregate=3 --workers 4 --steps 500

Needs TensorFlow: pip install 'paceline[tensorflow]'
"""

from __future__ import annotations

import tensorflow as tf
from guide_data import mnist

import paceline

v1 = tf.compat.v1


def make() -> paceline.TensorFlowTask:
    with tf.Graph().as_default():
        x = v1.placeholder(tf.float32, [None, 784])
        y = v1.placeholder(tf.int64, [None])
        w = v1.get_variable("w", [784, 10], initializer=v1.zeros_initializer())
        b = v1.get_variable("b", [10], initializer=v1.zeros_initializer())
        logits = tf.matmul(x, w) + b
        loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits))
    right = {"accuracy": lambda scores, digits: (scores.argmax(-1) == digits).mean()}
    return paceline.TensorFlowTask.from_graph(
        loss, [x, y], output=logits, metrics=right, name="graph-softmax", **mnist(784)
    )
