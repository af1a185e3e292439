"""The guides' first program, in Keras: two variables that should add up to 100.

paceline train examples/from-tensorflow/keras_toy.py:make --scheme async lr=0.1 --workers 2 --servers 1 --steps 50
paceline train examples/from-tensorflow/keras_toy.py:make --scheme hogwild lr=0.1 --workers 2 --steps 50
paceline simulate examples/from-tensorflow/keras_toy.py:make --scheme sync lr=0.1 --workers 3 --steps 50

Needs Keras and a backend: pip install 'paceline[keras]'
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

import paceline


class Addition(keras.layers.Layer):
    """a + b, whatever the input is."""

    def build(self, shape: Any) -> None:
        self.a = self.add_weight(shape=(2,), initializer="zeros", name="a")
        self.b = self.add_weight(shape=(2,), initializer="zeros", name="b")

    def call(self, x: Any) -> Any:
        return keras.ops.zeros_like(x) + self.a + self.b


def network() -> keras.Model:
    return keras.Sequential([keras.Input((2,)), Addition()])


def make() -> paceline.KerasTask:
    nothing, target = np.zeros((1, 2), np.float32), np.full((1, 2), 100, np.float32)
    return paceline.KerasTask(network, "mean_squared_error", (nothing, target), batch=1, name="keras-toy")
