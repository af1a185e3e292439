"""A JAX training loop under any scheme: the parameters are a pytree, and pace.step takes its gradients.

paceline run examples/jax_loop.py --workers 4       four workers and a server
python examples/jax_loop.py                         by itself: one worker that is its own server

Needs JAX: pip install 'paceline[jax]'
"""

from __future__ import annotations

import argparse

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_digits

import paceline

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--steps", type=int, default=1000)
parser.add_argument("--batch", type=int, default=32)
parser.add_argument("--width", type=int, default=64)
args = parser.parse_args()

digits = load_digits()
images, labels = (digits.data / 16).astype(np.float32), digits.target
train, test = slice(0, 1500), slice(1500, None)


def first_params(key: jax.Array) -> dict[str, dict[str, jax.Array]]:
    inside, outside = jax.random.split(key)
    return {
        "hidden": {"w": jax.random.normal(inside, (64, args.width)) / 8, "b": jnp.zeros(args.width)},
        "output": {"w": jax.random.normal(outside, (args.width, 10)) / args.width**0.5, "b": jnp.zeros(10)},
    }


def logits_of(params, x):
    hidden = jax.nn.relu(x @ params["hidden"]["w"] + params["hidden"]["b"])
    return hidden @ params["output"]["w"] + params["output"]["b"]


def loss_of(params, x, y):
    return -jnp.take_along_axis(jax.nn.log_softmax(logits_of(params, x)), y[:, None], axis=1).mean()


def evaluate(params) -> dict[str, float]:
    return {"accuracy": float((logits_of(params, images[test]).argmax(1) == labels[test]).mean())}


def batches():
    """One epoch, in an order that numpy draws: alike on all workers, and share() gives each its part of it."""
    order = np.random.permutation(1500)
    for first in range(0, 1500 - args.batch + 1, args.batch):
        chosen = order[first : first + args.batch]
        yield images[chosen], labels[chosen]


loss_and_grads = jax.jit(jax.value_and_grad(loss_of))
with paceline.attach(
    first_params(jax.random.key(0)), "downpour", lr=0.05, window=5, steps=args.steps, evaluate=evaluate
) as pace:
    params = pace.params
    for x, y in pace.share(batches):
        loss, grads = loss_and_grads(params, x, y)
        params = pace.step(grads, loss)

if pace.chief:  # pace.params: the final parameters, the same on every worker
    accuracy = evaluate(pace.params)["accuracy"]
    pace.say(f"accuracy {accuracy:.2%} after {pace.updates:,} updates of {pace.workers} workers")
