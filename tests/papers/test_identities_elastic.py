"""Elastic averaging (arXiv 1412.6651). Algorithms, sections 4 and 9: identities 20, 21, 22, and consensus alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from oracles import EXACT, SEED, Gradients, alone, bowl, crew, descent, engine, network, pushes, run
from torch import Tensor

from paceline import Task
from paceline.simulator.engine import SimulationEngine

LR, RANDOM = 0.05, "exponential:1"
in_double = pytest.mark.parametrize("task", [bowl, network])


def places(held: SimulationEngine) -> list[Tensor]:
    return [seat.worker.x.clone() for seat in held.seats]


def centre(held: SimulationEngine) -> Tensor:
    return held.scheme.model(held.centre).clone()


def scattered(name: str, workers: int, **hyper: object) -> tuple[SimulationEngine, list[Tensor], Tensor]:
    """Workers at places of their own, the centre at another, and no gradients: lr is 0."""
    held = engine(bowl(), name, workers, lr=0.0, **hyper)
    generator = torch.Generator().manual_seed(3)
    for seat in held.seats:
        seat.worker.x = torch.randn(23, generator=generator, dtype=torch.float64)
    return held, places(held), centre(held)


class TestNoSpring:
    @pytest.mark.parametrize("make", [bowl, lambda: network(torch.float32)], ids=["quadratic", "network in single"])
    @pytest.mark.parametrize(("name", "window"), [("easgd", 1), ("easgd", 3), ("aeasgd", 1), ("aeasgd", 4)])
    @pytest.mark.parametrize("compute", ["constant:1", RANDOM])
    def test_alpha_zero_is_independent_sgd_and_a_frozen_centre_bit_for_bit(
        self, make: Callable[[], Task], name: str, window: int, compute: str
    ) -> None:
        held = engine(make(), name, 3, compute, lr=LR, alpha=0.0, window=window)
        held.run(park_at=20)
        for rank, y in enumerate(places(held)):
            assert y.equal(descent(make(), 20, LR, rank, 3)), f"worker {rank}"
        assert centre(held).equal(make().start(SEED))

    def test_beta_zero_is_alpha_zero(self) -> None:
        assert run(bowl(), "aeasgd", 3, 9, beta=0.0).digest == run(bowl(), "aeasgd", 3, 9, alpha=0.0).digest


class TestMomentum:
    @in_double
    @pytest.mark.parametrize("window", [1, 3])
    @pytest.mark.parametrize("order", ["paper", "sequential"])
    def test_delta_zero_is_aeasgd_bit_for_bit(self, task: Callable[[], Task], window: int, order: str) -> None:
        hyper = {"lr": LR, "window": window, "order": order, "compute": RANDOM}
        plain, moved = (run(task(), name, 4, 60, **hyper) for name in ("aeasgd", "aeamsgd"))
        assert moved.digest != plain.digest
        assert run(task(), "aeamsgd", 4, 60, delta=0.0, **hyper).digest == plain.digest

    def test_every_worker_too_is_where_aeasgd_has_it(self) -> None:
        plain = engine(network(), "aeasgd", 3, RANDOM, lr=LR)
        two = plain, engine(network(), "aeamsgd", 3, RANDOM, lr=LR, delta=0.0)
        for held in two:
            held.run(park_at=25)
        assert all(a.equal(b) for a, b in zip(*map(places, two), strict=True))


class TestSynchronousListing:
    @in_double
    @pytest.mark.parametrize("window", [1, 3])
    @pytest.mark.parametrize("alpha", [None, 0.1])
    def test_everything_moves_from_the_values_before(
        self, task: Callable[[], Task], window: int, alpha: float | None
    ) -> None:
        rate = 0.9 / 4 if alpha is None else alpha
        x, gradients = task().start(SEED), crew(task(), 4)
        every = [x.clone() for _ in gradients]
        for t in range(21):
            moves = [-LR * g(y) for g, y in zip(gradients, every, strict=True)]
            if t % window == 0:
                springs = [rate * (y - x) for y in every]
                moves = [move - spring for move, spring in zip(moves, springs, strict=True)]
                x = x + sum(springs)
            every = [y + move for y, move in zip(every, moves, strict=True)]
        held = engine(task(), "easgd", 4, RANDOM, lr=LR, alpha=alpha, window=window)
        held.run(park_at=21)
        torch.testing.assert_close(places(held), every, **EXACT)
        torch.testing.assert_close(centre(held), x, **EXACT)

    @in_double
    def test_beta_one_puts_the_centre_on_the_mean_of_the_places_before(self, task: Callable[[], Task]) -> None:
        held = engine(task(), "easgd", 5, lr=LR, beta=1.0)
        for t in range(1, 15):
            before = places(held)
            held.run(park_at=t)
            torch.testing.assert_close(centre(held), sum(before) / 5, **EXACT)

    def test_every_worker_has_the_same_centre_bit_for_bit(self) -> None:
        held = engine(network(), "easgd", 4, RANDOM, lr=LR)
        held.run(park_at=20)
        assert all(seat.worker.centre.equal(centre(held)) for seat in held.seats)


class TestAsynchronousListing:
    @in_double
    @pytest.mark.parametrize("window", [1, 4])
    @pytest.mark.parametrize("order", ["paper", "sequential"])
    def test_an_exchange_every_window_gradients(self, task: Callable[[], Task], window: int, order: str) -> None:
        x, gradients, alpha = task().start(SEED), crew(task(), 4), 0.9 / 4
        every = [x.clone() for _ in gradients]
        for i in [*range(4), *pushes(alone(4), 40, window)]:  # first they all meet the centre, in turn
            z = every[i]
            e = alpha * (z - x)
            x, y = x + e, z - e
            y = y - LR * gradients[i](z if order == "paper" else y)
            for _ in range(window - 1):
                y = y - LR * gradients[i](y)
            every[i] = y
        result = run(task(), "aeasgd", 4, 44, lr=LR, window=window, order=order, compute=RANDOM)
        torch.testing.assert_close(result.vector, x, **EXACT)

    def test_where_the_gradient_is_taken_matters(self) -> None:
        ends = [run(bowl(), "aeasgd", 4, 40, lr=LR, window=1, order=order).vector for order in ("paper", "sequential")]
        assert (ends[0] - ends[1]).abs().max() > 1e-3

    @in_double
    @pytest.mark.parametrize("window", [1, 3])
    @pytest.mark.parametrize("order", ["paper", "sequential"])
    def test_eamsgd_looks_ahead_along_its_momentum(self, task: Callable[[], Task], window: int, order: str) -> None:
        x, g, alpha, delta, lr = task().start(SEED), Gradients(task()), 0.3, 0.9, 0.01
        y, m = x.clone(), torch.zeros_like(x)
        for t in range(30):
            z = y
            if t % window == 0:
                e = alpha * (z - x)
                x, y = x + e, y - e
            m = delta * m - lr * g((z if order == "paper" else y) + delta * m)
            y = y + m
        hyper = {"lr": lr, "alpha": alpha, "delta": delta, "order": order}
        held = engine(task(), "aeamsgd", 1, window=window, **hyper)
        held.run(park_at=30)
        torch.testing.assert_close(places(held)[0], y, **EXACT)
        torch.testing.assert_close(centre(held), x, **EXACT)


class TestConsensus:
    """No gradients: only the springs act."""

    @pytest.mark.parametrize("alpha", [0.0, 0.1, 0.5, 0.9, 1.0])
    def test_an_exchange_conserves_centre_plus_worker(self, alpha: float) -> None:
        held, (y,), x = scattered("aeasgd", 1, alpha=alpha, window=1)
        held.run(park_at=1)
        torch.testing.assert_close(centre(held) + places(held)[0], x + y, **EXACT)
        assert (places(held)[0].equal(y) and centre(held).equal(x)) == (alpha == 0.0)

    @pytest.mark.parametrize("name", ["easgd", "aeasgd", "aeamsgd"])
    def test_the_sum_of_centre_and_workers_is_conserved(self, name: str) -> None:
        held, every, x = scattered(name, 6, beta=0.9, window=1)
        for t in (1, 2, 10, 60):
            held.run(park_at=t)
            torch.testing.assert_close(centre(held) + sum(places(held)), x + sum(every), **EXACT)

    @pytest.mark.parametrize("name", ["easgd", "aeasgd", "aeamsgd"])
    def test_springs_bring_everybody_to_the_common_mean(self, name: str) -> None:
        held, every, x = scattered(name, 4, beta=0.9, window=1)
        held.run(park_at=300)
        mean = (x + sum(every)) / 5
        torch.testing.assert_close([centre(held), *places(held)], [mean] * 5, **EXACT)

    @pytest.mark.parametrize("name", ["easgd", "aeasgd", "aeamsgd"])
    def test_alpha_one_half_makes_both_their_mean(self, name: str) -> None:
        held, (y,), x = scattered(name, 1, alpha=0.5, window=1)
        held.run(park_at=1)
        torch.testing.assert_close([centre(held), *places(held)], [(x + y) / 2] * 2, **EXACT)

    @pytest.mark.parametrize("name", ["easgd", "aeasgd", "aeamsgd"])
    def test_alpha_one_swaps_them(self, name: str) -> None:
        held, (y,), x = scattered(name, 1, alpha=1.0, window=1)
        held.run(park_at=1)
        torch.testing.assert_close([centre(held), *places(held)], [y, x], **EXACT)

    @pytest.mark.parametrize("name", ["easgd", "aeasgd", "aeamsgd"])
    def test_alpha_zero_leaves_everybody_alone(self, name: str) -> None:
        held, every, x = scattered(name, 3, alpha=0.0, window=1)
        held.run(park_at=5)
        assert centre(held).equal(x)
        assert all(a.equal(b) for a, b in zip(places(held), every, strict=True))
