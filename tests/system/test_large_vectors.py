"""Vectors so large that servers of other nodes send them from where they lie, and workers receive them where they stay.

Task: a quadratic bowl of 100,000 dimensions, so that a vector has 400 KB.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import beds.commands
import pytest
from nodes import nodes
from processes import finished, leaving_nothing, run

from paceline.api.simulate import simulate
from paceline.network.calls.tcp_client import TcpClient
from paceline.network.calls.tcp_connection import TcpConnection
from paceline.network.secure.channel import Closed
from paceline.processes.calls.zero_copy import LARGE, SMALLEST, PendingReplies, ReceiveBuffer
from paceline.runs.replay.replay import replay
from paceline.scheme import Scheme, State, Vector, on_server
from paceline.task import Task
from paceline.tasks.quadratic import quadratic
from paceline.worker import Worker

LENGTH = 100_000
STEPS = 60


@pytest.fixture(scope="module")
def bowl() -> Task:
    assert max(LARGE, SMALLEST) < 4 * LENGTH
    return quadratic(dim=LENGTH, noise=0.1)


class Count:
    """Something that processes count, each of them in a file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()

    def add(self) -> int:
        file = self.folder / str(os.getpid())
        with file.open("ab") as out:
            out.write(b"!")
        return file.stat().st_size

    @property
    def total(self) -> int:
        return sum(file.stat().st_size for file in self.folder.iterdir())


@pytest.fixture
def ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Count]:
    """How often an answer lay in the state, was copied after all, and was received where it stays."""
    found = {name: Count(tmp_path / name) for name in ("owed", "copied", "landed")}
    note, settle, landed = PendingReplies.note, PendingReplies.settle, TcpClient.landed

    def noting(self: PendingReplies, *given: Any) -> bool:
        return note(self, *given) and bool(found["owed"].add())

    def settling(self: PendingReplies) -> Iterator[Any]:
        for one in settle(self):
            found["copied"].add()
            yield one

    def landing(self: TcpClient, *given: Any) -> ReceiveBuffer | None:
        if (result := landed(self, *given)) is not None:
            found["landed"].add()
        return result

    monkeypatch.setattr(PendingReplies, "note", noting)
    monkeypatch.setattr(PendingReplies, "settle", settling)
    monkeypatch.setattr(TcpClient, "landed", landing)
    return found


def digest(task: Task, scheme: Any, workers: int, steps: int = STEPS, **hyper: Any) -> str:
    return simulate(task, scheme, workers=workers, steps=steps, **hyper).digest


@pytest.mark.parametrize(
    ("scheme", "settings"),
    [
        ("async", {"workers": 1}),
        ("agn", {"workers": 1, "hyper": {"window": 4}}),
        ("sync", {"workers": 3}),
        ("sync", {"workers": 2, "servers": 3, "hyper": {"rule": "momentum"}}),
    ],
)
def test_the_bits_are_those_of_the_simulator(
    tmp_path: Path, bowl: Task, ways: dict[str, Count], scheme: str, settings: dict[str, Any]
) -> None:
    with leaving_nothing(), nodes() as made:
        story = run(tmp_path / "run", bowl, scheme, steps=STEPS, launcher=made.launcher, **settings)
    assert finished(story, STEPS).digest == digest(bowl, scheme, settings["workers"], **settings.get("hyper", {}))
    assert ways["owed"].total >= STEPS
    assert ways["landed"].total >= STEPS - 10
    if settings["workers"] == 1:
        assert ways["copied"].total == 0  # who asks again has had what it asked for before


def test_one_worker_shares_the_servers_node_and_another_does_not(tmp_path: Path, bowl: Task) -> None:
    with leaving_nothing(), nodes(together=("server:0+worker:1",)) as made:
        story = run(tmp_path / "run", bowl, "sync", steps=STEPS, workers=3, launcher=made.launcher)
    assert finished(story, STEPS).digest == digest(bowl, "sync", 3)


def test_encrypted(tmp_path: Path, bowl: Task, ways: dict[str, Count]) -> None:
    with leaving_nothing(), nodes(certificates=beds.commands.certificates(tmp_path / "tls")) as made:
        story = run(tmp_path / "run", bowl, "sync", steps=STEPS, workers=2, launcher=made.launcher)
    assert finished(story, STEPS).digest == digest(bowl, "sync", 2)
    assert ways["landed"].total >= STEPS


def test_connections_that_break_inside_an_answer(
    tmp_path: Path, bowl: Task, ways: dict[str, Count], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every so often one ends with a part of the vector received, and the server is asked again."""
    receive, broken, large = TcpConnection._receive, Count(tmp_path / "broken"), Count(tmp_path / "large")

    def receiving(self: TcpConnection, into: memoryview) -> int:
        if len(into) > 300_000 and self.peer < 0 and large.add() % 7 == 3:  # of a worker, which knows no peer
            receive(self, into[:1000])
            broken.add()
            raise Closed("cut")
        return receive(self, into)

    monkeypatch.setattr(TcpConnection, "_receive", receiving)
    with leaving_nothing(), nodes() as made:
        story = run(tmp_path / "run", bowl, "sync", steps=STEPS, workers=2, launcher=made.launcher)
    assert finished(story, STEPS).digest == digest(bowl, "sync", 2)
    assert broken.total > 10
    assert ways["copied"].total > 0


@pytest.mark.parametrize("scheme", ["async", "sync"])
def test_every_role_dies_and_the_run_is_repeated_bit_for_bit(tmp_path: Path, bowl: Task, scheme: str) -> None:
    with leaving_nothing(), nodes() as made:
        story = run(
            tmp_path / "run",
            bowl,
            scheme,
            steps=400,
            workers=2,
            checkpoint_steps=50,
            kills=["server:0", "worker:1", "server:0", "chief", "server:0"],
            launcher=made.launcher,
        )
    finished(story, 400, over=2)
    assert replay(tmp_path / "run", task=bowl).match


@dataclasses.dataclass(frozen=True)
class Fickle(Scheme, name="fickle"):
    """Answers of different forms, so that nobody can know what comes."""

    lr: float = 0.1

    @on_server
    def exchange(self, s: State, g: Vector, t: int) -> Any:
        s.x.add_(g, alpha=-self.lr)
        s.v += 1
        match t % 4:
            case 0:
                return s.x[: LENGTH - 30_000]  # shorter than the last time
            case 1:
                return s.x, s.x * 2
            case 2:
                return t
            case _:
                return s.x

    async def step(self, w: Worker) -> None:
        g = await w.grad(w.x)
        got = await self.exchange(g, w.t)
        kept = [got] if isinstance(got, Vector) else list(got) if isinstance(got, tuple) else []
        if kept:
            w.x = w.x.clone()
            w.x[: kept[0].numel()] = kept[0]
            if len(kept) > 1:
                assert bool((kept[1] == kept[0] * 2).all())


def test_answers_of_another_form_than_the_last(tmp_path: Path, bowl: Task) -> None:
    with leaving_nothing(), nodes() as made:
        story = run(tmp_path / "run", bowl, Fickle(), steps=STEPS, workers=1, launcher=made.launcher)
    assert finished(story, STEPS).digest == digest(bowl, Fickle(), 1)
