"""Trains the same network with torch and with Keras, in the simulator; prints how far the vectors are apart.

A program of its own: Keras has one backend in a process (KERAS_BACKEND)."""

from __future__ import annotations

import json
import sys

import keras

keras.config.set_floatx("float64")
if keras.backend.backend() == "jax":
    import jax

    jax.config.update("jax_enable_x64", True)

from digits_networks import HIDDEN, data, torch_task, weights  # noqa: E402

import paceline  # noqa: E402


def network() -> keras.Model:
    layers = [keras.Input((64,)), keras.layers.Dense(HIDDEN, activation="relu"), keras.layers.Dense(10)]
    model = keras.Sequential(layers)
    model.set_weights(weights())
    return model


if __name__ == "__main__":
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    mine = paceline.KerasTask(network, loss, data(), metrics=["accuracy"])
    found = {}
    for scheme in sys.argv[1:]:
        workers = 1 if scheme == "sgd" else 3
        theirs = paceline.simulate(torch_task(), scheme, workers=workers, steps=50, lr=0.1)
        ours = paceline.simulate(mine, scheme, workers=workers, steps=50, lr=0.1)
        found[scheme] = (ours.vector - theirs.vector).abs().max().item()
        assert ours.metrics["accuracy"] > 0.3
        assert abs(ours.metrics["loss"] - theirs.metrics["loss"]) < 1e-4
    print(json.dumps(found))
