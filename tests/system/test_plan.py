"""`paceline plan` from the command line: real gradients to a target, and forecasts beside real runs of this machine."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import Commands, paceline  # noqa: F401  a fixture

from paceline.planning import check


def test_a_plan_with_a_target_and_a_check(
    paceline: Commands,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # every run of a check starts an interpreter of its own, and only the order of magnitude is looked at
    monkeypatch.setattr(check, "ROUNDS", 1)
    monkeypatch.setattr(check, "SECONDS", 0.3)
    words = ["--schemes", "allreduce,async", "--workers", "2,4", "--target", "accuracy=0.8", "--budget", "2"]
    plan = ["plan", "digits-mlp", *words, "--no-sensitivity", "--check", "--dir", "plan"]
    found = paceline(*plan, "--json").json
    cells = {(one["scheme"], one["workers"]): one for one in found["cells"]}
    assert cells.keys() == {(scheme, workers) for scheme in ("allreduce", "async") for workers in (2, 4)}
    for one in cells.values():
        assert one["known"] in ("simulated", "at least")
        assert one["seconds"] * one["rate"] / one["samples"] - 1 < 1e-9
    assert {one["scheme"] for one in found["check"]} == {"allreduce", "async"}
    for one in found["check"]:  # others may use this machine meanwhile: the order of magnitude
        assert 0.1 < one["forecast"] / one["measured"] < 10
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "plan" / "cells").iterdir()}
    assert kept

    again = paceline(*[word for word in plan if word != "--check"])  # real gradients are not simulated again
    assert again.code == 0
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "plan" / "cells").iterdir()} == kept
    assert "samples per second" in again.out
    assert max(map(len, again.out.splitlines())) <= 200
    assert str(tmp_path / "plan" / "report.html") in again.err
