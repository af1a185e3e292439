"""Trains the same network with torch and with Keras, in the simulator; prints how far the vectors are apart.

A program of its own: Keras has one backend in a process (KERAS_BACKEND)."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import keras

keras.config.set_floatx("float64")
if keras.backend.backend() == "jax":
    import jax

    jax.config.update("jax_enable_x64", True)

sys.path.append(str(Path(__file__).resolve().parents[1]))

from beds.short_windows import short  # noqa: E402
from digits_networks import HIDDEN, data, steps_of, torch_task, weights  # noqa: E402

import paceline  # noqa: E402
from paceline.config import discovery  # noqa: E402


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
        settings = {"workers": 1 if discovery.scheme(scheme).alone else 4, "steps": steps_of(scheme)}
        quiet = {"warn": lambda _: None, "compute": "exponential:1.0"} | short(scheme)
        theirs = paceline.simulate(torch_task(), scheme, **settings, **quiet)
        ours = paceline.simulate(mine, scheme, **settings, **quiet)
        assert ours.updates == theirs.updates
        assert abs(ours.metrics["loss"] - theirs.metrics["loss"]) < 1e-10
        assert ours.metrics["accuracy"] > 0.3 or steps_of(scheme) < 50
        found[scheme] = (ours.vector - theirs.vector).abs().max().item()
    print(json.dumps(found))
