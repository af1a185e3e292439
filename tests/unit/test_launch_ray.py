"""What would be asked of Ray, and how the crew is followed, with a Ray that only plays back; the real: engines/."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.errors import RunError, UsageError
from paceline.launcher import Job
from paceline.launchers import _ray_actors
from paceline.launchers._ray_actors import RayTasks
from paceline.launchers.ray import RayLauncher

TASKS = ("chief", "worker:0", "server:0")
SECRET = bytes(range(32))


def job(said: list[str] | None = None, **options: str) -> Job:
    return Job(
        command=("paceline", "train", "digits-mlp", "--dir", "/runs/a"),
        tasks=TASKS,
        directory=Path("/runs/a"),
        name="a",
        options=options,
        threads=2,
        gpus=1,
        secret=SECRET,
        say=(lambda text: None) if said is None else said.append,
    )


def test_everything_but_the_secret_is_shown() -> None:
    text = RayLauncher().shown(job(strategy="spread", memory="2G", address="10.0.0.1:6379"))
    assert "ray: 10.0.0.1:6379" in text
    gpus, none = "2 bundles of CPU 2, GPU 1, memory 2.14748e+09", "1 bundles of CPU 2, memory 2.14748e+09"
    assert f"SPREAD, {gpus}; {none}" in text  # a server needs no GPU
    assert "actor 1: PACELINE_TASK=worker:0 PACELINE_CLUSTER=chief=1,worker=1,server=1" in text
    assert "command: paceline train digits-mlp --dir /runs/a" in text
    assert SECRET.hex() not in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "heap"}, "Ray places by pack or spread"),
        ({"restarts": "many"}, "--engine restarts=many: a whole number"),
        ({"memory": "lots"}, "--engine memory=lots: an amount of memory"),
    ],
)
def test_wrong_settings_are_refused(options: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        RayLauncher().launch(job(**options))


def test_a_placement_policy_is_a_strategy() -> None:
    assert "SPREAD" in RayLauncher().shown(job(placement="spread"))


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match=re.escape("pip install 'paceline[ray]'")):
        RayLauncher().launch(job())


class ActorDied(Exception):
    pass


class TaskFailed(Exception):
    def __init__(self, cause: Exception) -> None:
        super().__init__("a long traceback")
        self.cause = cause


class Actor:
    """Answers by a list for each method; an exception in it is raised where the answer is asked for."""

    def __init__(self, script: dict[str, list[Any]]) -> None:
        self.script, self.calls = script, []

    def __getattr__(self, name: str) -> Any:
        def remote(*arguments: Any) -> tuple[Actor, str, int]:
            self.calls.append((name, arguments))
            return self, name, len(self.calls)

        return SimpleNamespace(remote=remote)

    def answer(self, name: str) -> Any:
        given = self.script[name].pop(0) if self.script.get(name) else {"start": 1, "heard": ([], None)}[name]
        if isinstance(given, Exception):
            raise given
        return given

    def starts(self) -> list[dict[str, str]]:
        return [arguments[1] for name, arguments in self.calls if name == "start"]


class Ray:
    """As much of Ray as the crew needs."""

    exceptions = SimpleNamespace(RayActorError=ActorDied, RayTaskError=TaskFailed, RayError=Exception)
    util = SimpleNamespace(scheduling_strategies=SimpleNamespace(PlacementGroupSchedulingStrategy=lambda **_: None))

    def __init__(self, *actors: Actor) -> None:
        self._waiting, self._looks = list(actors), 0

    def remote(self, _: type) -> Any:
        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda: self._waiting.pop(0)))

    def wait(self, asked: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        self._looks += 1
        assert self._looks < 1000, "the crew is followed for ever"
        return asked, []

    def get(self, reference: Any) -> Any:
        return reference[0].answer(reference[1])


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time goes a second at every look; nobody sleeps."""
    now = iter(range(10**9))
    monkeypatch.setattr(
        _ray_actors, "time", SimpleNamespace(monotonic=lambda: float(next(now)), sleep=lambda seconds: None)
    )


def crew(
    *scripts: dict[str, list[Any]], restarts: int = 3, said: list[str] | None = None
) -> tuple[RayTasks, list[Actor]]:
    actors = [Actor(script) for script in scripts]
    return RayTasks(Ray(*actors), job(said), None, [{"CPU": 1}] * 3, restarts), actors


