"""The same small regression with dropout in JAX, Keras and TensorFlow, for the contract suite of schemes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np

from paceline import JaxTask, KerasTask, TensorFlowTask
from paceline.task import Task


def samples() -> tuple[np.ndarray, np.ndarray]:
    drawn = np.random.default_rng(5)
    x = drawn.normal(size=(60, 3)).astype(np.float32)
    return x, (x @ drawn.normal(size=(3, 1)) + 0.5 * drawn.normal(size=(60, 1))).astype(np.float32)


@cache
def jax_task() -> Task:
    """Four weights in a pytree."""
    import jax

    def init(key: jax.Array) -> dict[str, jax.Array]:
        return {"bias": jax.numpy.zeros(1), "slope": jax.random.normal(key, (3, 1))}

    def loss(weights: dict[str, jax.Array], x: jax.Array, y: jax.Array, key: jax.Array | None = None) -> jax.Array:
        kept = x if key is None else x * jax.random.bernoulli(key, 0.8, x.shape)
        return 0.5 * ((kept @ weights["slope"] + weights["bias"] - y) ** 2).mean()

    return JaxTask(init, loss, samples())


@cache
def keras_task() -> Task:
    """Four weights, and the state of a BatchNormalization."""
    import keras

    def network() -> keras.Model:
        layers = keras.layers
        norm = layers.BatchNormalization(center=False, scale=False)
        return keras.Sequential([keras.Input((3,)), norm, layers.Dropout(0.2), layers.Dense(1)])

    return KerasTask(network, "mean_squared_error", samples())


@cache
def tensorflow_task() -> Task:
    """Four weights in two variables."""
    import tensorflow as tf

    def variables() -> list[tf.Variable]:
        return [tf.Variable(tf.random.normal((3, 1)), name="slope"), tf.Variable(tf.zeros(1), name="bias")]

    def step(held: list[tf.Variable], x: tf.Tensor, y: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        kept = x * tf.cast(tf.random.stateless_uniform(tf.shape(x), seed) < 0.8, x.dtype)
        return 0.5 * tf.reduce_mean((kept @ held[0] + held[1] - y) ** 2)

    return TensorFlowTask(step, variables, samples())


TASKS: dict[str, Callable[[], Task]] = {"jax": jax_task, "keras": keras_task, "tensorflow": tensorflow_task}
