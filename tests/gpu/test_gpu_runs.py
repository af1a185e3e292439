"""Runs whose state is in the memory of a GPU: kills, checkpoints, exact digests, replays, memory that is given back.

Data: scikit-learn's digits.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import finished, leaving_nothing, run

from paceline.hook import Hook, Role, Session
from paceline.runs import checkpoint

STEPS = 400
GPU = {"device": "cuda", "summaries": False, "checkpoint_seconds": 0.5}
KILLS = ("worker:1", "server:0", "worker:1", "chief", "worker:1")
SERVERLESS = ("worker:1", "chief", "worker:1", "worker:1")
CASES: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "async": (KILLS, {}),
    "sync": (KILLS, {}),
    "allreduce": (SERVERLESS, {}),
    "agn": (KILLS, {"hyper": {"window": 4}}),
    "aeasgd": (KILLS, {"hyper": {"window": 4}}),
    "averaging": (SERVERLESS, {"hyper": {"window": 4}}),
    "groups": (KILLS, {"workers": 4}),
    "sgd": (("chief",) * 3, {"workers": 1}),
}
UNRECORDED = {"hogwild": (KILLS, {})}


class WhereIsTheState(Hook):
    """Says on which device the worker's cells and the server's vector are."""

    roles: frozenset[Role] = frozenset({"chief"})

    def begin(self, session: Session) -> None:
        memory = session._memory  # type: ignore[attr-defined]
        server = memory.server_state().x.device.type if memory.scheme.methods else "none"
        session.say(f"cells on {session.worker.state.x.device.type}, server on {server}")


def command(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "paceline", *words], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("scheme", CASES | UNRECORDED)
def test_every_role_is_killed_and_the_run_is_replayed(scheme: str, tmp_path: Path) -> None:
    kills, settings = (CASES | UNRECORDED)[scheme]
    settings = {"workers": 2, "steps": STEPS} | GPU | settings
    with leaving_nothing():
        story = run(
            tmp_path / "run", "digits-mlp", scheme, kills=kills, first=10, hooks=[WhereIsTheState()], **settings
        )
    result = finished(story, STEPS, over=1 if scheme == "hogwild" else 0)
    assert result.restarts == len(kills)
    assert story.told("cells on cuda", "server on none" if kills == SERVERLESS or scheme == "sgd" else "server on cuda")
    assert result.metrics["accuracy"] > 0.8
    if scheme in CASES:
        told = command("replay", str(story.directory.path))
        assert told.returncode == 0, told.stdout + told.stderr


@pytest.mark.parametrize("scheme", ["sync", "allreduce", "averaging"])
def test_an_exact_run_has_one_digest_with_and_without_kills(scheme: str, tmp_path: Path) -> None:
    def digest(name: str, workers: int, kills: tuple[str, ...] = ()) -> str:
        hyper = {"window": 2} if scheme == "averaging" else {}
        settings = GPU | {"exact": True, "batch": 50, "steps": 60, "workers": workers, "hyper": hyper}
        story = run(tmp_path / name, "digits-mlp", scheme, kills=kills, first=10, **settings)
        return finished(story, 60).digest

    expected = digest("one", 1)
    assert digest("two", 2) == expected
    assert digest("four", 4, ("worker:1", "chief")) == expected


def test_a_run_is_resumed_with_the_same_bits(tmp_path: Path) -> None:
    settings = GPU | {"workers": 2, "exact": True, "batch": 50}
    whole = finished(run(tmp_path / "whole", "digits-mlp", "allreduce", steps=60, **settings), 60)
    finished(run(tmp_path / "parts", "digits-mlp", "allreduce", steps=25, **settings), 25)
    resumed = finished(run(tmp_path / "parts", "digits-mlp", "allreduce", steps=60, resume=True, **settings), 60)
    assert resumed.digest == whole.digest
    saved = checkpoint.newest(tmp_path / "parts" / "checkpoints", lambda _: None)
    assert saved is not None
    assert all(tensor.device.type == "cpu" for tensor in saved.tensors.values())


def test_several_servers_work_on_the_host(tmp_path: Path) -> None:
    settings = GPU | {"workers": 2, "servers": 2, "steps": 100}
    story = run(tmp_path / "run", "digits-mlp", "async", hooks=[WhereIsTheState()], **settings)
    finished(story, 100)
    assert story.told("cells on cuda", "server on cpu")
    assert command("replay", str(story.directory.path)).returncode == 0


def test_the_memory_is_given_back(tmp_path: Path, gpu_memory: Callable[[], int]) -> None:
    before = gpu_memory()
    finished(run(tmp_path / "run", "digits-mlp", "async", workers=2, steps=50, **GPU), 50)
    assert gpu_memory() <= before + 16
    assert not torch.cuda.is_initialized()  # nothing in the launcher has started CUDA
