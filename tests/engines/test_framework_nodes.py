"""Tasks of other frameworks on several nodes over loopback: roles are killed and come back, and the run repeats."""

from __future__ import annotations

import importlib
import importlib.util
import shlex
from pathlib import Path

import pytest
from framework_shells import LIMIT, all_end, begin
from processes import until
from shells import linger, result_of, shells, updates_of

import paceline

ROLES = ("chief:0", "worker:0", "worker:1", "ps:0")


@pytest.mark.parametrize("framework", ["jax", "keras", "tensorflow"])
def test_killed_roles_come_back_and_the_run_repeats(framework: str, tmp_path: Path) -> None:
    for module in (framework, "tensorflow" if framework == "keras" else framework):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    file = tmp_path / "digits_task.py"
    file.write_text(importlib.import_module(f"test_{framework}_task").FILE)
    gate, waits = linger(tmp_path)
    words = f"train {file}:make --scheme async lr=0.1 --steps 400 --checkpoint-every 20 --no-summaries --dir run"
    with shells(tmp_path) as made:
        begin(lambda name, **told: made(name, *shlex.split(words), *waits, **told), tmp_path, ROLES)
        until(lambda: updates_of(tmp_path / "run") >= 40, LIMIT, f"it trains: {made.said()}")
        for role in ("worker:1", "server:0", "chief"):
            made.kill_role(role)
        gate.touch()
        all_end(made)
    result = result_of(tmp_path / "run")
    assert (result["workers"], result["servers"], result["updates"], result["restarts"]) == (3, 1, 400, 3)
    assert result["metrics"]["accuracy"] > 0.6
    assert paceline.replay(tmp_path / "run").match
