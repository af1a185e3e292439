"""A Keras training loop under any scheme, on the TensorFlow, JAX or torch backend: pace.step takes a loss function.

paceline run examples/keras_loop.py --workers 4                       four workers and a server
KERAS_BACKEND=jax paceline run examples/keras_loop.py --workers 4     on JAX
python examples/keras_loop.py                                         by itself: one worker that is its own server

Needs Keras and a backend: pip install 'paceline[keras]'
"""

from __future__ import annotations

import argparse

import keras
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
batches = [
    (images[first : first + args.batch], labels[first : first + args.batch])
    for first in range(0, 1500 - args.batch + 1, args.batch)
]

keras.utils.set_random_seed(0)
model = keras.Sequential(
    [
        keras.Input((64,)),
        keras.layers.Dense(args.width, activation="relu"),
        keras.layers.Dropout(0.1),
        keras.layers.Dense(10),
    ]
)
cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def loss_of(x, y):
    return cross_entropy(y, model(x, training=True))


def evaluate(model: keras.Model) -> dict[str, float]:
    found = keras.ops.convert_to_numpy(model(images[1500:], training=False)).argmax(1)
    return {"accuracy": float((found == labels[1500:]).mean())}


with paceline.attach(model, "downpour", lr=0.05, window=5, steps=args.steps, evaluate=evaluate) as pace:
    for x, y in pace.share(batches):
        pace.step(loss_of, x, y)  # compiled once; pace.step(lambda: loss_of(x, y)) runs it as it is

if pace.chief:  # every worker's model holds the same weights now
    accuracy = evaluate(model)["accuracy"]
    pace.say(f"accuracy {accuracy:.2%} after {pace.updates:,} updates of {pace.workers} workers")