def test_the_hubs_port_is_looked_for_in_the_range_and_none_left_is_told() -> None:
    made, (chief, *_) = crew({"address": [TaskFailed(OSError(98, "all ports 7-8 of h are in use"))]}, {}, {})
    made.job = replace(made.job, ports=(7, 8))
    with pytest.raises(RunError, match=r"chief cannot start: .*all ports 7-8 of h are in use"):
        made.followed()
    assert chief.calls == [("address", ((7, 8),))]


def test_the_chiefs_end_is_the_runs(capfd: pytest.CaptureFixture[str]) -> None:
    chief = {"address": [("10.0.0.1", 7)], "heard": [([("out", "a"), ("err", "b")], None), ([], 3)]}
    made, actors = crew(chief, {"heard": [([("out", "c")], 0)]}, {"heard": [([], 0)]})
    assert made.followed() == 3
    assert capfd.readouterr() == ("a\n", "b\nworker:0: c\n")
    assert [start["PACELINE_TASK"] for actor in actors for start in actor.starts()] == list(TASKS)
    assert {start["PACELINE_HUB"] for actor in actors for start in actor.starts()} == {"10.0.0.1:7"}


def test_a_worker_is_begun_again_where_the_hub_is() -> None:
    said: list[str] = []
    worker = {"heard": [ActorDied(), ([], -9), ([], 0)], "start": [1, ActorDied(), 1, 1]}
    made, actors = crew({"address": [("h", 7)], "heard": [([], None)] * 60 + [([], 0)]}, worker, {}, said=said)
    actors[2].script["heard"] = [([], None)] * 60 + [([], 0)]
    assert made.followed() == 0
    assert [start["PACELINE_HUB"] for start in actors[1].starts()] == ["h:7"] * 4  # one found the actor not yet back
    assert any("worker:0: its actor died" in text for text in said)
    assert any("worker:0: was killed by SIGKILL" in text for text in said)


@pytest.mark.parametrize(("back", "starts"), [(("h", 9), ["h:7"]), (("g", 9), ["h:7", "g:9"])])
def test_a_chief_that_moves_takes_the_others_along(back: tuple[str, int], starts: list[str]) -> None:
    chief = {"address": [("h", 7), back], "heard": [([], None)] * 5 + [ActorDied()] + [([], None)] * 40 + [([], 0)]}
    others: dict[str, list[Any]] = {"heard": [([], None)] * 60 + [([], 0)]}
    made, actors = crew(chief, others, {"heard": list(others["heard"])})
    assert made.followed() == 0
    assert [start["PACELINE_HUB"] for start in actors[1].starts()] == starts
    assert actors[0].starts()[-1]["PACELINE_HUB"] == starts[-1]


def test_who_dies_too_often_ends_the_run() -> None:
    made, _ = crew({"address": [("h", 7)]}, {"heard": [([], -9)] * 9}, {}, restarts=2)
    with pytest.raises(RunError, match="worker:0: was killed by SIGKILL; it has been restarted 2 times already"):
        made.followed()


def test_a_chief_that_fails_is_not_begun_again() -> None:
    made, actors = crew({"address": [("h", 7)], "heard": [([], 2)]}, {"heard": [([], 1)]}, {"heard": [([], 1)]})
    assert made.followed() == 2
    assert len(actors[0].starts()) == 1


def test_who_fails_with_the_run_is_not_begun_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_ray_actors, "TOGETHER", 1e9)  # however long the chief takes to say it
    said: list[str] = []
    chief = {"address": [("h", 7)], "heard": [([], None)] * 9 + [([], 1)]}
    made, actors = crew(chief, {"heard": [([], 1)]}, {"heard": [([], 1)]}, said=said)
    assert made.followed() == 1
    assert [len(actor.starts()) for actor in actors] == [1, 1, 1]
    assert said == []


def test_who_fails_alone_is_begun_again() -> None:
    chief = {"address": [("h", 7)], "heard": [([], None)] * 60 + [([], 0)]}
    made, actors = crew(chief, {"heard": [([], 1)] + [([], None)] * 70 + [([], 0)]}, {"heard": [([], 0)]})
    assert made.followed() == 0
    assert len(actors[1].starts()) == 2


def test_an_interrupt_is_handed_to_the_chief() -> None:
    made, actors = crew({"address": [("h", 7)], "heard": [([], None)] * 5 + [([], 130)]}, {}, {})
    for actor in actors[1:]:
        actor.script["heard"] = [([], None)] * 9 + [([], 0)]
    made.asked.count = 1
    assert made.followed() == 130
    assert ("tell", (2,)) in actors[0].calls
