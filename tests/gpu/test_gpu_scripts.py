"""Scripts with a loop of their own whose model is on a GPU: launched, killed, resumed, and by themselves.

Data: scikit-learn's digits.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os, signal, sys
import torch
from torch import nn
from torch.nn import functional as F
from sklearn.datasets import load_digits
import paceline

scheme, own_optimizer, dies = sys.argv[1], "adam" in sys.argv, "dies" in sys.argv
digits = load_digits()
X = torch.tensor(digits.data, dtype=torch.float32, device="cuda") / 16
Y = torch.tensor(digits.target, device="cuda")
items = [(X[i : i + 32], Y[i : i + 32]) for i in range(0, 40 * 32, 32)]
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 10)).cuda()


def evaluate(model):
    return {"accuracy": (model(X).argmax(1) == Y).float().mean().item()}


given = {"optimizer": torch.optim.Adam(model.parameters(), lr=0.01)} if own_optimizer else {"lr": 0.1}
with paceline.attach(model, scheme, steps=300, evaluate=evaluate, **given) as pace:
    memory = pace._session.memory
    server = memory.server_state().x.device.type if memory.scheme.methods else "none"
    pace.say(f"cells on {pace._session.worker.state.x.device.type}, server on {server}")
    for images, labels in pace.share(items):
        if dies and pace.rank == pace.workers - 1 and not os.path.exists("died") and pace.updates >= 50:
            open("died", "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled="half" in sys.argv):
            loss = F.cross_entropy(model(images), labels)
        pace.step(loss)
assert all(one.is_cuda for one in (*model.parameters(), *model.buffers()))
assert evaluate(model.eval())["accuracy"] > 0.9
"""


def ran(tmp_path: Path, *words: str) -> str:
    told = subprocess.run([sys.executable, *words], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stdout + told.stderr
    return told.stdout + told.stderr


def launched(tmp_path: Path, *words: str, workers: int = 2) -> str:
    (tmp_path / "script.py").write_text(SCRIPT)
    return ran(
        tmp_path, *("-m", "paceline", "run", "script.py", "--workers", str(workers), "--dir", "run", "--"), *words
    )


def accuracy(tmp_path: Path) -> float:
    return float(json.loads((tmp_path / "run" / "result.json").read_text())["metrics"]["accuracy"])


@pytest.mark.parametrize("scheme", ["async", "sync", "allreduce", "averaging", "hogwild"])
def test_a_launched_script_keeps_its_state_on_the_gpu_and_survives_a_kill(scheme: str, tmp_path: Path) -> None:
    told = launched(tmp_path, scheme, "dies")
    assert (tmp_path / "died").exists()
    assert f"cells on cuda, server on {'none' if scheme in ('allreduce', 'averaging') else 'cuda'}" in told
    assert accuracy(tmp_path) > 0.9


@pytest.mark.parametrize("words", [("async", "adam"), ("allreduce", "adam", "half")])
def test_the_scripts_own_optimizer_and_autocast(words: tuple[str, ...], tmp_path: Path) -> None:
    launched(tmp_path, *words)
    assert accuracy(tmp_path) > 0.9


def test_a_script_by_itself(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    assert "by itself" in ran(tmp_path, "script.py", "async")
