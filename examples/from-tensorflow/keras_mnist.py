"""The convolutional network of "Deep MNIST for experts", in Keras: conv 5x5x32, pool, conv 5x5x64, pool, 1024 units,
dropout, softmax.

paceline train examples/from-tensorflow/keras_mnist.py:make --scheme sync lr=0.05 aggregate=3 --workers 4 --steps 500
paceline train examples/from-tensorflow/keras_mnist.py:make --scheme async lr=0.02 --workers 4 --servers 1 --epochs 2
paceline train examples/from-tensorflow/keras_mnist.py:make --scheme downpour lr=0.005 window=5 --workers 4 --epochs 2
paceline train examples/from-tensorflow/keras_mnist.py:make --scheme agn lr=0.05 window=5 --workers 4 --epochs 2

The guide's optimizer was Adam: rule=adam lr=0.0001 makes it the server's, for async and sync.
Needs Keras and a backend: pip install 'paceline[keras]'
"""

from __future__ import annotations

from typing import Any

import keras
from guide_data import mnist

import paceline

layers = keras.layers


def first() -> dict[str, Any]:
    """The first weights and biases of the guide."""
    return {
        "kernel_initializer": keras.initializers.TruncatedNormal(stddev=0.1),
        "bias_initializer": keras.initializers.Constant(0.1),
    }


def network() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            layers.Conv2D(32, 5, padding="same", activation="relu", **first()),
            layers.MaxPooling2D(2),
            layers.Conv2D(64, 5, padding="same", activation="relu", **first()),
            layers.MaxPooling2D(2),
            layers.Flatten(),
            layers.Dense(1024, activation="relu", **first()),
            layers.Dropout(0.5),
            layers.Dense(10, **first()),
        ]
    )


def make() -> paceline.KerasTask:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return paceline.KerasTask(network, loss, metrics=["accuracy"], name="keras-mnist", **mnist(28, 28, 1))
