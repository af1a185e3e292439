"""Meetings of workers: who takes part, what each takes, who is waited for; in virtual time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from paceline import simulate
from paceline.errors import Deadlock, SchemeError
from paceline.ops import Met
from paceline.scheme import Scheme
from paceline.simulator.cost import Cost, NetworkLink
from paceline.simulator.engine import SimulationEngine
from paceline.simulator.faults import Fault
from paceline.tasks.quadratic import quadratic
from paceline.worker import Worker

SEEN: list[tuple[int, int, Met]] = []


@pytest.fixture(autouse=True)
def fresh() -> None:
    SEEN.clear()


@dataclass(frozen=True)
class Chatting(Scheme, name="chatting"):
    """Every worker tells its rank to the next one."""

    lr: float = 0.0
    decentralised = True

    async def step(self, w: Worker) -> None:
        await w.grad()
        here = torch.full_like(w.x, w.rank)
        met = await w.meet(here, [(w.rank - 1) % w.workers], [(w.rank + 1) % w.workers], number=10.0 * w.rank)
        SEEN.append((w.rank, w.t, met))
        w.v += 1


@dataclass(frozen=True)
class Stubborn(Chatting, name="stubborn"):
    """The first two wait for each other, each at a swap with a third one first."""

    async def step(self, w: Worker) -> None:
        await w.grad()
        await w.swap((w.rank + 1) % w.workers, w.x)


@dataclass(frozen=True)
class Deaf(Chatting, name="deaf"):
    """Takes what nobody gives."""

    async def step(self, w: Worker) -> None:
        await w.meet(w.x, [(w.rank + 1) % w.workers], [])


@dataclass(frozen=True)
class Outside(Chatting, name="outside"):
    """Wants the vector of a worker that is not there."""

    async def step(self, w: Worker) -> None:
        await w.meet(w.x, [7])


def engine(scheme: Scheme, workers: int = 3, **options: Any) -> SimulationEngine:
    return SimulationEngine(quadratic(dim=4), scheme, workers=workers, seed=1, **{"cost": Cost()} | options)


def test_each_gets_the_vector_and_the_number_that_it_came_for() -> None:
    engine(Chatting()).run(2)
    assert len(SEEN) == 6
    for rank, _, met in SEEN:
        before = (rank - 1) % 3
        assert met.present == (0, 1, 2)
        assert list(met.vectors) == [before]
        assert met.vectors[before].eq(before).all()
        assert met.numbers == {0: 0.0, 1: 10.0, 2: 20.0}


def test_what_was_given_does_not_change_with_the_givers_cells() -> None:
    @dataclass(frozen=True)
    class Hasty(Chatting, name="hasty"):
        async def step(self, w: Worker) -> None:
            w.x = torch.full_like(w.x, w.t)
            meeting = await w.start(w.meet(w.x, [1 - w.rank]))
            w.x = torch.full_like(w.x, -1.0)
            met = await meeting
            SEEN.append((w.rank, w.t, met))
            met.vectors[1 - w.rank].zero_()  # its own copy
            w.v += 1

    engine(Hasty(), 2).run(3)
    assert len(SEEN) == 6


def test_a_dead_member_is_not_waited_for_and_the_result_says_so() -> None:
    engine(Chatting(), faults=[Fault("kill", 2, 1.5)]).run(4)
    late = [(rank, met) for rank, t, met in SEEN if t == 3]
    assert [met.present for _, met in late] == [(0, 1), (0, 1)]
    assert [list(met.vectors) for rank, met in sorted(late, key=lambda one: one[0])] == [[], [0]]


def test_it_takes_part_again_when_it_is_back() -> None:
    engine(Chatting(), faults=[Fault("kill", 2, 1.5, duration=2.0)]).run(8)
    assert [met.present for _, t, met in SEEN if t == 7] == [(0, 1, 2)] * 3


def test_nobody_waits_for_a_worker_that_has_finished_the_step() -> None:
    """A swap with a worker that was alone in that step."""

    @dataclass(frozen=True)
    class Once(Chatting, name="once"):
        async def step(self, w: Worker) -> None:
            await w.grad()
            if w.rank == 0 or w.t > 0:
                met = await w.swap(1 - w.rank, w.x)
                SEEN.append((w.rank, w.t, met))
            w.v += 1

    engine(Once(), 2).run(3)
    assert sorted((rank, t, met.present) for rank, t, met in SEEN) == [
        (0, 0, (0,)),
        *((0, t, (0, 1)) for t in (1, 2)),
        *((1, t, (0, 1)) for t in (1, 2)),
    ]


def test_a_deadlock_names_who_is_missing_where() -> None:
    with pytest.raises(Deadlock) as caught:
        engine(Stubborn()).run(2)
    text = str(caught.value)
    assert "worker:0 at test_meetings.py:" in text
    assert "meeting: 1 of 2 have arrived at step 0, missing worker 1" in text


@pytest.mark.parametrize(
    ("scheme", "why"),
    [(Deaf(), "takes the vector of worker 1, which gives it to nobody"), (Outside(), "with worker 7, which is not")],
)
def test_what_cannot_be_is_refused(scheme: Scheme, why: str) -> None:
    with pytest.raises(SchemeError, match=why):
        engine(scheme).run(1)


def test_vectors_cross_the_network_once_each_way() -> None:
    """4 numbers of 4 bytes: 16 bytes to the next worker, 16 from the one before."""
    run = engine(Chatting(), cost=Cost(network=NetworkLink(latency=0.5, bandwidth=16.0)))
    run.run(1)
    assert run.now == pytest.approx(1.0 + (0.5 + 1.0) + (0.5 + 1.0))


def test_the_model_is_the_mean_of_all() -> None:
    run = engine(Chatting(), 4)
    run.run(1)
    for seat in run.seats:
        seat.worker.x = torch.full_like(seat.worker.x, seat.worker.rank)
    assert run.model().eq(1.5).all()
    assert simulate("toy", "d-psgd", workers=3, steps=5).updates == 5
