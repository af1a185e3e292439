"""`batched`: how many gradients a block has, what memory it needs, and which samples its gradients are of."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from small_models import task
from torch import Tensor

from paceline import simulate
from paceline.config import build
from paceline.sampling import Stream, permute
from paceline.simulator.cost import Cost
from paceline.simulator.engine import SimulationEngine
from paceline.simulator.gradients import GradientsInFlight
from paceline.task import GradientBlock
from paceline.torch_task import many_gradients
from paceline.torch_task.index_tables import IndexTable, permuted


def test_the_course_does_not_depend_on_the_size_of_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = simulate(task(), "async", workers=9, steps=50, batched=True)
    for room in (1, 40_000, 100_000):
        monkeypatch.setattr(many_gradients, "CPU_BYTES", room)
        cut = simulate(task(), "async", workers=9, steps=50, batched=True)
        assert cut.staleness == whole.staleness
        torch.testing.assert_close(cut.vector, whole.vector)


def test_a_block_that_finds_no_memory_is_halved(monkeypatch: pytest.MonkeyPatch) -> None:
    many = task().batched(8, 0)
    plain, sizes = many._at, []

    def scarce(points: Tensor, *rest: Any) -> Any:
        sizes.append(len(points))
        if len(points) > 3:
            raise torch.OutOfMemoryError("out of memory")
        return plain(points, *rest)

    points = torch.stack([task().start(k) for k in range(8)])
    expected = many.compute(points, list(range(8)), [2] * 8)
    monkeypatch.setattr(many, "_at", scarce)
    found = many.compute(points, list(range(8)), [2] * 8)
    assert sizes == [8, 4, 2, 2, 2, 2]
    assert torch.equal(torch.tensor(found.sizes), torch.tensor(expected.sizes))
    torch.testing.assert_close(found.gradients, expected.gradients)
    torch.testing.assert_close(found.losses, expected.losses)


class Counting:
    """Gradients that are all ones, and the sizes of the blocks that were asked for."""

    def __init__(self, room: int = 100) -> None:
        self.room, self.blocks = room, []

    def capacity(self) -> int:
        return self.room

    def compute(self, points: Tensor, ranks: Any, numbers: Any) -> GradientBlock:
        self.blocks.append(len(ranks))
        return GradientBlock(torch.zeros(len(ranks)), torch.ones_like(points), [1] * len(ranks))


@pytest.mark.parametrize(("steps", "blocks"), [(12, [4, 4, 4]), (10, [4, 4, 2]), (3, [3])])
def test_one_call_serves_all_workers_and_nothing_is_computed_for_later(steps: int, blocks: list[int]) -> None:
    engine = SimulationEngine(task(), build.scheme_of("async", {}), workers=4, seed=0, cost=Cost())
    counting = Counting()
    engine._drawn = GradientsInFlight(counting, 4, engine._useful)
    engine.run(steps)
    assert counting.blocks == blocks


def test_the_memory_of_a_block_is_not_kept_by_one_slow_worker() -> None:
    engine = SimulationEngine(
        task(), build.scheme_of("async", {}), workers=8, seed=0, cost=Cost(speeds=(*[1.0] * 7, 0.01))
    )
    engine._drawn = flight = GradientsInFlight(Counting(), 8, engine._useful)
    engine.run(20)
    slow = [one for one in flight._ready.values() if one.begun.seat.worker.rank == 7]
    assert [one.gradient.g._base for one in slow] == [None]


@pytest.mark.parametrize("n", [1, 2, 7, 60, 1437, 60_000])
def test_the_orders_of_many_workers_are_those_of_their_streams(n: int) -> None:
    rng = np.random.default_rng(n)
    for feed, shuffle, drop_last in (("shared", True, False), ("shared", False, False), ("shared", True, True)):
        batch = min(9, n)
        streams = [Stream(n, batch, feed, shuffle, rank, 5, 3, drop_last=drop_last) for rank in range(5)]  # type: ignore[arg-type]
        table = IndexTable(streams, torch.device("cpu"))
        for _ in range(6):
            places, numbers = rng.permutation(5)[:3], rng.integers(0, 60, 3)
            found = table.indices(places, numbers).numpy()
            assert (found == [streams[p].indices(int(k)) for p, k in zip(places, numbers, strict=True)]).all()


def test_the_permutation_of_a_gpu_is_that_of_the_cpu() -> None:
    for n in (1, 5, 1437, 60_000, 10_000_019):
        places = np.arange(min(n, 2000), dtype=np.uint64)
        keys = np.random.default_rng(n).integers(0, 1 << 63, len(places), np.uint64)
        found = permuted(torch.from_numpy(places.astype(np.int64)), n, torch.from_numpy(keys.astype(np.int64)))
        assert (found.numpy() == permute(places, n, keys).astype(np.int64)).all()
