"""The Flax and Equinox examples: their commands, in the simulator and in processes, and the model that comes back."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from beds.pages import Block, commands
from framework_runs import trained

import paceline

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NAMES = ["flax", "equinox"]


@pytest.fixture(params=NAMES)
def example(request: pytest.FixtureRequest) -> Path:
    if importlib.util.find_spec("jax") is None or importlib.util.find_spec(request.param) is None:
        pytest.skip(f"jax or {request.param} is not installed")
    return EXAMPLES / f"{request.param}_digits.py"


def test_its_commands_train(example: Path) -> None:
    text = ast.get_docstring(ast.parse(example.read_text(encoding="utf-8"))) or ""
    found = [words for words in commands(Block(example.name, 1, "sh", text, "")) if words[0] in ("train", "simulate")]
    assert len(found) == 2
    for words in found:
        assert words[1] == f"examples/{example.name}:make"
        hyper = dict(word.split("=") for word in words if "=" in word)
        scheme, steps = (words[words.index(name) + 1] for name in ("--scheme", "--steps"))
        task: dict[str, Any] = {"task_options": {"width": 32}}
        result = paceline.simulate(f"{example}:make", scheme, workers=4, steps=int(steps) // 4, **hyper, **task)
        assert result.metrics["accuracy"] > 0.6


def test_real_processes_and_the_model(example: Path, tmp_path: Path) -> None:
    result, said = trained(tmp_path / "run", f"{example}:make", "async", steps=600)
    assert not [text for text in said if "--start exec" in text]
    assert result.metrics["accuracy"] > 0.7
    assert paceline.replay(tmp_path / "run").match
    model = paceline.load(tmp_path / "run")
    inputs = torch.rand(5, 64)
    scores = paceline.predict(tmp_path / "run", inputs)
    if "flax" in example.name:
        layers = [model["params"][f"Dense_{number}"] for number in range(2)]
        hidden = np.maximum(inputs.numpy() @ np.asarray(layers[0]["kernel"]) + np.asarray(layers[0]["bias"]), 0)
        own = hidden @ np.asarray(layers[1]["kernel"]) + np.asarray(layers[1]["bias"])
    else:
        own = np.stack([np.asarray(model(one.numpy())) for one in inputs])
    np.testing.assert_allclose(scores.numpy(), own, atol=1e-4)
