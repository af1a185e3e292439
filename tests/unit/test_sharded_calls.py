"""Calls that are not atomic, piece by piece."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from machine import Spoilt, engine

from paceline.compute_times import ComputeTime, Exponential
from paceline.scheme import Scheme, State, Vector, on_server
from paceline.simulator.cost import Cost
from paceline.simulator.faults import Fault
from paceline.worker import Worker


def hogwild(
    chunks: int, speeds: tuple[float, ...] = (2.0, 1.0, 1.0), access: ComputeTime | float = 1.0
) -> list[list[float]]:
    """What a fast worker reads while slow ones add 1 to every coordinate."""
    reads: list[list[float]] = []

    @dataclass(frozen=True)
    class Torn(Scheme, name="torn"):
        chunks: int = 1

        @on_server(atomic=False)
        def read(self, s: State) -> Vector:
            x: Vector = s.x
            return x

        @on_server(atomic=False)
        def add(self, s: State, g: Vector) -> None:
            s.x += g
            s.v += 1

        async def step(self, w: Worker) -> None:
            await w.sleep(0.3 + 0.1 * w.rank)
            if w.rank:
                await self.add(torch.ones(4))
            else:
                reads.append((await self.read()).tolist())

    task = Spoilt()
    task.start = lambda seed: torch.zeros(4)  # type: ignore[method-assign]
    run = engine(Torn(chunks), task=task, workers=3, access=access, speeds=speeds)
    run.run(20)
    assert len(reads) > 5
    assert run.centre.x[-1] == 20.0  # additions are never lost: a chunk is atomic
    return reads


def test_reads_are_torn_with_several_chunks() -> None:
    """Overtaking a worker that adds, one sees its addition in the first chunks and not in the last."""
    torn = [x for x in hogwild(4) if len(set(x)) > 1]
    assert torn
    assert all(x == sorted(x, reverse=True) for x in torn)


def test_reads_are_whole_with_one_chunk() -> None:
    assert all(len(set(x)) == 1 for x in hogwild(1))


def test_a_pass_takes_as_long_as_the_worker_is_slow() -> None:
    cost = Cost(access=0.5, speeds=(1.0, 2.0))
    assert [cost.pass_over(rank, 2, seed=0) for rank in (0, 1)] == [[0.0, 0.25], [0.0, 0.125]]
    assert Cost(access=0.5).pass_over(3, 5, seed=0) == [0.0, 0.1, 0.2, pytest.approx(0.3), 0.4]


def test_random_passes_tear_reads_of_equally_fast_workers_too() -> None:
    """The default: pieces take exponential times, a pass `access` on average, the same for equal seeds."""
    passes = [Cost().pass_over(0, 10, seed=k) for k in range(2000)]
    assert passes[0] == Cost().pass_over(0, 10, seed=0)
    assert passes[0] != passes[1]
    assert all(one[0] == 0.0 and one == sorted(one) and len(one) == 10 for one in passes)
    assert sum(one[-1] for one in passes) / 2000 == pytest.approx(0.1 * 9 / 10, rel=0.03)
    assert any(len(set(x)) > 1 for x in hogwild(4, speeds=(), access=Exponential(1.0)))


def test_pieces_stay_in_order_when_they_are_held_up() -> None:
    """A delay releases all pieces of a pass at one moment: they are still put together in their order."""

    @dataclass(frozen=True)
    class Reader(Scheme, name="reader"):
        chunks: int = 7

        @on_server(atomic=False)
        def read(self, s: State) -> Vector:
            x: Vector = s.x
            return x

        @on_server
        def push(self, s: State) -> None:
            s.x += 1
            s.v += 1

        async def step(self, w: Worker) -> None:
            w.x = await self.read()
            assert torch.equal(w.x, torch.arange(21.0) + w.t), w.x
            await self.push()

    for k in range(50):
        task = Spoilt()
        task.start = lambda seed: torch.arange(21.0)  # type: ignore[method-assign]
        delay = Fault("stop", 0, 0.01 * k, duration=1.0 + 0.377 * k)
        run = engine(Reader(), task=task, workers=1, access=0.9, faults=[delay])
        run.run(3)


def test_a_piece_wakes_a_guard() -> None:
    @dataclass(frozen=True)
    class Mixed(Scheme, name="mixed"):
        chunks: int = 2

        @on_server(atomic=False)
        def add(self, s: State, g: Vector) -> None:
            s.x += g
            s.v += 1

        @on_server(when=lambda self, s, r: s.v >= r)
        def wait(self, s: State, r: int) -> None: ...

        async def step(self, w: Worker) -> None:
            await self.add(w.x)
            await self.wait(2 * (w.t + 1))

    run = engine(Mixed())
    run.run(8)
    assert run.updates == 8
