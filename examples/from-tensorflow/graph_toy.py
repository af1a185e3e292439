"""The guides' first program, as a graph of TensorFlow 1: two variables that should add up to 100.

paceline train examples/from-tensorflow/graph_toy.py:make --scheme async lr=0.1 --workers 2 --servers 1 --steps 50
paceline train examples/from-tensorflow/graph_toy.py:make --scheme hogwild lr=0.1 --workers 2 --steps 50
paceline simulate examples/from-tensorflow/graph_toy.py:make --scheme sync lr=0.1 --workers 3 --steps 50

Needs TensorFlow: pip install 'paceline[tensorflow]'
"""

from __future__ import annotations

import numpy as np
import tensorflow as tf

import paceline

v1 = tf.compat.v1


def make() -> paceline.TensorFlowTask:
    with tf.Graph().as_default():
        target = v1.placeholder(tf.float32, [None, 2])
        a = v1.get_variable("a", [2], initializer=v1.zeros_initializer())
        b = v1.get_variable("b", [2], initializer=v1.zeros_initializer())
        loss = tf.reduce_mean(tf.square(a + b - target))
    data = (np.full((1, 2), 100, np.float32),)
    return paceline.TensorFlowTask.from_graph(loss, [target], data, batch=1, name="graph-toy")
