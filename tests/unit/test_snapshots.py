"""A run's state out of shared memory into a checkpoint, and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from theatre import Company, Theatre
from torch import Tensor

from paceline import checkpoint, snapshots
from paceline.board import Bells
from paceline.errors import DataError, UsageError
from paceline.scheme import Rate, Scheme, State, Vector, on_server
from paceline.schemes.sync import SyncSGD
from paceline.server import Server
from paceline.stage import Stage

LENGTH = 7


@dataclass(frozen=True)
class Kept(Scheme, name="kept"):
    """Cells of every kind."""

    lr: Rate = 0.1

    def server(self, x0: Vector, workers: int) -> State:
        return State(x=x0, memory=torch.zeros(2, len(x0)), seen=torch.zeros(workers, dtype=torch.int64), count=0)

    def worker(self, x0: Vector, workers: int) -> State:
        return State(x=x0, window=0)

    @on_server
    def push(self, s: State, g: Vector) -> None:
        s.x -= g
        s.v += 1

    @on_server
    def fill(self, s: State, value: float) -> int:
        s.x.fill_(value)
        s.v += 1
        return s.v


@dataclass(frozen=True)
class Alone(Scheme, name="alone"):
    """Has its centre in the workers."""


def theatre(scheme: Scheme, directory: Path, servers: int = 2) -> Theatre:
    return Theatre(scheme, torch.arange(float(LENGTH)), workers=2, servers=servers, directory=directory, keep=3)


def scribbled(stage: Stage, value: float) -> None:
    """Something else in every cell that is saved."""
    for name in stage.layout.places:
        if name.startswith(("server.", "worker.", "ledger.", "person.", "buffer.")):
            stage.tensor(name).fill_(value)
    for rank in range(2):
        stage.board.t[rank], stage.board.gradients[rank], stage.board.samples[rank] = 3, 4, 5


def cells(stage: Stage) -> dict[str, Tensor]:
    names = [name for name in stage.layout.places if name.startswith(("server.", "worker.", "ledger.", "buffer."))]
    return {name: stage.tensor(name).clone() for name in names}


@pytest.mark.parametrize("servers", [1, 2, 3])
def test_all_of_it_there_and_back(servers: int, tmp_path: Path) -> None:
    made = theatre(Kept(), tmp_path, servers)
    stage = made.stage(0)
    scribbled(stage, 3.0)
    before = cells(stage)
    snapshots.keep_all(stage)
    scribbled(stage, 9.0)  # what comes later is not in it
    path = snapshots.write(stage, "average", {"own": torch.ones(2)})
    saved = checkpoint.load(path)
    assert saved.step == 3
    assert stage.board.get("checkpoint") == 3
    assert torch.equal(saved.tensors["model"], torch.full((LENGTH,), 3.0))
    assert torch.equal(saved.tensors["hook.own"], torch.ones(2))
    for shard in range(servers):
        snapshots.restore_shard(stage, shard, saved)
    for rank in range(2):
        snapshots.restore_worker(stage, rank, saved)
    after = cells(stage)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert [stage.board.t[1], stage.board.gradients[1], stage.board.samples[1]] == [3, 4, 5]
    made.close()


@pytest.mark.parametrize(("first", "then"), [(1, 3), (3, 1), (2, 3)])
def test_another_number_of_servers(first: int, then: int, tmp_path: Path) -> None:
    made = theatre(Kept(), tmp_path, first)
    stage = made.stage(0)
    stage.tensor("server.x").copy_(torch.randn(LENGTH))
    stage.tensor("server.0.count").fill_(4)
    snapshots.keep_all(stage)
    saved = checkpoint.load(snapshots.write(stage, "average", {}))
    other = theatre(Kept(), tmp_path, then)
    there = other.stage(0)
    for shard in range(then):
        snapshots.restore_shard(there, shard, saved)
        assert there.shard_state(shard).count == 4
    assert torch.equal(there.server_state().x, stage.server_state().x)
    made.close()
    other.close()


def test_parts_are_kept_at_their_own_moments(tmp_path: Path) -> None:
    made = theatre(Kept(), tmp_path)
    stage = made.stage(0)
    snapshots.keep_all(stage)
    low, high = stage.bounds(1)
    scribbled(stage, 5.0)
    snapshots.keep_shard(stage, 1)
    snapshots.keep_worker(stage, 0, None)
    kept = stage.tensor("keep.server.x").tolist()
    assert kept[low:high] == [5.0] * (high - low)
    assert kept[:low] == [float(k) for k in range(low)]
    assert stage.tensor("keep.worker.0.x").tolist() == [5.0] * LENGTH
    assert stage.tensor("keep.worker.1.x").tolist() == [float(k) for k in range(LENGTH)]
    made.close()


@pytest.mark.parametrize("stopping", [True, False], ids=["stop", "run"])
def test_a_checkpoint_counts_the_workers_that_its_state_counts(stopping: bool, tmp_path: Path) -> None:
    """A resume from it must neither add a worker a second time nor leave one out."""
    made = Theatre(SyncSGD(), torch.arange(float(LENGTH)), workers=2, servers=1, directory=tmp_path)
    stage = made.stage(0)
    server = Server(made.stage(made.board.server_place(0)), 0)
    snapshots.keep_all(stage)
    made.board.put("stop", int(stopping))
    made.board.alive[1] = 0  # it leaves after the state was put aside, before the chief writes
    assert server._lead_on()
    saved = checkpoint.load(snapshots.write(stage, "average", {}))
    assert int(saved.tensors["server.0.present"]) == sum(saved.numbers["present"]) == 2
    snapshots.keep_all(stage)
    later = checkpoint.load(snapshots.write(stage, "average", {}))
    assert int(later.tensors["server.0.present"]) == sum(later.numbers["present"]) == (2 if stopping else 1)
    del later.tensors["ledger.0.present"]  # as older versions wrote it
    snapshots.restore_shard(stage, 0, later)
    assert stage.tensor("ledger.0.present").tolist() == later.numbers["present"]
    made.close()


def test_what_was_changed_on_the_way_is_in_it(tmp_path: Path) -> None:
    made = theatre(Kept(), tmp_path)
    stage = made.stage(0)
    stage.save_overrides({"lr": 0.5})
    assert made.stage(1).scheme == Kept(lr=0.5)
    snapshots.keep_all(stage)
    assert checkpoint.load(snapshots.write(stage, "average", {})).numbers["overrides"] == {"lr": 0.5}
    made.close()


def test_no_more_are_kept_than_asked_for(tmp_path: Path) -> None:
    made = theatre(Kept(), tmp_path)
    stage = made.stage(0)
    for version in range(6):
        stage.tensor("server.0.v").fill_(version)
        snapshots.keep_all(stage)
        snapshots.write(stage, "average", {})
    assert checkpoint.steps(tmp_path / "checkpoints") == [3, 4, 5]
    assert snapshots.find(stage, 4).step == 4
    with pytest.raises(DataError, match="the checkpoint of update 0 is not in"):
        snapshots.find(stage, 0)
    made.close()


def test_the_centre_without_a_server_is_that_of_the_lowest_living(tmp_path: Path) -> None:
    made = theatre(Alone(), tmp_path)
    stage = made.stage(0)
    for rank in range(2):
        stage.tensor(f"worker.{rank}.x").fill_(float(rank))
        stage.tensor(f"worker.{rank}.v").fill_(10 + rank)
    assert snapshots.model_of(stage).tolist() == [0.0] * LENGTH
    stage.board.alive[0] = 0
    assert snapshots.model_of(stage).tolist() == [1.0] * LENGTH
    snapshots.keep_all(stage)
    assert checkpoint.load(snapshots.write(stage, "average", {})).step == 11
    made.close()


def test_another_run_is_refused(tmp_path: Path) -> None:
    made = theatre(Kept(), tmp_path)
    stage = made.stage(0)
    snapshots.keep_all(stage)
    saved = checkpoint.load(snapshots.write(stage, "average", {}))
    snapshots.check(made.plan, Kept(lr=9.0), saved)
    snapshots.check(dataclasses.replace(made.plan, servers=1), Kept(), saved)
    with pytest.raises(UsageError, match="written with scheme 'kept'; it cannot go on with 'alone'"):
        snapshots.check(made.plan, Alone(), saved)
    with pytest.raises(UsageError, match="written with workers 2; it cannot go on with 3"):
        snapshots.check(dataclasses.replace(made.plan, workers=3), Kept(), saved)
    made.close()


class TestBuffers:
    @pytest.fixture
    def stage(self, tmp_path: Path) -> Iterator[Stage]:
        made = theatre(Alone(), tmp_path)
        stage = Stage(made.plan, made.scheme, made.board, Bells(made.board, made._bells, 0), made._state)
        stage.lay_out(torch.zeros(2), {"mean": torch.zeros(2), "number": torch.zeros((), dtype=torch.int64)}, {})
        for rank in range(2):
            stage.tensor(f"buffer.{rank}.mean").fill_(float(1 + rank))
            stage.tensor(f"buffer.{rank}.number").fill_(5 - rank)
            stage.board.gradients[rank] = 1
        yield stage
        made.close()

    def test_the_mean_over_those_who_trained(self, stage: Stage) -> None:
        found = snapshots.buffers_of(stage, "average")
        assert (found["mean"].tolist(), int(found["number"])) == ([1.5, 1.5], 5)
        stage.board.gradients[0] = 0
        assert snapshots.buffers_of(stage, "average")["mean"].tolist() == [2.0, 2.0]

    def test_or_the_chiefs(self, stage: Stage) -> None:
        found = snapshots.buffers_of(stage, "chief")
        assert (found["mean"].tolist(), int(found["number"])) == ([1.0, 1.0], 5)
        found["mean"].fill_(7.0)
        assert stage.tensor("buffer.0.mean").tolist() == [1.0, 1.0]


@pytest.mark.parametrize("servers", [1, 2])
def test_a_copy_of_the_model_is_of_one_moment(servers: int, tmp_path: Path) -> None:
    """While another worker changes all of it again and again."""
    scheme = Kept()
    made = Theatre(scheme, torch.zeros(50_000), workers=2, servers=servers, directory=tmp_path)

    def write() -> None:
        link = made.link(1)
        for value in range(1, 301):
            link.call(scheme.fill(float(value)))

    company = Company(*made.servers(), write)
    try:
        stage = made.stage(0)
        while stage.updates < 300:
            copy = snapshots.steady(stage)
            for shard in range(servers):  # of each server; the servers follow each other
                low, high = stage.bounds(shard)
                assert float(copy[low:high].min()) == float(copy[low:high].max())
        made.all_gone()
        assert company.end() == [0] * (servers + 1)
    finally:
        company.kill()
        made.close()
