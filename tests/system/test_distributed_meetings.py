"""Meetings over connections: the bits of the simulator, deaths at any point, replay. Data: scikit-learn's digits."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from processes import Linger, Story, finished, leaving_nothing, run

from paceline import replay, simulate
from paceline.config.validate import planned
from paceline.errors import UsageError
from paceline.hook import Hook, Session
from paceline.network.means import mean_rooms
from paceline.network.means.distributed import DistributedMeans
from paceline.network.means.group import Broken
from paceline.network.means.group_formation import PendingMean
from paceline.network.means.partial_meetings import PartialMeetings
from paceline.processes.memory.run_memory import RunMemory
from paceline.processes.roles.checkpointing import Checkpointing
from paceline.processes.supervisor.status import Status
from paceline.runs import checkpoint

STEPS = 60
SCHEMES = pytest.mark.parametrize("scheme", ["d-psgd", "sgp"])


@pytest.fixture(autouse=True)
def pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A vector travels in several messages; processes are forks and see it too."""
    monkeypatch.setattr(mean_rooms, "SLICE", 1000)


def trained(directory: Path, scheme: str, steps: int = STEPS, **settings: Any) -> Story:
    chosen = {"workers": 3, "steps": steps, "collective": "tcp", "summaries": False} | settings
    with leaving_nothing():
        return run(directory, "digits-mlp", scheme, **chosen)


def digest(scheme: str, **hyper: Any) -> str:
    return simulate("digits-mlp", scheme, workers=3, steps=STEPS, **hyper).digest


@pytest.mark.parametrize(
    ("scheme", "hyper"),
    [
        ("d-psgd", {"order": "atc"}),
        ("d-psgd", {"topology": "full"}),
        ("d-psgd", {"topology": "alone"}),
        ("sgp", {"overlap": True}),
        ("ad-psgd", {}),
        ("ad-psgd", {"pairs": "bipartite"}),
        ("gosgd", {"p": 0.6}),
        ("gosgd", {"p": 0.6, "compress": "int8"}),
    ],
)
def test_a_run_has_the_bits_of_the_simulator(scheme: str, hyper: dict[str, Any], tmp_path: Path) -> None:
    own = {name: value for name, value in hyper.items() if name != "compress"}
    story = trained(tmp_path / "run", scheme, hyper=own, compress=hyper.get("compress"))
    assert finished(story, STEPS).digest == digest(scheme, **hyper)
    assert replay(tmp_path / "run").match


@pytest.mark.parametrize("scheme", ["d-psgd", "sgp", "ad-psgd", "gosgd"])
def test_a_killed_worker_joins_again_and_the_run_can_be_repeated(scheme: str, tmp_path: Path) -> None:
    kills = ["worker:1", "chief", "worker:2", "worker:1"]
    result = finished(trained(tmp_path / "run", scheme, 300, kills=kills), 300)
    assert result.restarts == len(kills)
    told = replay(tmp_path / "run")
    assert told.match, told.difference
    assert told.digest == result.digest


def _strike(monkeypatch: pytest.MonkeyPatch, method: str, rank: int, index: int, mark: Path, act: Any) -> None:
    """Once, at a meeting of this number, have a worker do something of its own before a method."""
    plain = getattr(DistributedMeans, method)

    def struck(self: DistributedMeans, meeting: PendingMean, *rest: Any) -> Any:
        if self.rank == rank and (meeting.circle.done or 0) + 1 == index and not mark.exists():
            mark.touch()
            act()
        return plain(self, meeting, *rest)

    monkeypatch.setattr(DistributedMeans, method, struck)


