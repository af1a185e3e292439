"""A run's state out of shared memory into a checkpoint, and back."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from memory_fixture import Company, Theatre
from torch import Tensor

from paceline.errors import DataError, UsageError
from paceline.fields import Rate
from paceline.processes.memory import snapshot
from paceline.processes.memory.run_memory import RunMemory
from paceline.processes.memory.wakeup import Wakeup
from paceline.processes.roles.server import Server
from paceline.runs import checkpoint
from paceline.scheme import Scheme, State, Vector, on_server
from paceline.schemes.sync import SyncSGD

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


def scribbled(memory: RunMemory, value: float) -> None:
    """Something else in every cell that is saved."""
    for name in memory.layout.places:
        if name.startswith(("server.", "worker.", "ledger.", "person.", "buffer.")):
            memory.tensor(name).fill_(value)
    for rank in range(2):
        memory.board.t[rank], memory.board.gradients[rank], memory.board.samples[rank] = 3, 4, 5


def cells(memory: RunMemory) -> dict[str, Tensor]:
    names = [name for name in memory.layout.places if name.startswith(("server.", "worker.", "ledger.", "buffer."))]
    return {name: memory.tensor(name).clone() for name in names}


@pytest.mark.parametrize("servers", [1, 2, 3])
def test_all_of_it_there_and_back(servers: int, tmp_path: Path) -> None:
    made = theatre(Kept(), tmp_path, servers)
    memory = made.memory(0)
    scribbled(memory, 3.0)
    before = cells(memory)
    snapshot.keep_all(memory)
    scribbled(memory, 9.0)  # what comes later is not in it
    path = snapshot.write(memory, "average", {"own": torch.ones(2)})
    saved = checkpoint.load(path)
    assert saved.step == 3
    assert memory.board.get("checkpoint") == 3
    assert torch.equal(saved.tensors["model"], torch.full((LENGTH,), 3.0))
    assert torch.equal(saved.tensors["hook.own"], torch.ones(2))
    for shard in range(servers):
        snapshot.restore_shard(memory, shard, saved)
    for rank in range(2):
        snapshot.restore_worker(memory, rank, saved)
    after = cells(memory)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert [memory.board.t[1], memory.board.gradients[1], memory.board.samples[1]] == [3, 4, 5]
    made.close()


@pytest.mark.parametrize(("first", "then"), [(1, 3), (3, 1), (2, 3)])
def test_another_number_of_servers(first: int, then: int, tmp_path: Path) -> None:
    made = theatre(Kept(), tmp_path, first)
    memory = made.memory(0)
    memory.tensor("server.x").copy_(torch.randn(LENGTH))
    memory.tensor("server.0.count").fill_(4)
    snapshot.keep_all(memory)
    saved = checkpoint.load(snapshot.write(memory, "average", {}))
    other = theatre(Kept(), tmp_path, then)
    there = other.memory(0)
    for shard in range(then):
        snapshot.restore_shard(there, shard, saved)
        assert there.shard_state(shard).count == 4
    assert torch.equal(there.server_state().x, memory.server_state().x)
    made.close()
    other.close()


def test_parts_are_kept_at_their_own_moments(tmp_path: Path) -> None:
    made = theatre(Kept(), tmp_path)
    memory = made.memory(0)
    snapshot.keep_all(memory)
    low, high = memory.bounds(1)
    scribbled(memory, 5.0)
    snapshot.keep_shard(memory, 1)
    snapshot.keep_worker(memory, 0, None)
    kept = memory.tensor("keep.server.x").tolist()
    assert kept[low:high] == [5.0] * (high - low)
    assert kept[:low] == [float(k) for k in range(low)]
    assert memory.tensor("keep.worker.0.x").tolist() == [5.0] * LENGTH
    assert memory.tensor("keep.worker.1.x").tolist() == [float(k) for k in range(LENGTH)]
    made.close()


@pytest.mark.parametrize("stopping", [True, False], ids=["stop", "run"])
def test_a_checkpoint_counts_the_workers_that_its_state_counts(stopping: bool, tmp_path: Path) -> None:
    """A resume from it must neither add a worker a second time nor leave one out."""
    made = Theatre(SyncSGD(), torch.arange(float(LENGTH)), workers=2, servers=1, directory=tmp_path)
    memory = made.memory(0)
    server = Server(made.memory(made.board.server_place(0)), 0)
    snapshot.keep_all(memory)
    made.board.put("stop", int(stopping))
    made.board.alive[1] = 0  # it leaves after the state was put aside, before the chief writes
    assert server._lead_on()
    saved = checkpoint.load(snapshot.write(memory, "average", {}))
    assert int(saved.tensors["server.0.present"]) == sum(saved.numbers["present"]) == 2
    snapshot.keep_all(memory)
    later = checkpoint.load(snapshot.write(memory, "average", {}))
    assert int(later.tensors["server.0.present"]) == sum(later.numbers["present"]) == (2 if stopping else 1)
    del later.tensors["ledger.0.present"]  # as older versions wrote it
    snapshot.restore_shard(memory, 0, later)
    assert memory.tensor("ledger.0.present").tolist() == later.numbers["present"]
    made.close()


def test_what_was_changed_on_the_way_is_in_it(tmp_path: Path) -> None:
    made = theatre(Kept(), tmp_path)
    memory = made.memory(0)
    memory.save_overrides({"lr": 0.5})
    assert made.memory(1).scheme == Kept(lr=0.5)
    snapshot.keep_all(memory)
    assert checkpoint.load(snapshot.write(memory, "average", {})).numbers["overrides"] == {"lr": 0.5}
    made.close()


def test_no_more_are_kept_than_asked_for(tmp_path: Path) -> None:
    made = theatre(Kept(), tmp_path)
    memory = made.memory(0)
    for version in range(6):
        memory.tensor("server.0.v").fill_(version)
        snapshot.keep_all(memory)
        snapshot.write(memory, "average", {})
    assert checkpoint.steps(tmp_path / "checkpoints") == [3, 4, 5]
    assert snapshot.find(memory, 4).step == 4
    with pytest.raises(DataError, match="the checkpoint of update 0 is not in"):
        snapshot.find(memory, 0)
    made.close()


def test_the_centre_without_a_server_is_that_of_the_lowest_living(tmp_path: Path) -> None:
    made = theatre(Alone(), tmp_path)
    memory = made.memory(0)
    for rank in range(2):
        memory.tensor(f"worker.{rank}.x").fill_(float(rank))
        memory.tensor(f"worker.{rank}.v").fill_(10 + rank)
    assert snapshot.model_of(memory).tolist() == [0.0] * LENGTH
    memory.board.alive[0] = 0
    assert snapshot.model_of(memory).tolist() == [1.0] * LENGTH
    snapshot.keep_all(memory)
    assert checkpoint.load(snapshot.write(memory, "average", {})).step == 11
    made.close()


def test_another_run_is_refused(tmp_path: Path) -> None:
    made = theatre(Kept(), tmp_path)
    memory = made.memory(0)
    snapshot.keep_all(memory)
    saved = checkpoint.load(snapshot.write(memory, "average", {}))
    snapshot.check(made.plan, Kept(lr=9.0), saved)
    snapshot.check(dataclasses.replace(made.plan, servers=1), Kept(), saved)
    with pytest.raises(UsageError, match="written with scheme 'kept'; it cannot resume with 'alone'"):
        snapshot.check(made.plan, Alone(), saved)
    with pytest.raises(UsageError, match="written with workers 2; it cannot resume with 3"):
        snapshot.check(dataclasses.replace(made.plan, workers=3), Kept(), saved)
    made.close()


class TestBuffers:
    @pytest.fixture
    def memory(self, tmp_path: Path) -> Iterator[RunMemory]:
        made = theatre(Alone(), tmp_path)
        memory = RunMemory(made.plan, made.scheme, made.board, Wakeup(made.board, made._wakeup, 0), made._state)
        memory.lay_out(torch.zeros(2), {"mean": torch.zeros(2), "number": torch.zeros((), dtype=torch.int64)}, {})
        for rank in range(2):
            memory.tensor(f"buffer.{rank}.mean").fill_(float(1 + rank))
            memory.tensor(f"buffer.{rank}.number").fill_(5 - rank)
            memory.board.gradients[rank] = 1
        yield memory
        made.close()

    def test_the_mean_over_those_who_trained(self, memory: RunMemory) -> None:
        found = snapshot.buffers_of(memory, "average")
        assert (found["mean"].tolist(), int(found["number"])) == ([1.5, 1.5], 5)
        memory.board.gradients[0] = 0
        assert snapshot.buffers_of(memory, "average")["mean"].tolist() == [2.0, 2.0]

    def test_or_the_chiefs(self, memory: RunMemory) -> None:
        found = snapshot.buffers_of(memory, "chief")
        assert (found["mean"].tolist(), int(found["number"])) == ([1.0, 1.0], 5)
        found["mean"].fill_(7.0)
        assert memory.tensor("buffer.0.mean").tolist() == [1.0, 1.0]


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
        memory = made.memory(0)
        while memory.updates < 300:
            copy = snapshot.steady(memory)
            for shard in range(servers):  # of each server; the servers follow each other
                low, high = memory.bounds(shard)
                assert float(copy[low:high].min()) == float(copy[low:high].max())
        made.all_gone()
        assert company.end() == [0] * (servers + 1)
    finally:
        company.kill()
        made.close()


def test_the_first_checkpoint_is_the_state_itself(tmp_path: Path) -> None:
    made = theatre(Kept(), tmp_path)
    memory = made.memory(0)
    path = snapshot.write_first(memory, "average")
    first = checkpoint.load(path)
    assert not any(memory.tensor(name).any() for name in memory.layout.places if name.startswith("keep."))
    snapshot.keep_all(memory)
    again = checkpoint.load(snapshot.write(memory, "average", {}))
    assert first.tensors.keys() == again.tensors.keys()
    assert all(torch.equal(first.tensors[name], again.tensors[name]) for name in first.tensors)


def test_a_worker_that_has_copied_nothing_has_its_part_of_the_checkpoint_before(tmp_path: Path) -> None:
    made = theatre(Kept(), tmp_path)
    memory = made.memory(0)
    snapshot.write_first(memory, "average")
    first = torch.arange(float(LENGTH))
    scribbled(memory, 3.0)
    snapshot.keep_worker(memory, 0, None)
    for shard in range(2):
        snapshot.keep_shard(memory, shard)
    saved = checkpoint.load(snapshot.write(memory, "average", {}))
    assert saved.step == 3
    assert torch.equal(saved.tensors["worker.0.x"], torch.full((LENGTH,), 3.0))
    assert torch.equal(saved.tensors["worker.1.x"], first)
    assert torch.equal(saved.tensors["rng.1"], memory.tensor("rng.1"))
    assert saved.tensors["person.1"].tolist() == [0, 0, 0]


def test_memory_of_copies_is_given_back_and_the_checkpoint_counts_instead(tmp_path: Path) -> None:
    length = 1 << 20
    made = Theatre(Kept(), torch.arange(float(length)), workers=2, servers=1, directory=tmp_path, keep=3)
    memory = made.memory(0)
    snapshot.write_first(memory, "average")
    snapshot.keep_all(memory)
    snapshot.write(memory, "average", {})
    taken = os.fstat(memory.segment.descriptor).st_blocks
    snapshot.release(memory, [0, 1])
    given_back = 512 * (taken - os.fstat(memory.segment.descriptor).st_blocks)
    assert given_back >= 4.9 * 4 * length  # two workers' x, the server's x and memory, which is two vectors
    assert not memory.tensor("keep.worker.1.x").any()
    assert torch.equal(memory.tensor("worker.1.x"), torch.arange(float(length)))
    scribbled(memory, 3.0)
    snapshot.keep_worker(memory, 0, None)
    snapshot.keep_shard(memory, 0)
    saved = checkpoint.load(snapshot.write(memory, "average", {}))
    assert torch.equal(saved.tensors["worker.0.x"], torch.full((length,), 3.0))
    assert torch.equal(saved.tensors["worker.1.x"], torch.arange(float(length)))
