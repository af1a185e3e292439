"""Staleness, times and fixed points of the schemes between sync and async. Algorithms, sections 10 and 11."""

from __future__ import annotations

from typing import Any

import pytest
from oracles import line, run

from paceline import Result, simulate, stability
from paceline.simulator.engine import SimulationEngine
from paceline.tasks.quadratic import quadratic

UNEVEN = (1, 4, 0.5, 3, 1, 0.2, 7)


def still(name: str, workers: int, steps: int, **options: Any) -> Result:
    return run(line(), name, workers, steps, lr=0.0, **options)


def harmonic(n: int) -> float:
    return sum(1 / k for k in range(1, n + 1))


class TestConservation:
    """Sum of tau over all pushes + what is out = updates * (workers - k), or * (workers - 1) where nobody waits."""

    @pytest.mark.parametrize("compute", ["constant:1", "exponential:1", "pareto:1,1.1"])
    @pytest.mark.parametrize(("name", "hyper", "share"), [
        ("k-async", {"k": 1}, 6),
        ("k-async", {"k": 3}, 4),
        ("k-async", {"k": 7}, 0),
        ("k-batch-async", {"k": 1}, 6),
        ("k-batch-async", {"k": 5}, 6),
        ("k-batch-async", {"k": 12}, 6),
        ("softsync", {"n": 1}, 6),
        ("softsync", {"n": 3}, 6),
        ("dc-asgd", {}, 6),
        ("gap-aware", {}, 6),
        ("dana", {"variant": "zero"}, 6),
        ("dana", {"variant": "slim"}, 6),
        ("ormo", {}, 6),
        ("delay-adaptive", {}, 6),
        ("rescaled", {}, 6),
        ("fedasync", {}, 6),
        ("ssp", {"bound": None}, 6),
        ("ringmaster", {"threshold": 1000}, 6),
        ("drop-stale", {"bound": 1000}, 6),
        ("async-diloco", {"window": 2}, 6),
    ])  # fmt: skip
    def test_after_every_update(self, name: str, hyper: dict[str, Any], share: int, compute: str) -> None:
        seen = []

        def watch(e: SimulationEngine) -> None:
            assert e.scheduler is not None
            ledger = e.scheduler.ledger

            seen.append(ledger.cells.total + ledger.outstanding(e.updates))
            assert seen[-1] == e.updates * share

        result = still(name, 7, 40, compute=compute, speeds=UNEVEN, watch=watch, **hyper)
        assert len(seen) == result.updates == 40

    @pytest.mark.parametrize("k", [1, 2, 5])
    def test_the_mean_is_a_share_of_the_others(self, k: int) -> None:
        batch = still("k-batch-async", 5, 600, k=k, compute="exponential:1")
        assert batch.staleness.mean == pytest.approx(4 / k, rel=0.02)
        waits = still("k-async", 5, 600, k=k, compute="exponential:1")
        assert waits.staleness.mean == pytest.approx((5 - k) / k, rel=0.02, abs=1e-9)

    @pytest.mark.parametrize("bound", [0, 1, 3])
    def test_ssp_keeps_its_bound(self, bound: int) -> None:
        """Completed clocks differ by bound + 1 at most, and come to that."""
        most = 0

        def watch(e: SimulationEngine) -> None:
            nonlocal most
            clock = e.centre.clock
            most = max(most, int(clock.max() - clock.min()))

        still("ssp", 4, 400, bound=bound, compute="exponential:1", speeds=(1, 2, 5, 1), watch=watch)
        assert most == bound + 1

    @pytest.mark.parametrize("threshold", [1, 2, 5])
    @pytest.mark.parametrize("stop", [True, False])
    def test_ringmaster_admits_nothing_at_its_threshold(self, threshold: int, stop: bool) -> None:
        result = still("ringmaster", 6, 300, threshold=threshold, stop=stop, compute="exponential:1", speeds=UNEVEN[:6])
        assert result.staleness.max == threshold - 1
        assert (result.dropped == 0) == stop

    def test_ringleader_is_at_most_twice_as_stale_as_workers(self) -> None:
        result = still("ringleader", 5, 400, compute="exponential:1", speeds=UNEVEN[:5])
        assert 0 < result.staleness.max <= 2 * 5 - 2