@SCHEMES
@pytest.mark.parametrize(("rank", "index"), [(2, 20), (0, STEPS)])
def test_a_worker_that_has_missed_the_end_of_a_meeting_has_its_vectors(
    scheme: str, rank: int, index: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missed() -> None:
        raise Broken  # as if a connection had broken when the others were through already

    _strike(monkeypatch, "_had", rank, index, tmp_path / "struck", missed)
    result = finished(trained(tmp_path / "run", scheme), STEPS)
    assert (tmp_path / "struck").exists()
    assert result.digest == digest(scheme)


@SCHEMES
@pytest.mark.parametrize(("method", "rank"), [("_begin", 0), ("_complete", 2), ("_had", 2), ("_had", 0)])
def test_a_death_at_any_point_of_a_meeting_is_survived_and_repeated(
    scheme: str, method: str, rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = tmp_path / "gate"

    def watch(status: Status) -> None:
        if any(role.restarts for role in status.roles):
            gate.touch()

    _strike(monkeypatch, method, rank, 20, tmp_path / "struck", lambda: os.kill(os.getpid(), signal.SIGKILL))
    story = trained(tmp_path / "run", scheme, 100, watch=watch, hooks=[Linger(gate, 40)])
    assert finished(story, 100).restarts == 1
    told = replay(tmp_path / "run")
    assert told.match, told.difference


def _strike_partial(monkeypatch: pytest.MonkeyPatch, method: str, rank: int, step: int, mark: Path, act: Any) -> None:
    """Once, at its meeting among some at this step or the first one after it, have a worker do something before or
    after a method."""
    name, _, after = method.partition(" ")
    plain = getattr(PartialMeetings, name)

    def struck(self: PartialMeetings, *given: Any, **named: Any) -> Any:
        result = plain(self, *given, **named) if after else None
        if self._rank == rank and self._at[1] >= step and not mark.exists():
            mark.touch()
            act(self)
        return result if after else plain(self, *given, **named)

    monkeypatch.setattr(PartialMeetings, name, struck)


IN_GROUPS = pytest.mark.parametrize(("scheme", "hyper"), [("ad-psgd", {}), ("gosgd", {"p": 0.6})])


@IN_GROUPS
@pytest.mark.parametrize(("method", "rank"), [("_count", 0), ("_count after", 1), ("_take", 2), ("_take after", 0)])
def test_a_connection_that_breaks_inside_a_meeting_among_some_costs_nothing(
    scheme: str, hyper: dict[str, Any], method: str, rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut(meetings: PartialMeetings) -> None:
        for peer in meetings._links:
            if peer.link is not None:
                peer.link.channel._connection.shutdown(socket.SHUT_RDWR)

    _strike_partial(monkeypatch, method, rank, 20, tmp_path / "struck", cut)
    result = finished(trained(tmp_path / "run", scheme, hyper=hyper), STEPS)
    assert (tmp_path / "struck").exists()
    assert result.digest == digest(scheme, **hyper)


@IN_GROUPS
@pytest.mark.parametrize(
    ("method", "rank"), [("arrive after", 1), ("_connected", 0), ("_count", 2), ("_count after", 1), ("leave after", 0)]
)
def test_a_death_at_any_point_of_a_meeting_among_some_is_survived_and_repeated(
    scheme: str, hyper: dict[str, Any], method: str, rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = tmp_path / "gate"

    def watch(status: Status) -> None:
        if any(role.restarts for role in status.roles):
            gate.touch()

    strike = _strike_partial
    strike(monkeypatch, method, rank, 20, tmp_path / "struck", lambda _: os.kill(os.getpid(), signal.SIGKILL))
    story = trained(tmp_path / "run", scheme, 100, watch=watch, hooks=[Linger(gate, 40)], hyper=hyper)
    assert finished(story, 100).restarts == 1
    told = replay(tmp_path / "run")
    assert told.match, told.difference


FAR = 2000  # steps: workers that do not wait for each other must not be through before the chief has named one


class Behind(Hook):
    """The chief waits until the others are many steps ahead, and asks for a checkpoint, or for the end; only then do
    the others go on. One that is late sees by the other's steps that the chief has asked."""

    def __init__(self, what: str) -> None:
        self.what = what

    def before_step(self, session: Session) -> None:
        memory: RunMemory = session._memory  # type: ignore[attr-defined]
        board, worker = memory.board, session.worker
        if worker.rank and worker.t == 30:
            asked = ("snapshot", "halt")
            self._wait(memory, lambda: any(map(board.get, asked)) or board.get("goal") < FAR or max(board.t) > 30)
        if worker.rank == 0 and worker.t == 5:
            self._wait(memory, lambda: min(board.t[1:]) >= 30)
            if self.what == "save":
                session.save()
            else:
                session.stop("enough")

    def _wait(self, memory: RunMemory, ready: Callable[[], bool]) -> None:
        assert any(memory.wakeup.wait(ready, 0.005) for _ in range(4000))


@pytest.mark.parametrize("what", ["save", "stop"])
def test_a_step_that_workers_have_passed_before_they_heard_of_it_is_named_once_more(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Checkpointing, "ahead", lambda self: [self._reached()])  # the news from others is late
    story = trained(tmp_path / "run", "gosgd", FAR, hooks=[Behind(what)], hyper={"p": 0.0}, checkpoint_steps=2 * FAR)
    assert story.result is not None, story.error
    found = checkpoint.steps(story.directory.checkpoints)
    for step in found:
        saved = checkpoint.of_step(story.directory.checkpoints, step)
        assert {int(saved.tensors[f"person.{rank}"][0]) for rank in range(3)} == {step}
    assert any(30 <= step < FAR for step in found)
    assert not story.told("stopped inside a step")


@pytest.mark.parametrize(("scheme", "collective"), [("ad-psgd", "gloo"), ("gosgd", "gloo"), ("sgp", "gloo")])
def test_meetings_that_connections_cannot_carry_are_refused_before_the_run(scheme: str, collective: str) -> None:
    with pytest.raises(UsageError, match=f"{scheme}: workers cannot meet by --collective {collective}"):
        planned("digits-mlp", scheme, workers=3, collective=collective)
