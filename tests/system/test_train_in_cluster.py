"""`train_and_evaluate` in a program that every task of a cluster runs, as the guides of TensorFlow 1 have it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

from processes import children

PROGRAM = """
import torch
from torch import nn
from paceline import EvalSpec, TrainSpec, TorchTask, train_and_evaluate

x = torch.randn(256, 4, generator=torch.Generator().manual_seed(0))
data = torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long())
task = TorchTask(lambda: nn.Linear(4, 2), nn.functional.cross_entropy, data, data, batch=16, name="sums")
spec = TrainSpec(task, "sync", max_steps=300, hyper={"lr": 0.5})  # async might be done before the worker has come
result = train_and_evaluate(spec, EvalSpec(), directory="run")
print("loss", result.metrics["loss"], result.workers, result.servers)
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_every_task_runs_the_same_program_and_the_chief_has_the_result(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    cluster = {kind: [f"localhost:{free_port()}"] for kind in ("chief", "worker", "ps")}
    before, tasks = set(children()), {}
    for kind in ("ps", "worker", "chief"):
        config = json.dumps({"cluster": cluster, "task": {"type": kind, "index": 0}})
        environment = os.environ | {"TF_CONFIG": config, "PACELINE_SECRET": "ab" * 32}
        tasks[kind] = subprocess.Popen(
            [sys.executable, "program.py"],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    told = {kind: (*task.communicate(timeout=120), task.returncode) for kind, task in tasks.items()}
    assert [code for *_, code in told.values()] == [0, 0, 0], told
    word, loss, workers, servers = told["chief"][0].split()
    assert (word, workers, servers) == ("loss", "2", "1")
    assert float(loss) < 0.4
    assert "joined the run" in told["worker"][1]
    assert "loss" not in told["worker"][0]
    assert (tmp_path / "run" / "best").is_dir()
    assert set(children()) <= before
