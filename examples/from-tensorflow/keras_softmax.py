"""Softmax regression on MNIST, in Keras: the network of "MNIST for beginners".

paceline train examples/from-tensorflow/keras_softmax.py:make --scheme async lr=0.1 --workers 4 --servers 1 --steps 1000
paceline train examples/from-tensorflow/keras_softmax.py:make --scheme downpour lr=0.02 window=5 --workers 4 --steps 500
paceline train examples/from-tensorflow/keras_softmax.py:make --scheme agn lr=0.2 window=5 --workers 4 --steps 500
paceline train examples/from-tensorflow/keras_softmax.py:make --scheme hogwild lr=0.1 --workers 4 --steps 1000

Synchronous, three of four gradients make an update, one worker is a backup:

paceline train examples/from-tensorflow/keras_softmax.py:make --scheme sync lr=0.5 aggregate=3 --workers 4 --steps 500

Needs Keras and a backend: pip install 'paceline[keras]'
"""

from __future__ import annotations

import keras
from guide_data import mnist

import paceline


def network() -> keras.Model:
    return keras.Sequential([keras.Input((784,)), keras.layers.Dense(10, kernel_initializer="zeros")])


def make() -> paceline.KerasTask:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return paceline.KerasTask(network, loss, metrics=["accuracy"], name="keras-softmax", **mnist(784))
