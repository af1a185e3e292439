"""Gradients that travel to a server of another node while the rest of them is computed: bits, misforecasts, deaths."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import beds.commands
import pytest
from nodes import nodes
from processes import Story, finished, leaving_nothing, run

from paceline import replay, simulate
from paceline.network.calls import early_push
from paceline.network.calls.early_push import EarlyPush
from paceline.runtime import gradient_forecast
from paceline.runtime.gradient_forecast import GradientForecast
from paceline.schemes.sync import SyncSGD
from paceline.worker import Worker

STEPS = 40
TASK = "digits-mlp"


@pytest.fixture(autouse=True)
def used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], int]:
    """Gradients of small models travel early too. Gives how many calls of workers brought only the rest of one."""
    monkeypatch.setattr(early_push, "SMALLEST", 0)
    monkeypatch.setattr(early_push, "CHUNK", 500)
    original = EarlyPush.rest

    def noting(self: EarlyPush, shard: int, wire: Any, pieces: Any) -> Any:
        rest = original(self, shard, wire, pieces)
        if sum(size for _, size in rest) < sum(size for _, size in pieces):
            with (tmp_path / "used").open("a") as file:
                file.write(".")
        return rest

    monkeypatch.setattr(EarlyPush, "rest", noting)
    return lambda: len((tmp_path / "used").read_text()) if (tmp_path / "used").exists() else 0


def trained(directory: Path, scheme: Any = "sync", *, tls: Any = None, **settings: Any) -> Story:
    with leaving_nothing(), nodes(certificates=tls) as made:
        return run(directory, TASK, scheme, summaries=False, launcher=made.launcher, **({"steps": STEPS} | settings))


@pytest.mark.parametrize(("servers", "encrypted"), [(1, False), (2, False), (1, True)])
def test_gradients_that_travel_early_have_the_bits_of_those_that_do_not(
    servers: int, encrypted: bool, tmp_path: Path, used: Callable[[], int]
) -> None:
    tls = beds.commands.certificates(tmp_path) if encrypted else None
    result = finished(trained(tmp_path / "run", workers=2, servers=servers, tls=tls), STEPS)
    assert result.digest == simulate(TASK, "sync", workers=2, steps=STEPS).digest
    assert used() >= 2 * (STEPS - gradient_forecast.ENOUGH - 2)


@dataclass(frozen=True)
class Changing(SyncSGD, name="changing-sync"):
    """Changes a gradient now and then before it is pushed, and once throws one away."""

    async def step(self, w: Worker) -> None:
        w.x, w.v = await self.pull(w.next)
        g = await w.grad(w.x)
        if w.t in (10, 25):
            g *= 0.5
        if w.t == 17:
            g = 2 * await w.grad(w.x)
        await self.push(g, w.v, w.rank)
        w.next = w.v + 1


def test_a_gradient_that_is_not_pushed_as_it_was_sent_is_sent_again(
    tmp_path: Path, used: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gradient_forecast, "PAUSE", 1)
    original = GradientForecast.missed

    def missed(self: GradientForecast) -> None:
        (tmp_path / f"missed-{os.getpid()}").touch()
        original(self)

    monkeypatch.setattr(GradientForecast, "missed", missed)
    result = finished(trained(tmp_path / "run", Changing(), workers=2), STEPS)
    assert result.digest == simulate(TASK, Changing(), workers=2, steps=STEPS).digest
    assert len(list(tmp_path.glob("missed-*"))) == 2
    assert used() > STEPS / 2


@pytest.mark.parametrize("scheme", ["async", "sync"])
def test_a_worker_that_is_killed_inside_a_gradient_breaks_nothing(
    scheme: str, tmp_path: Path, used: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server has a part of its gradient, where its last one was."""
    original = EarlyPush.final
    mark = tmp_path / "died"

    def deadly(self: EarlyPush, index: int, version: int) -> None:
        original(self, index, version)
        if 0 < index < 2400 and used() > 20 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(EarlyPush, "final", deadly)
    result = finished(trained(tmp_path / "run", scheme, workers=2, steps=80), 80, over=8)
    assert result.restarts == 1
    assert replay(tmp_path / "run").match


def test_a_killed_server_gets_the_whole_gradient(tmp_path: Path, used: Callable[[], int]) -> None:
    story = trained(tmp_path / "run", "async", workers=2, steps=400, kills=["server:0", "server:0"])
    assert finished(story, 400, over=8).restarts == 2
    assert replay(tmp_path / "run").match
    assert used() > 100
