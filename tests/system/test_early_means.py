"""Gradients that travel while the rest of them is computed: the bits, forecasts that do not come true, and deaths."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from beds.commands import certificates
from processes import Story, finished, leaving_nothing, run

from paceline import replay, simulate
from paceline.config.endpoint import Endpoint
from paceline.network.means import mean_rooms
from paceline.network.means.distributed import DistributedMeans
from paceline.network.means.tcp_group import TcpGroup
from paceline.processes.supervisor.supervisor import Supervisor
from paceline.runtime import gradient_forecast
from paceline.runtime.gradient_forecast import GradientForecast
from paceline.scheme import Scheme, State, Vector
from paceline.worker import Worker

STEPS = 40


@pytest.fixture(autouse=True)
def slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """The vectors of small models count as large, and have several slices."""
    monkeypatch.setattr(mean_rooms, "SMALL", 0)
    monkeypatch.setattr(mean_rooms, "SLICE", 200)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], int]:
    """How often workers have begun a mean early, have come to it, and have come to another one."""

    def count(owner: Any, name: str, label: str) -> None:
        original = getattr(owner, name)

        def noting(self: Any, *args: Any) -> Any:
            found = original(self, *args)
            if label != "begun" or found is not None:
                with (tmp_path / label).open("a") as file:
                    file.write(".")
            return found

        monkeypatch.setattr(owner, name, noting)

    count(TcpGroup, "open_early", "begun")
    count(TcpGroup, "commit", "used")
    count(GradientForecast, "missed", "missed")
    return lambda label: len((tmp_path / label).read_text()) if (tmp_path / label).exists() else 0


def trained(directory: Path, scheme: Any = "allreduce", **settings: Any) -> Story:
    with leaving_nothing():
        return run(directory, "digits-mlp", scheme, steps=STEPS, summaries=False, collective="tcp", **settings)


@pytest.mark.parametrize("encrypted", [False, True])
def test_gradients_that_travel_early_have_the_bits_of_those_that_do_not(
    encrypted: bool, tmp_path: Path, counted: Callable[[str], int]
) -> None:
    node = Endpoint(certificates=certificates(tmp_path) if encrypted else None)
    launcher: Any = lambda *given, **more: Supervisor(*given, node=node, **more)  # noqa: E731
    result = finished(trained(tmp_path / "run", workers=3, launcher=launcher), STEPS)
    assert result.digest == simulate("digits-mlp", "allreduce", workers=3, steps=STEPS).digest
    assert counted("used") == counted("begun") == 3 * (STEPS - gradient_forecast.ENOUGH)
    assert not counted("missed")


@dataclass(frozen=True)
class Changing(Scheme, name="changing"):
    """Its gradients go to a mean as they are, for a while; then one is changed, one goes with another weight, one goes
    nowhere, and one comes after the mean of something else."""

    def worker(self, x0: Vector, workers: int) -> State:
        return State(x=x0)

    async def step(self, w: Worker) -> None:
        g = await w.grad(w.x)
        if w.t == 10:
            g *= 0.5
        if w.t == 20 and w.rank == 1:
            g[-3:] = 0.0
        if w.t == 25:
            g = await w.grad(w.x)
        if w.t == 30:
            await w.mean(torch.ones(10))
        g = await w.mean(g, weight=2.0 if w.t == 35 else 1.0)
        w.x -= 0.1 * g
        w.v += 1


def test_a_gradient_that_is_not_used_as_it_was_sent_is_sent_again(
    tmp_path: Path, counted: Callable[[str], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gradient_forecast, "PAUSE", 1)
    result = finished(trained(tmp_path / "run", Changing(), workers=2), STEPS)
    assert result.digest == simulate("digits-mlp", Changing(), workers=2, steps=STEPS).digest
    assert counted("missed") >= 4
    assert counted("used") > STEPS / 2


def test_a_worker_that_is_killed_inside_a_gradient_breaks_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has sent a part of its gradient, and the others have added that up."""
    original = DistributedMeans.early

    def deadly(self: DistributedMeans, v: Vector) -> Any:
        final = original(self, v)
        if final is None or self.rank != 1:
            return final

        def told(index: int, version: int) -> None:
            assert final is not None
            final(index, version)
            mark = tmp_path / f"died-{self._board.t[1] // 15}"
            if 0 < index < v.numel() and self._board.t[1] % 15 == 10 and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)

        return told

    monkeypatch.setattr(DistributedMeans, "early", deadly)
    result = finished(trained(tmp_path / "run", workers=3, quorum="hold"), STEPS)
    assert result.restarts == 2
    assert replay(tmp_path / "run").match
