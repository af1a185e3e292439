"""model.fit of Keras under any scheme, on the TensorFlow, JAX or torch backend: one callback.

paceline run examples/keras_fit.py --workers 4                       four workers and a server
KERAS_BACKEND=jax paceline run examples/keras_fit.py --workers 4     on JAX
python examples/keras_fit.py                                         by itself: one worker that is its own server

Needs Keras and a backend: pip install 'paceline[keras]'
"""

from __future__ import annotations

import argparse

import keras
import numpy as np
from sklearn.datasets import load_digits

import paceline.keras

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--epochs", type=int, default=30)
parser.add_argument("--batch", type=int, default=32)
parser.add_argument("--width", type=int, default=64)
args = parser.parse_args()

digits = load_digits()
images, labels = (digits.data / 16).astype(np.float32), digits.target
x, y = paceline.keras.share(images[:1500], labels[:1500])  # this worker's samples

keras.utils.set_random_seed(0)
model = keras.Sequential(
    [keras.Input((64,)), keras.layers.Dense(args.width, activation="relu"), keras.layers.Dense(10)]
)
model.compile(
    optimizer="sgd",  # Keras wants one; the scheme makes the updates
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
pace = paceline.keras.Pace("downpour", lr=0.05, window=5)
model.fit(x, y, batch_size=args.batch, epochs=args.epochs, verbose=2, callbacks=[pace])

if pace.chief:  # every worker's model holds the same weights now
    _, accuracy = model.evaluate(images[1500:], labels[1500:], verbose=0)
    pace.loop.say(f"accuracy {accuracy:.2%} after {pace.loop.updates:,} updates of {pace.workers} workers")
