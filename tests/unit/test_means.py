"""Means in virtual time."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from machine import engine, got, means

from paceline.errors import SchemeError
from paceline.scheme import Scheme, State
from paceline.worker import Worker


def test_a_mean_is_everybodys() -> None:
    run = engine(means(), workers=4)
    run.run(park_at=1)
    assert got(run) == [2.5] * 4
    assert run.now == 3.0


def test_members_may_change_their_copies_of_a_mean() -> None:
    @dataclass(frozen=True)
    class Changing(Scheme, name="changing"):
        async def step(self, w: Worker) -> None:
            mean = await w.mean(torch.full((4,), w.rank + 1.0))
            mean += 10 * w.rank
            await w.sleep(1)
            w.x = mean
            w.v += 1

    run = engine(Changing(), workers=3)
    run.run(park_at=1)
    assert got(run) == [2.0, 12.0, 22.0]


def test_a_mean_with_weights() -> None:
    run = engine(means({0: 3.0, 1: 1.0, 2: 0.0}), workers=3)
    run.run(park_at=1)
    assert got(run) == [1.25] * 3


def test_a_mean_within_groups() -> None:
    run = engine(means(among=lambda rank: (0, 1) if rank < 2 else (2, 3)), workers=4)
    run.run(park_at=1)
    assert got(run) == [1.5, 1.5, 3.5, 3.5]


def test_one_weight_is_a_broadcast_bit_for_bit() -> None:
    @dataclass(frozen=True)
    class Broadcast(Scheme, name="broadcast"):
        async def step(self, w: Worker) -> None:
            w.x = torch.rand(4, generator=w.rng)
            w.x = await w.mean(w.x, weight=7.0 if w.rank == 1 else 0.0)
            w.v += 1

    run = engine(Broadcast(), workers=3)
    run.run(park_at=1)
    alone = Worker(1, 3, State(x=torch.zeros(4)), seed=0)
    theirs = torch.rand(4, generator=alone.rng)
    assert all(torch.equal(seat.worker.x, theirs) for seat in run.seats)


def test_all_weights_zero_is_refused() -> None:
    with pytest.raises(SchemeError, match="all 0"):
        engine(means({0: 0.0, 1: 0.0})).run(park_at=1)


def test_wrong_means_are_refused() -> None:
    with pytest.raises(SchemeError, match=r"worker:0 asks for a mean among \(1,\), where it is not a member"):
        engine(means(among=lambda rank: (1,))).run(park_at=1)

    @dataclass(frozen=True)
    class Uneven(Scheme, name="uneven"):
        async def step(self, w: Worker) -> None:
            await w.mean(torch.zeros(1 + w.rank))

    with pytest.raises(SchemeError, match="different lengths"):
        engine(Uneven()).run(park_at=1)

    @dataclass(frozen=True)
    class Twice(Scheme, name="twice"):
        async def step(self, w: Worker) -> None:
            await w.start(w.mean(w.x))
            if w.rank == 0:
                await w.start(w.mean(w.x))
            await w.sleep(1)

    with pytest.raises(SchemeError, match="worker:0 started a mean while its last one with the same members is open"):
        engine(Twice(), network="latency=0.1").run(park_at=2)
