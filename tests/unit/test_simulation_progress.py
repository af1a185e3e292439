"""The bar of a simulation on a terminal."""

from __future__ import annotations

import io
import re
import threading

import pytest
from rich.console import Console

from paceline.api import simulate as module
from paceline.api.simulate import simulate
from paceline.report import simulation_progress
from paceline.report.simulation_progress import progress


def console(file: io.StringIO, *, terminal: bool = True) -> Console:
    return Console(file=file, force_terminal=terminal, width=80, _environ={"TERM": "xterm-256color"})


def shown(file: io.StringIO) -> list[str]:
    text = re.sub(r"\x1b\[[0-?]*[ -/]*[@-~]", "", file.getvalue())
    return [line.rstrip() for line in re.split(r"[\r\n]", text) if line.strip()]


@pytest.mark.parametrize("scheme", ["async", "allreduce"])
def test_it_fits_eighty_columns_and_starts_no_thread(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulation_progress, "EVERY", 0.0)
    file, threads = io.StringIO(), threading.active_count()
    with progress(console(file), f"{scheme} on digits-mlp") as watch:
        simulate("digits-mlp", scheme, workers=4, steps=30, watch=watch)
        assert threading.active_count() == threads
    lines = [line for line in shown(file) if "loss" in line]
    assert len(lines) >= 30
    assert all(len(line) <= 80 and "…" not in line for line in lines)
    last = lines[-1]
    assert last.startswith(f"{scheme} on digits-mlp")
    assert "100%" in last
    assert "epoch" in last
    assert ("staleness" in last) == (scheme == "async")


def test_no_bar_in_a_file() -> None:
    file = io.StringIO()
    with progress(console(file, terminal=False), "title") as watch:
        assert watch is None
    assert not file.getvalue()


def test_simulate_draws_it_unless_the_caller_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulation_progress, "EVERY", 0.0)
    file = io.StringIO()
    monkeypatch.setattr(module, "Console", lambda **_: console(file))
    simulate("toy", "async", steps=3, watch=lambda _: None)
    assert not file.getvalue()
    simulate("toy", "async", steps=3, hooks=["log:every=1"])
    assert any(line.startswith("async on toy") for line in shown(file))
