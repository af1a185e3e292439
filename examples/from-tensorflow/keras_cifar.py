"""The network of the CIFAR-10 guide, in Keras: conv 5x5x64, pool, lrn, conv 5x5x64, lrn, pool, 384 units, 192, softmax.

paceline train examples/from-tensorflow/keras_cifar.py:make --scheme async lr=0.02 --workers 4 --servers 1 --epochs 5
paceline train examples/from-tensorflow/keras_cifar.py:make --scheme sync lr=0.1 aggregate=3 --workers 4 --epochs 5
paceline train examples/from-tensorflow/keras_cifar.py:make --scheme agn lr=0.05 window=5 --workers 4 --epochs 5
paceline train examples/from-tensorflow/keras_cifar.py:make --scheme async lr=0.02 task.synthetic=2000 --steps 200

Whole pictures of 32 x 32, without the guide's random crops to 24 x 24; task.parts=1 reads one of the five files.
Needs Keras and a backend: pip install 'paceline[keras]'
"""

from __future__ import annotations

from typing import Any

import keras
from guide_data import cifar

import paceline

layers = keras.layers


class LocalResponseNormalization(layers.Layer):
    """tf.nn.lrn(x, 4, bias=1.0, alpha=0.001 / 9, beta=0.75), for every backend of Keras."""

    def call(self, x: Any) -> Any:
        squares = keras.ops.pad(keras.ops.square(x), [(0, 0), (0, 0), (0, 0), (4, 4)])
        around = sum(squares[..., shift : shift + x.shape[-1]] for shift in range(9))
        return x * (1 + 0.001 / 9 * around) ** -0.75


def first(spread: float, bias: float, decay: float = 0.0) -> dict[str, Any]:
    return {
        "kernel_initializer": keras.initializers.TruncatedNormal(stddev=spread),
        "bias_initializer": keras.initializers.Constant(bias),
        "kernel_regularizer": keras.regularizers.L2(decay / 2) if decay else None,
    }


def network() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((32, 32, 3)),
            layers.Conv2D(64, 5, padding="same", activation="relu", **first(0.05, 0.0)),
            layers.MaxPooling2D(3, 2, padding="same"),
            LocalResponseNormalization(),
            layers.Conv2D(64, 5, padding="same", activation="relu", **first(0.05, 0.1)),
            LocalResponseNormalization(),
            layers.MaxPooling2D(3, 2, padding="same"),
            layers.Flatten(),
            layers.Dense(384, activation="relu", **first(0.04, 0.1, decay=0.004)),
            layers.Dense(192, activation="relu", **first(0.04, 0.1, decay=0.004)),
            layers.Dense(10, **first(1 / 192, 0.0)),
        ]
    )


def make(parts: int = 5, synthetic: int = 0) -> paceline.KerasTask:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return paceline.KerasTask(network, loss, metrics=["accuracy"], name="keras-cifar", **cifar(parts, synthetic))