class TestTimes:
    """Section 11.4."""

    def rate(self, name: str, workers: int, steps: int, **options: Any) -> float:
        return still(name, workers, steps, **options).virtual_seconds / steps

    @pytest.mark.parametrize(("name", "k"), [("k-sync", 1), ("k-sync", 5), ("k-async", 5)])
    def test_k_of_n_exponential_workers(self, name: str, k: int) -> None:
        mean = self.rate(name, 8, 500, k=k, compute="exponential:1")
        assert mean == pytest.approx(harmonic(8) - harmonic(8 - k), rel=0.07)

    def test_a_shift_adds_to_every_round_of_k_sync(self) -> None:
        mean = self.rate("k-sync", 8, 400, k=5, compute="shifted-exponential:2,0.5")
        assert mean == pytest.approx(2 + 0.5 * (harmonic(8) - harmonic(3)), rel=0.03)
        waits = self.rate("k-async", 8, 400, k=5, compute="shifted-exponential:2,0.5")
        assert waits < mean

    @pytest.mark.parametrize("name", ["k-batch-sync", "rennala", "k-batch-async"])
    def test_k_batches_of_n_exponential_workers(self, name: str) -> None:
        assert self.rate(name, 8, 500, k=5, compute="exponential:1") == pytest.approx(5 / 8, rel=0.06)

    def test_k_batches_of_any_law(self) -> None:
        mean = self.rate("k-batch-async", 4, 500, k=6, compute="gamma:2,0.6")
        assert mean == pytest.approx(6 * 2 / 4, rel=0.03)
        sync = self.rate("k-batch-sync", 4, 300, k=3, compute="uniform:1,3")
        assert sync <= 1 + 2 * 3 / 5 + 0.02  # the third of four

    def test_a_larger_bound_lets_ssp_go_faster(self) -> None:
        rates = [1 / (8 * self.rate("ssp", 8, 2400, bound=bound, compute="exponential:1")) for bound in (0, 1, 4)]
        assert rates == pytest.approx([0.368, 0.55, 0.78], abs=0.03)

    def test_a_gradient_ends_when_it_is_stopped(self) -> None:
        """Times 1, 1 and 10: the slow worker begins again with every version."""
        result = still("k-sync", 3, 30, k=2, speeds=(1, 1, 0.1))
        assert result.virtual_seconds == 30.0
        assert result.gradients == 60  # the third is stopped every second, and never finishes

    def test_a_stop_is_a_message(self) -> None:
        """Half a second of latency: the slow worker hears of version 1 half a second after it is made."""
        told: list[float] = []

        def watch(e: SimulationEngine) -> None:
            told.append(e.now)

        still("k-sync", 2, 4, k=1, speeds=(1, 0.1), network="latency=0.5", watch=watch)
        pull, push = 1.0, 0.5
        assert told[0] == pull + 1 + push


class TestFixedPoints:
    """f_i = h_i / 2 (x - s_i)^2 with workers of times 1, 2 and 5: section 11.5."""

    FAIR, HASTY = 1.1429, 0.6667

    def rest(self, name: str, steps: int, lr: float, **options: Any) -> float:
        places: list[float] = []
        task = quadratic(dim=1, curvatures=(1.0, 2.0, 0.5), centres=(0.0, 1.0, 4.0), dtype="float64")
        speeds = (1.0, 0.5, 0.2)
        run(task, name, 3, steps, lr=lr, speeds=speeds, watch=lambda e: places.append(e.centre.x.item()), **options)
        return sum(places[-340:]) / 340

    @pytest.mark.parametrize(("name", "steps"), [("malenia", 600), ("ringleader", 900), ("ace", 1500)])
    def test_tables_of_all_workers_rest_at_the_optimum(self, name: str, steps: int) -> None:
        assert self.rest(name, steps, 0.02) == pytest.approx(self.FAIR, abs=2e-3)

    @pytest.mark.parametrize("hyper", [{}, {"times": (1.0, 2.0, 5.0)}])
    def test_rescaled_rests_at_the_optimum(self, hyper: dict[str, Any]) -> None:
        assert self.rest("rescaled", 1700, 8e-3, **hyper) == pytest.approx(self.FAIR, abs=2e-2)

    @pytest.mark.parametrize("name", ["ringmaster", "delay-adaptive", "k-batch-async", "rennala"])
    def test_those_that_take_what_comes_favour_the_fast(self, name: str) -> None:
        assert self.rest(name, 850, 1.2e-2) < self.FAIR - 0.3


class TestWarnings:
    def said(self, name: str, workers: int, **options: Any) -> list[str]:
        return simulate(line(), name, workers=workers, steps=2, warn=lambda _: None, **options).warnings

    def test_ssp_is_held_to_its_worst_case(self) -> None:
        worst = stability.constant_delay(7 * 3)  # bound 3, four workers: (2 * 3 + 1) * 3 missing updates
        assert self.said("ssp", 4, lr=0.99 * worst) == []
        assert "21 missing updates" in self.said("ssp", 4, lr=1.01 * worst)[0]
        assert "asynchronous workers" in self.said("ssp", 4, lr=1.01 * stability.constant_delay(3))[0]

    def test_momentum_counts_in_dana_and_ormo(self) -> None:
        limit = stability.constant_delay(3) * 0.1
        for name in ("dana", "ormo"):
            assert not [text for text in self.said(name, 4, lr=0.99 * limit) if "crosses" in text]
            assert "crosses" in self.said(name, 4, lr=1.01 * limit)[0]

    def test_a_large_constant_lam_is_named(self) -> None:
        assert self.said("dc-asgd", 2, lr=0.01) == []
        assert "adaptive" in self.said("dc-asgd", 2, lr=0.01, lam=5.0)[0]
        assert self.said("dc-asgd", 2, lr=0.01, lam=5.0, adaptive=True) == []

    def test_what_counts_all_workers_alike_is_not_told_about_the_fast(self) -> None:
        options = {"task_options": {"dim": 2, "heterogeneity": 1.0}, "workers": 2, "steps": 2, "lr": 0.01}
        for name in ("rescaled", "ringleader", "ace", "malenia"):
            assert simulate("quadratic", name, speeds=(1, 2), **options).warnings == []
        told = simulate("quadratic", "ringmaster", speeds=(1, 2), warn=lambda _: None, **options).warnings
        assert "rescaled" in told[0]
