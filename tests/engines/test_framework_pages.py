"""The Python blocks of docs/attach-keras-jax.md run."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from beds.pages import blocks
from framework_scripts import python

KERAS = """
import keras
import numpy as np
import paceline

x, y = np.random.default_rng(0).normal(size=(64, 8)).astype("float32"), np.arange(64) % 3
batches = [(x[:32], y[:32]), (x[32:], y[32:])]
model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(3)])
cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile("sgd", cross_entropy)
"""
JAX = """
import jax, jax.numpy as jnp
import numpy as np
import paceline

batches = [(np.ones((4, 3), np.float32), np.ones(4, np.float32))]
params = {"w": jnp.zeros(3)}

def loss_of(params, x, y):
    return ((x @ params["w"] - y) ** 2).mean()
"""
BLOCKS = [block for block in blocks("docs/attach-keras-jax.md") if block.language == "python"]


def test_there_are_three() -> None:
    assert len(BLOCKS) == 3


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: f"line-{block.line}")
def test_it_runs(block, tmp_path: Path) -> None:
    framework = "jax" if "jax." in block.text else "keras"
    if not importlib.util.find_spec(framework):
        pytest.skip(f"needs {framework}: pip install 'paceline[{framework}]'")
    python((JAX if framework == "jax" else KERAS) + block.text.replace("steps=2000", "steps=12"), tmp_path)
