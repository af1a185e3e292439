"""A Flax model as a task: its variables are a pytree, and paceline trains those in `params`.

paceline train examples/flax_digits.py:make --scheme async --workers 4 --steps 2000 lr=0.1
paceline simulate examples/flax_digits.py:make --scheme downpour --workers 4 --steps 400 lr=0.02 window=5

Needs JAX and Flax: pip install 'paceline[jax]' flax
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_digits

import paceline


class Network(nn.Module):
    """Two layers with dropout between them."""

    width: int

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        hidden = nn.relu(nn.Dense(self.width)(x))
        return nn.Dense(10)(nn.Dropout(0.1, deterministic=not train)(hidden))


def make(width: int = 64) -> paceline.JaxTask:
    """The task; as a function, so that JAX computes nothing before the processes of a run have begun."""
    digits, model = load_digits(), Network(width)
    images, labels = (digits.data / 16).astype(np.float32), digits.target

    def init(key: jax.Array) -> Any:
        return model.init(key, jnp.zeros((1, 64)))

    def loss(variables: Any, x: jax.Array, y: jax.Array, key: jax.Array | None = None) -> jax.Array:
        rngs = None if key is None else {"dropout": key}  # without a key: an evaluation
        scores = jax.nn.log_softmax(model.apply(variables, x, train=key is not None, rngs=rngs))
        return -jnp.take_along_axis(scores, y[:, None], axis=1).mean()

    def accuracy(scores: jax.Array, y: jax.Array) -> jax.Array:
        return (scores.argmax(1) == y).mean()

    train, test = (images[:1500], labels[:1500]), (images[1500:], labels[1500:])
    return paceline.JaxTask(init, loss, train, test, predict=model.apply, metrics={"accuracy": accuracy}, name="flax")
