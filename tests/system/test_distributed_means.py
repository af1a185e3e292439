"""Means over connections between real processes: the bits of shared memory and of the simulator, whichever worker dies.

Every test runs over our own connections (`tcp`) and over Gloo's. Data: scikit-learn's digits. Vectors are small, so
most tests run twice: as small ones are averaged, and, with the limit set to nothing, as large ones are.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import Linger, Story, finished, leaving_nothing, run
from test_kills_waiting import StaysAway

from paceline import replay, simulate
from paceline.config.validate import planned
from paceline.errors import SchemeError, UsageError
from paceline.hook import Hook
from paceline.network.means import group_formation, mean_rooms, process_group
from paceline.network.means.distributed import DistributedMeans
from paceline.network.means.group import Broken, Group
from paceline.network.means.group_formation import GroupFormation, PendingMean
from paceline.network.means.group_record import MeanGroup
from paceline.processes.supervisor.status import Status
from paceline.scheme import Scheme, State, Vector
from paceline.testing.collectives import Overlap
from paceline.worker import Worker

WAYS = ["tcp", pytest.param("gloo", marks=pytest.mark.skipif(not dist.is_gloo_available(), reason="no Gloo in torch"))]

STEPS = 60
LARGE = [pytest.param(False, id="small"), pytest.param(True, id="large")]


@pytest.fixture(autouse=True, params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How means are taken, unless a test says otherwise."""
    monkeypatch.setitem(DEFAULTS, "collective", request.param)
    return str(request.param)


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Whether vectors count as large; processes are forks and see it too."""
    if request.getfixturevalue("large"):
        monkeypatch.setattr(process_group, "SMALL", 0)
        monkeypatch.setattr(mean_rooms, "SMALL", 0)
        monkeypatch.setattr(mean_rooms, "SLICE", 1000)  # several pieces


DEFAULTS: dict[str, Any] = {"steps": STEPS, "summaries": False}


def trained(directory: Path, scheme: Any = "allreduce", task: str = "digits-mlp", **settings: Any) -> Story:
    with leaving_nothing():
        return run(directory, task, scheme, **(DEFAULTS | settings))


# the same bits


@pytest.mark.usefixtures("limit")
@pytest.mark.parametrize("large", LARGE)
@pytest.mark.parametrize(
    ("scheme", "hyper", "workers"),
    [
        ("allreduce", {}, 1),
        ("allreduce", {"rule": "adam", "lr": 0.01}, 3),
        ("averaging", {"window": 3}, 4),
        ("easgd", {"window": 2}, 2),
        ("groups", {"size": 3}, 3),
        ("sgd", {}, 1),
    ],
)
def test_a_run_has_the_bits_of_the_simulator_and_of_shared_memory(
    scheme: str, hyper: dict[str, Any], workers: int, large: bool, tmp_path: Path
) -> None:
    result = finished(trained(tmp_path / "run", scheme, workers=workers, hyper=hyper), STEPS)
    shared = finished(trained(tmp_path / "shared", scheme, workers=workers, hyper=hyper, collective="shared"), STEPS)
    expected = simulate("digits-mlp", scheme, workers=workers, steps=STEPS, **hyper)
    assert result.digest == shared.digest == expected.digest


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_exact_runs_have_their_bits_in_any_number_of_processes(workers: int, tmp_path: Path) -> None:
    plain = finished(trained(tmp_path / "shared", exact=True, micro=4, workers=1, collective="shared"), STEPS)
    result = finished(trained(tmp_path / "run", exact=True, micro=4, workers=workers), STEPS)
    assert result.digest == plain.digest


def test_an_exact_run_goes_back_when_somebody_dies_and_has_its_bits_all_the_same(tmp_path: Path) -> None:
    plain = finished(trained(tmp_path / "shared", exact=True, micro=4, workers=1, collective="shared"), STEPS)
    story = trained(
        tmp_path / "run", exact=True, micro=4, workers=2, checkpoint_steps=10, kills=["worker:1", "chief"], first=5
    )
    assert finished(story, STEPS).digest == plain.digest


@pytest.mark.usefixtures("limit")
@pytest.mark.parametrize("large", LARGE)
def test_lengths_weights_and_overlap_in_one_step(large: bool, tmp_path: Path) -> None:
    result = finished(trained(tmp_path / "run", Overlap(), workers=3), STEPS)
    assert result.digest == simulate("digits-mlp", Overlap(), workers=3, steps=STEPS).digest


@dataclass(frozen=True)
class Pairs(Scheme, name="pairs"):
    """Everybody meets every other one in turn, two at a time."""

    def worker(self, x0: Vector, workers: int) -> State:
        return State(x=x0)

    async def step(self, w: Worker) -> None:
        g = await w.grad(w.x)
        for turn in range(1, w.workers):
            other = w.rank ^ turn
            w.x = await w.mean(w.x, among=(min(w.rank, other), max(w.rank, other)))
        w.x -= 0.1 * g
        w.v += 1


def test_groups_of_two_are_kept_up_to_a_number_and_formed_again_beyond(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = simulate("digits-mlp", Pairs(), workers=4, steps=10)
    for most in (16, 2):  # of the three that each of them needs
        monkeypatch.setattr(group_formation, "MOST_GROUPS", most)
        story = trained(tmp_path / f"run-{most}", Pairs(), workers=4, steps=10)
        assert finished(story, 10).digest == expected.digest


@dataclass(frozen=True)
class Unequal(Scheme, name="unequal"):
    """Worker 1 brings more than the others, from its third step on."""

    def worker(self, x0: Vector, workers: int) -> State:
        return State(x=x0)

    async def step(self, w: Worker) -> None:
        await w.mean(torch.ones(100 if w.rank == 1 and w.t >= 2 else 10))
        g = await w.grad(w.x)
        g = await w.mean(g)
        w.x -= 0.1 * g
        w.v += 1


def test_vectors_of_different_lengths_are_refused_by_name(tmp_path: Path) -> None:
    story = trained(tmp_path / "run", Unequal(), workers=3)
    assert isinstance(story.error, SchemeError)
    assert "a mean of vectors of different lengths" in str(story.error)


# those who die, and those who come back


@pytest.mark.usefixtures("limit")
@pytest.mark.parametrize("large", LARGE)
@pytest.mark.parametrize("quorum", ["shrink", "hold"])
@pytest.mark.parametrize("scheme", ["allreduce", "averaging", "groups"])
def test_a_killed_worker_joins_again_and_the_run_can_be_repeated(
    scheme: str, quorum: str, large: bool, tmp_path: Path
) -> None:
    hyper = {"averaging": {"window": 3}, "groups": {"size": 3}}.get(scheme, {})
    kills = ["worker:1", "chief", "worker:2", "worker:1"]
    story = trained(
        tmp_path / "run", scheme, workers=3, steps=300, kills=kills, quorum=quorum, hyper=hyper, seed=2 * large
    )
    result = finished(story, 300)
    assert result.restarts == len(kills)
    assert max(story.standstill.values()) < 5.0
    told = replay(tmp_path / "run")
    assert told.match, told.difference
    assert told.digest == result.digest


@pytest.mark.parametrize("quorum", ["hold", "shrink"])
@pytest.mark.parametrize("scheme", ["groups", "allreduce"])
def test_the_others_hold_or_shrink_while_a_worker_is_away(scheme: str, quorum: str, tmp_path: Path) -> None:
    file, gate = tmp_path / "back", tmp_path / "gate"
    seen: list[tuple[float, int]] = []  # since it is dead: when, updates
    before: dict[str, int] = {}

    def watch(status: Status) -> None:
        worker = next(role for role in status.roles if role.name == "worker:1")
        if worker.restarts and not file.exists():
            seen.append((time.monotonic(), status.updates))
            if seen[-1][0] - seen[0][0] > 0.7:
                file.touch()
        if file.exists() and worker.step > before.get("step", worker.step):
            gate.touch()  # it is back and takes steps: the run may end
        before["step"] = worker.step

    hooks = [StaysAway(file), Linger(gate, 20, 0.005)]
    settings: dict[str, Any] = {"hyper": {"size": 2} if scheme == "groups" else {}, "quorum": quorum}
    story = trained(
        tmp_path / "run", scheme, kills=["worker:1"], watch=watch, hooks=hooks, workers=2, steps=300, **settings
    )
    finished(story, 300)
    made = seen[-1][1] - seen[0][1]
    assert made <= 2 if quorum == "hold" else made > 20


def test_who_is_frozen_is_killed_and_comes_back(tmp_path: Path) -> None:
    story = trained(
        tmp_path / "run", kills=[("worker:1", signal.SIGSTOP), ("chief", signal.SIGSTOP)], workers=2, steps=300,
        patience=1.0,
    )  # fmt: skip
    assert finished(story, 300).restarts == 2


def test_everybody_killed_at_once_goes_on(tmp_path: Path) -> None:
    shot: list[int] = []

    def watch(status: Status) -> None:
        if status.updates >= 30 and not shot:
            shot.extend(role.pid for role in status.roles)
            for pid in shot:
                os.kill(pid, signal.SIGKILL)
            gate.touch()

    gate = tmp_path / "gate"
    result = finished(trained(tmp_path / "run", workers=3, watch=watch, hooks=[Linger(gate, 30)]), STEPS)
    assert result.restarts == 3


def _strike(monkeypatch: pytest.MonkeyPatch, method: str, rank: int, index: int, mark: Path, act: Any) -> None:
    """Once, at a mean of this number, have a worker do something of its own before (or instead of) a method."""
    plain = getattr(DistributedMeans, method)

    def struck(self: DistributedMeans, meeting: PendingMean, *rest: Any) -> Any:
        if self.rank == rank and (meeting.circle.done or 0) + 1 == index and not mark.exists():
            mark.touch()
            act(self, meeting)
        return plain(self, meeting, *rest)

    monkeypatch.setattr(DistributedMeans, method, struck)


@pytest.mark.usefixtures("limit")
@pytest.mark.parametrize("large", LARGE)
@pytest.mark.parametrize(("rank", "index"), [(2, 20), (0, 20), (0, STEPS), (1, STEPS - 1)])
def test_a_worker_that_has_missed_a_mean_gets_it_from_the_others(
    rank: int, index: int, large: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missed(self: DistributedMeans, meeting: PendingMean) -> None:
        raise Broken  # as if a connection had broken when the others were through already

    _strike(monkeypatch, "_had", rank, index, tmp_path / "struck", missed)
    result = finished(trained(tmp_path / "run", workers=3), STEPS)
    assert (tmp_path / "struck").exists()
    assert result.digest == simulate("digits-mlp", "allreduce", workers=3, steps=STEPS).digest


def _die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def not_before(tmp_path: Path, restarts: int, *hooks: Hook) -> dict[str, Any]:
    """Settings of a run that is not over before so many roles have been started again."""
    gate = tmp_path / "gate"

    def watch(status: Status) -> None:
        if sum(role.restarts for role in status.roles) >= restarts:
            gate.touch()

    return {"watch": watch, "hooks": [*hooks, Linger(gate, 40)]}


@pytest.mark.usefixtures("limit")
@pytest.mark.parametrize("large", LARGE)
@pytest.mark.parametrize("method", ["_begin", "_complete", "_had"])
@pytest.mark.parametrize("rank", [0, 2])
def test_a_death_at_any_point_of_a_mean_counts_for_all_or_for_nobody(
    method: str, rank: int, large: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _strike(monkeypatch, method, rank, 20, tmp_path / "struck", _die)
    result = finished(trained(tmp_path / "run", workers=3, steps=100, **not_before(tmp_path, 1)), 100)
    assert result.restarts == 1
    told = replay(tmp_path / "run")  # every loss of everybody, from the recorded order
    assert told.match, told.difference


def test_a_death_in_the_middle_of_forming_a_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One dies at a mean; another as the rest form their group, after all have said that they are there."""
    _strike(monkeypatch, "_had", 2, 20, tmp_path / "struck", _die)
    plain, mark = GroupFormation._made, tmp_path / "struck again"

    def made(self: GroupFormation, place: str, members: list[int], circle: MeanGroup) -> Group:
        if len(members) == 2 and members.index(self.rank) == 1 and not mark.exists():
            mark.touch()
            _die()
        return plain(self, place, members, circle)

    monkeypatch.setattr(GroupFormation, "_made", made)
    away = StaysAway(mark, rank=2)  # or it might be back before the others have formed a group without it
    story = trained(tmp_path / "run", workers=3, steps=100, **not_before(tmp_path, 2, away))
    assert finished(story, 100).restarts == 2
    assert mark.exists()
    assert story.seconds < 20.0  # nobody waited for a connection to the dead


def test_a_role_may_begin_in_a_fresh_interpreter(tmp_path: Path) -> None:
    story = trained(tmp_path / "run", workers=2, start="exec")
    assert finished(story, STEPS).digest == simulate("digits-mlp", "allreduce", workers=2, steps=STEPS).digest


def test_what_cannot_work_is_refused_before_anything_is_started() -> None:
    with pytest.raises(UsageError, match="collective must be"):
        planned("digits-mlp", "allreduce", collective="mpi")
    with pytest.raises(UsageError, match="nccl takes means between GPUs"):
        planned("digits-mlp", "allreduce", collective="nccl")
    with pytest.raises(UsageError, match="nccl needs a GPU and a process for each"):
        planned("digits-mlp", "allreduce", collective="nccl", device="cuda", exact=True, micro=4, workers=2)
