"""Decentralised schemes: D-PSGD (arXiv 1705.09056), AD-PSGD (1710.06952), SGP (1811.10792), GoSGD
(1804.01852). Identities 29 and 30, what mixing conserves, how fast it mixes, and how much is sent."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracles import EXACT, SEED, bowl, descent, engine, network, run
from torch import Tensor

from paceline import Task
from paceline.config.build import scheme_of
from paceline.ops import Meet
from paceline.schemes._topologies import neighbours, second_eigenvalue
from paceline.simulator.engine import SimulationEngine

LR, RANDOM = 0.05, "exponential:1"
in_double = pytest.mark.parametrize("task", [bowl, network])


def scattered(name: str, workers: int, **hyper: Any) -> tuple[SimulationEngine, Tensor]:
    """Workers at places of their own, and no gradients: lr is 0. Gives the places too, a row each."""
    held = engine(bowl(), name, workers, RANDOM, lr=0.0, **hyper)
    generator = torch.Generator().manual_seed(3)
    for seat in held.seats:
        seat.worker.x = torch.randint(-1000, 1000, (23,), generator=generator).double()
    return held, places(held)


def places(held: SimulationEngine) -> Tensor:
    return torch.stack([seat.worker.x for seat in held.seats])


def mixing(topology: Any, workers: int) -> Tensor:
    """W, written down entry by entry."""
    w = torch.zeros(workers, workers, dtype=torch.float64)
    for i in range(workers):
        near = neighbours(topology, i, workers)
        for j in (i, *near):
            w[i, j] = 1 / (1 + len(near))
    return w


class TestIdentities:
    @in_double
    @pytest.mark.parametrize("hyper", [{"topology": "full", "order": "atc"}], ids=["atc"])
    def test_d_psgd_atc_on_a_full_graph_is_synchronous_sgd(
        self, task: Callable[[], Task], hyper: dict[str, str]
    ) -> None:
        held = engine(task(), "d-psgd", 4, RANDOM, lr=LR, **hyper)
        held.run(30)
        torch.testing.assert_close(held.model(), run(task(), "allreduce", 4, 30, lr=LR).vector, **EXACT)

    def test_d_psgd_cta_on_a_full_graph_is_not(self) -> None:
        """The gradients are taken at models that have not been averaged: it shows where they are not linear."""
        held = engine(network(), "d-psgd", 4, lr=LR, topology="full", order="cta")
        held.run(30)
        assert (held.model() - run(network(), "allreduce", 4, 30, lr=LR).vector).abs().max() > 1e-6

    @in_double
    def test_sgp_that_pushes_to_all_is_synchronous_sgd(self, task: Callable[[], Task]) -> None:
        held = engine(task(), "sgp", 5, RANDOM, lr=LR, topology="full")
        held.run(30)
        torch.testing.assert_close(held.model(), run(task(), "allreduce", 5, 30, lr=LR).vector, **EXACT)

    @pytest.mark.parametrize("make", [bowl, lambda: network(torch.float32)], ids=["quadratic", "network in single"])
    @pytest.mark.parametrize("order", ["cta", "atc"])
    def test_d_psgd_without_neighbours_is_independent_sgd_bit_for_bit(
        self, make: Callable[[], Task], order: str
    ) -> None:
        held = engine(make(), "d-psgd", 3, RANDOM, lr=LR, topology="alone", order=order)
        held.run(20)
        for rank, seat in enumerate(held.seats):
            assert seat.worker.x.equal(descent(make(), 20, LR, rank, 3)), f"worker {rank}"

    @pytest.mark.parametrize("make", [bowl, lambda: network(torch.float32)], ids=["quadratic", "network in single"])
    def test_gosgd_that_never_sends_is_independent_sgd_bit_for_bit(self, make: Callable[[], Task]) -> None:
        held = engine(make(), "gosgd", 3, RANDOM, lr=LR, p=0.0)
        held.run(20)
        for rank, seat in enumerate(held.seats):
            assert seat.worker.x.equal(descent(make(), 20, LR, rank, 3)), f"worker {rank}"

    @pytest.mark.parametrize("name", ["d-psgd", "ad-psgd", "sgp", "gosgd"])
    def test_one_worker_is_sequential_sgd_bit_for_bit(self, name: str) -> None:
        held = engine(network(), name, 1, lr=LR)
        held.run(20)
        assert held.model().equal(descent(network(), 20, LR, 0, 1))

    def test_two_in_a_ring_are_a_pair_of_ad_psgd_bit_for_bit(self) -> None:
        ours, theirs = (engine(network(), name, 2, RANDOM, lr=LR) for name in ("d-psgd", "ad-psgd"))
        for held in (ours, theirs):
            held.run(20)
        assert places(ours).equal(places(theirs))


class TestMixing:
    @pytest.mark.parametrize("topology", ["ring", "torus", "exponential", "full"])
    @pytest.mark.parametrize("workers", [2, 3, 4, 6, 9, 12])
    def test_w_is_symmetric_and_doubly_stochastic_and_d_psgd_multiplies_by_it(
        self, topology: str, workers: int
    ) -> None:
        w = mixing(topology, workers)
        assert w.equal(w.T)
        torch.testing.assert_close(w.sum(0), torch.ones(workers, dtype=torch.float64), **EXACT)
        held, before = scattered("d-psgd", workers, topology=topology)
        held.run(3)
        torch.testing.assert_close(places(held), w @ w @ w @ before, **EXACT)
        torch.testing.assert_close(held.model(), before.mean(0), **EXACT)

    @pytest.mark.parametrize("workers", [4, 7, 10])
    def test_models_in_a_ring_come_together_by_the_second_eigenvalue(self, workers: int) -> None:
        rho = (1 + 2 * math.cos(2 * math.pi / workers)) / 3
        assert second_eigenvalue("ring", workers) == pytest.approx(max(rho, 1 / 3))
        held, _ = scattered("d-psgd", workers, topology="ring")
        wave = torch.tensor([math.cos(2 * math.pi * i / workers) for i in range(workers)], dtype=torch.float64)
        for seat, height in zip(held.seats, wave, strict=True):
            seat.worker.x = height.expand(23).clone()
        held.run(4)
        torch.testing.assert_close(places(held)[:, 0], rho**4 * wave, **EXACT)

    def test_the_distance_between_models_grows_with_lr_and_with_the_gap(self) -> None:
        """Consensus error is about lr / (1 - rho) times the difference between the workers' gradients."""

        def distance(topology: str, lr: float) -> float:
            held = engine(bowl(noise=0.0), "d-psgd", 8, lr=lr, topology=topology)
            held.run(200)
            here = places(held)
            return float((here - here.mean(0)).norm())

        ring = distance("ring", 0.002)
        assert distance("ring", 0.004) / ring == pytest.approx(2, rel=0.05)
        gaps = [1 - second_eigenvalue(topology, 8) for topology in ("ring", "exponential")]  # type: ignore[arg-type]
        assert gaps[0] < gaps[1]
        assert distance("exponential", 0.002) < ring

    @pytest.mark.parametrize("pairs", ["random", "bipartite"])
    @pytest.mark.parametrize("workers", [2, 3, 4, 5, 8])
    def test_ad_psgd_pairs_up_and_conserves_the_sum(self, pairs: str, workers: int) -> None:
        scheme: Any = scheme_of("ad-psgd", {"pairs": pairs})
        met = set()
        for t in range(40):
            partners = [scheme.partner_at(rank, workers, t, SEED) for rank in range(workers)]
            assert sum(one is None for one in partners) <= max(workers % 2, 0)
            for rank, other in enumerate(partners):
                if other is not None:
                    assert other != rank
                    assert partners[other] == rank
                    met.add((rank, other))
        even = [pair for pair in met if (pair[0] + pair[1]) % 2]
        whole = workers * (workers - 1) if pairs == "random" else 2 * (workers // 2) * ((workers + 1) // 2)
        assert len(met if pairs == "random" else even) == whole
        held, before = scattered("ad-psgd", workers, pairs=pairs)
        held.run(12)
        torch.testing.assert_close(places(held).sum(0), before.sum(0), rtol=0.0, atol=1e-8)
        assert (places(held) - before.mean(0)).norm() < (before - before.mean(0)).norm()

    @pytest.mark.parametrize("k", [1, 2, 3, 4])
    @pytest.mark.parametrize("overlap", [False, True])
    def test_sgp_averages_exactly_in_k_steps_with_2_to_the_k_workers(self, k: int, overlap: bool) -> None:
        held, before = scattered("sgp", 1 << k, overlap=overlap)
        held.run(k)
        assert places(held).equal(before.mean(0).expand(1 << k, -1))
        assert [seat.worker.weight for seat in held.seats] == [1.0] * (1 << k)

    @pytest.mark.parametrize("workers", [3, 5, 6, 7])
    def test_the_weights_of_sgp_add_up_to_the_number_of_workers(self, workers: int) -> None:
        """Halves of halves are exact for some 50 steps: until then it is an equality."""
        held, before = scattered("sgp", workers)
        for steps in range(1, 20):
            held.run(steps)
            assert sum(seat.worker.weight for seat in held.seats) == workers
            torch.testing.assert_close(places(held).sum(0), before.sum(0), rtol=0.0, atol=1e-8)
        held.run(200)
        assert sum(seat.worker.weight for seat in held.seats) == pytest.approx(workers)
        torch.testing.assert_close(held.model(), before.mean(0), rtol=0.0, atol=1e-8)

    @pytest.mark.parametrize("workers", [2, 3, 5, 8])
    @pytest.mark.parametrize("p", [0.2, 1.0])
    def test_gosgd_conserves_weights_and_what_they_weigh(self, workers: int, p: float) -> None:
        held, before = scattered("gosgd", workers, p=p)
        for steps in range(1, 15):
            held.run(steps)
            weights = torch.tensor([seat.worker.weight for seat in held.seats], dtype=torch.float64)
            assert weights.sum() == workers  # halves of halves are exact so far
            torch.testing.assert_close(weights @ places(held), before.sum(0), rtol=0.0, atol=1e-8)
        assert (places(held) - places(held).mean(0)).norm() < 0.9 * (before - before.mean(0)).norm()

    def test_gosgd_sends_as_often_as_it_says_and_to_all_alike(self) -> None:
        scheme: Any = scheme_of("gosgd", {"p": 0.25})
        sent = [pair for t in range(2000) for pair in scheme.messages(4, t, SEED).items()]
        assert len(sent) / (2000 * 4) == pytest.approx(0.25, abs=0.02)
        assert all(s != r for s, r in sent)
        shares = [sent.count((s, r)) / len(sent) for s in range(4) for r in range(4) if s != r]
        assert shares == pytest.approx([1 / 12] * 12, abs=0.02)


class TestVolume:
    @pytest.mark.parametrize(
        ("name", "hyper", "sent"),
        [
            ("d-psgd", {"topology": "ring"}, 2),
            ("d-psgd", {"topology": "torus"}, 4),
            ("d-psgd", {"topology": "exponential"}, 7),
            ("d-psgd", {"topology": "alone"}, 0),
            ("ad-psgd", {}, 1),
            ("sgp", {}, 1),
        ],
    )
    def test_a_worker_sends_so_many_vectors_a_step(self, name: str, hyper: dict[str, str], sent: int) -> None:
        held = engine(bowl(), name, 16, lr=LR, **hyper)
        seen: list[Meet] = []
        arrive = held.meetings.arrive

        def counted(rank: int, op: Meet, ticket: Any) -> Any:
            seen.append(op)
            return arrive(rank, op, ticket)

        held.meetings.arrive = counted  # type: ignore[method-assign]
        held.run(5)
        assert sum(len(op.to) for op in seen) == sum(len(op.of) for op in seen) == sent * 16 * 5


class TestWarnings:
    @pytest.mark.parametrize(("workers", "told"), [(8, False), (16, False), (17, True), (32, True)])
    def test_a_ring_of_more_than_16_mixes_slowly(self, workers: int, told: bool) -> None:
        found = [text for text in scheme_of("d-psgd", {}).warnings(workers, None) if "mix slowly" in text]
        assert bool(found) == told

    def test_an_exponential_graph_of_as_many_does_not(self) -> None:
        assert not list(scheme_of("d-psgd", {"topology": "exponential"}).warnings(64, None))
