"""Equal seeds give equal bits, and a run that was saved and taken up again goes on with the same bits."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from beds import simulation_snapshot as snapshot
from simulated_runs import check_sound, different, engine, run_counting, same_bits

from paceline.sampling import portion
from paceline.simulator.engine import SimulationEngine
from paceline.simulator.faults import Fault

NETWORKS = ["", "latency=0.2,bandwidth=1000"]


@pytest.mark.parametrize("network", NETWORKS)
def test_equal_seeds_give_equal_bits(name: str, network: str) -> None:
    first, second = engine(name, network=network), engine(name, network=network)
    first.run(12)
    second.run(12)
    assert different(first, second) == []


def test_another_seed_gives_other_bits(name: str) -> None:
    first, second = engine(name, seed=1), engine(name, seed=2)
    first.run(12)
    second.run(12)
    assert "centre.x" in different(first, second)


def test_noise_comes_from_the_batches_alone(name: str) -> None:
    """Torch's global random numbers neither enter a run nor are disturbed by one."""
    torch.manual_seed(1)
    first = engine(name)
    first.run(8)
    torch.manual_seed(2)
    before = torch.random.get_rng_state()
    second = engine(name)
    second.run(8)
    assert different(first, second) == []
    assert torch.equal(before, torch.random.get_rng_state())


def test_a_run_in_pieces_is_the_run(name: str) -> None:
    whole, pieces = engine(name, compute="constant:1.0"), engine(name, compute="constant:1.0")
    whole.run(12)
    for half_seconds in range(1, 10):
        pieces.run(12, seconds=0.5 * half_seconds)
    for updates in (2, 3, 7, 12):
        pieces.run(updates)
    assert different(whole, pieces) == []


def through_bytes(saved: snapshot.Snapshot, folder: Path) -> snapshot.Snapshot:
    """What is left of a snapshot when only raw bytes, shapes, type names and JSON are kept."""
    index = {}
    for number, (key, cell) in enumerate(saved.tensors.items()):
        (folder / f"{number}.bin").write_bytes(cell.contiguous().numpy().tobytes())
        index[key] = (number, str(cell.numpy().dtype), list(cell.shape))
    (folder / "index.json").write_text(json.dumps({"tensors": index, "numbers": saved.numbers}))

    read = json.loads((folder / "index.json").read_text())
    tensors = {}
    for key, (number, dtype, shape) in read["tensors"].items():
        raw = np.frombuffer((folder / f"{number}.bin").read_bytes(), dtype=dtype).reshape(shape)
        tensors[key] = torch.from_numpy(raw.copy())
    return snapshot.Snapshot(tensors, read["numbers"])


def goal_after(run: SimulationEngine) -> int:
    return run.updates + 6


@pytest.mark.parametrize(("workers", "network"), [(1, ""), (3, ""), (3, NETWORKS[1])])
@pytest.mark.parametrize("park_at", [0, 1, 2, 5])
def test_saved_and_restored_goes_on_with_the_same_bits(
    name: str, park_at: int, workers: int, network: str, tmp_path: Path
) -> None:
    stayed = engine(name, workers=workers, network=network)
    stayed.run(park_at=park_at)
    assert all(seat.worker.t == park_at for seat in stayed.seats)
    saved = through_bytes(snapshot.save(stayed), tmp_path)

    restored = engine(name, workers=workers, network=network)
    snapshot.load(restored, saved)
    assert different(stayed, restored) == []

    goal = goal_after(stayed)
    stayed.run(goal)
    restored.run(goal)
    assert different(stayed, restored) == []
    check_sound(restored, goal)


def test_saving_twice_or_on_the_way_changes_nothing(name: str, tmp_path: Path) -> None:
    """A chain of saves and loads, each into a fresh engine, arrives where the engine that stayed does."""
    stayed = moving = engine(name)
    for number, park_at in enumerate((1, 2, 4)):
        stayed.run(park_at=park_at)
        if moving is not stayed:
            moving.run(park_at=park_at)
        folder = tmp_path / str(number)
        folder.mkdir()
        saved = through_bytes(snapshot.save(moving), folder)
        moving = engine(name)
        snapshot.load(moving, saved)
        assert different(stayed, moving) == []


def test_restored_with_a_dead_worker(team: str, tmp_path: Path) -> None:
    """Who was dead stays dead, and has left once only."""
    stayed = engine(team, faults=[Fault("kill", 1, 2, "step")])
    stayed.run(park_at=4)
    assert not stayed.seats[1].worker.alive
    saved = through_bytes(snapshot.save(stayed), tmp_path)
    restored = engine(team)
    snapshot.load(restored, saved)
    assert different(stayed, restored) == []
    goal = goal_after(stayed)
    stayed.run(goal)
    restored.run(goal)
    assert different(stayed, restored) == []

    for run in (stayed, restored):
        run.injector.restart(1)
        run.run(goal + 20)
    assert restored.seats[1].worker.t > saved.numbers["workers"][1]["t"]
    assert different(stayed, restored) == []


def test_a_snapshot_is_a_copy(name: str) -> None:
    run = engine(name)
    run.run(park_at=2)
    saved = snapshot.save(run)
    before = {key: cell.clone() for key, cell in saved.tensors.items()}
    run.run(goal_after(run))
    assert all(same_bits(cell, before[key]) for key, cell in saved.tensors.items())


def test_every_change_of_the_centre_is_seen_once(name: str) -> None:
    """The sequence law: the run ends at exactly its updates, one version after the other."""
    run = engine(name)
    assert run_counting(run, 17) == run.updates == 17
    check_sound(run, 17)
    assert run_counting(run, 23) == 6
    check_sound(run, 23)


def test_a_common_batch_is_shared_out(name: str) -> None:
    """Under feed=slice the samples that are counted are those that the workers really took."""
    run = engine(name, batch=7, feed="slice")
    run.run(9)
    sizes = [portion(7, "slice", seat.worker.rank, run.workers).size for seat in run.seats]
    assert sum(sizes) == 7
    assert run.samples == sum(size * seat.gradients for size, seat in zip(sizes, run.seats, strict=True))
    assert torch.isfinite(run.centre.x).all()
