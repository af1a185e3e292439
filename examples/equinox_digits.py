"""An Equinox module as a task: the module is a pytree, and paceline trains its floating-point arrays.

paceline train examples/equinox_digits.py:make --scheme async --workers 4 --steps 2000 lr=0.1
paceline simulate examples/equinox_digits.py:make --scheme downpour --workers 4 --steps 400 lr=0.02 window=5

Needs JAX and Equinox: pip install 'paceline[jax]' equinox
"""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_digits

import paceline


def scores_of(model: eqx.nn.MLP, x: jax.Array) -> jax.Array:
    return jax.vmap(model)(x)


def loss(model: eqx.nn.MLP, x: jax.Array, y: jax.Array) -> jax.Array:
    return -jnp.take_along_axis(jax.nn.log_softmax(scores_of(model, x)), y[:, None], axis=1).mean()


def make(width: int = 64) -> paceline.JaxTask:
    """The task; as a function, so that JAX computes nothing before the processes of a run have begun."""
    digits = load_digits()
    images, labels = (digits.data / 16).astype(np.float32), digits.target

    def init(key: jax.Array) -> eqx.nn.MLP:
        return eqx.nn.MLP(in_size=64, out_size=10, width_size=width, depth=1, key=key)

    def accuracy(scores: jax.Array, y: jax.Array) -> jax.Array:
        return (scores.argmax(1) == y).mean()

    train, test = (images[:1500], labels[:1500]), (images[1500:], labels[1500:])
    return paceline.JaxTask(init, loss, train, test, predict=scores_of, metrics={"accuracy": accuracy}, name="equinox")
