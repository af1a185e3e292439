"""Scripts that keep their own loop, for tests, and how they are run. Data: scikit-learn's digits."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.api.execute import execute
from paceline.config.from_plan import scheme_of
from paceline.config.plan import Plan
from paceline.result import Result
from paceline.runs.run_directory import RunDirectory

PRELUDE = """
import os, signal, sys, time
from pathlib import Path
import torch
from torch import nn
from torch.nn import functional as F
from sklearn.datasets import load_digits
from paceline.api.script.attach import attach

digits = load_digits()
X = torch.tensor(digits.data, dtype=torch.float32) / 16
Y = torch.tensor(digits.target)
items = [(X[i : i + 32], Y[i : i + 32]) for i in range(0, 40 * 32, 32)]
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))

def keep(name, model):
    weights = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    Path(name).write_bytes(weights.numpy().tobytes())
"""

PLAIN = """
with attach(model, "sync", lr=0.2, steps=30) as pace:
    for images, labels in pace.share(items):
        pace.step(F.cross_entropy(model(images), labels))
keep(f"{pace.rank}.weights", model)
"""


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Run a script as `paceline run` does. Relative paths of the script are those of tmp_path."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])

    def run(body: str, *, workers: int = 2, said: list[str] | None = None, **settings: Any) -> Result:
        script = tmp_path / "script.py"
        script.write_text(PRELUDE + body)
        directory = RunDirectory.create(tmp_path / f"run-{len(list(tmp_path.glob('run-*')))}", "run")
        plan = Plan(script=[str(script)], workers=workers, directory=str(directory.path), title="test", **settings)
        directory.write_plan(dataclasses.asdict(plan))

        def tell(kind: str, text: str) -> None:
            if said is not None:
                said.append(text)

        return execute(plan, scheme_of(plan, {}), {}, tell=tell, watch=lambda _: None)

    return run


def weights(path: Path | str) -> Tensor:
    return torch.from_numpy(np.frombuffer(Path(path).read_bytes(), dtype=np.float32).copy())


def same(a: Tensor, b: Tensor) -> bool:
    return a.numpy().tobytes() == b.numpy().tobytes()
