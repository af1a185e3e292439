"""Where schemes stop converging. Algorithms, section 10: limits 1, 2, 3, 5, 7, 8, on h/2 x^2 with c = lr * h."""

from __future__ import annotations

import math

import numpy as np
import pytest
from oracles import SEED, line, run

from paceline import LossError, stability

START = abs(line().start(SEED).item())


def end(name: str, workers: int, steps: int, c: float, **options: object) -> float:
    """|x| at the end, in units of the start; infinite where the loss overflowed."""
    try:
        return abs(run(line(curvature=4.0), name, workers, steps, lr=c / 4, **options).vector.item()) / START
    except LossError:
        return math.inf


def radius(matrix: np.ndarray) -> float:
    return float(np.abs(np.linalg.eigvals(matrix)).max())


class TestSynchronous:
    @pytest.mark.parametrize("name", ["sync", "allreduce"])
    @pytest.mark.parametrize("workers", [1, 4])
    def test_two_is_the_limit(self, name: str, workers: int) -> None:
        assert end(name, workers, 600, 1.97) < 1e-6
        assert end(name, workers, 600, 2.03) > 1e6

    @pytest.mark.parametrize("window", [1, 5])
    def test_two_is_the_limit_of_local_steps_too(self, window: int) -> None:
        assert end("averaging", 3, 600 // window, 1.97, window=window) < 1e-6
        assert end("averaging", 3, 600 // window, 2.03, window=window) > 1e6

    def test_at_two_it_swings_for_ever(self) -> None:
        assert end("sgd", 1, 1001, 2.0) == 1.0


class TestInTurn:
    """Every gradient is delay = workers - 1 versions old: x <- x - c * x_delay."""

    @pytest.mark.parametrize(("delay", "limit"), [(0, 2), (1, 1), (2, 0.618), (3, 0.445), (9, 0.165), (19, 0.0805)])
    def test_the_limits_have_their_published_values(self, delay: int, limit: float) -> None:
        assert stability.constant_delay(delay) == pytest.approx(limit, rel=4e-3)

    @pytest.mark.parametrize("delay", range(20))
    def test_at_the_limit_the_largest_root_has_length_one(self, delay: int) -> None:
        def largest(c: float) -> float:  # of z^(delay + 1) = z^delay - c
            return float(np.abs(np.roots([1.0, -1.0, *[0.0] * (delay - 1), c] if delay else [1.0, c - 1.0])).max())

        limit = stability.constant_delay(delay)
        assert largest(limit) == pytest.approx(1, abs=1e-9)
        assert largest(0.99 * limit) < 1 < largest(1.01 * limit)

    @pytest.mark.parametrize(("name", "workers"), [*(("async", n) for n in (1, 2, 4, 10)), ("hogwild", 4)])
    def test_just_below_it_converges_and_just_above_it_diverges(self, name: str, workers: int) -> None:
        limit = stability.constant_delay(workers - 1)
        assert end(name, workers, 2000, 0.97 * limit) < 1e-3
        assert end(name, workers, 2000, 1.03 * limit) > 15

    def test_groups_count_as_one_worker_each(self) -> None:
        limit = stability.constant_delay(2)
        assert end("groups", 6, 1000, 0.97 * limit, size=2) < 1e-3
        assert end("groups", 6, 1000, 1.03 * limit, size=2) > 30

    @pytest.mark.parametrize("weight", ["staleness", "constant"])
    def test_dynsgd_bears_as_many_times_more_as_there_are_workers(self, weight: str) -> None:
        limit = 4 * stability.constant_delay(3)
        assert end("dynsgd", 4, 1200, 0.97 * limit, window=1, weight=weight) < 1e-3
        assert end("dynsgd", 4, 1200, 1.03 * limit, window=1, weight=weight) > 30


class TestExponentialWorkers:
    @pytest.mark.parametrize(("workers", "limit"), [(2, 1.281), (4, 0.843), (8, 0.566), (10, 0.5), (20, 0.342)])
    def test_the_limits_have_their_published_values(self, workers: int, limit: float) -> None:
        assert stability.exponential_workers(workers) == pytest.approx(limit, rel=1e-3)

    @pytest.mark.parametrize("workers", [1, 2, 3, 4, 6])
    def test_at_the_limit_second_moments_neither_grow_nor_shrink(self, workers: int) -> None:
        """With z = (x, y_1 … y_N) and a random worker i: x <- x - c y_i, y_i <- x, a linear map of z z^T on average."""

        def growth(c: float) -> float:
            total = np.zeros(((workers + 1) ** 2,) * 2)
            for i in range(1, workers + 1):
                push = np.eye(workers + 1)
                push[0, i] = -c
                push[i] = push[0]
                total += np.kron(push, push) / workers
            return radius(total)

        limit = stability.exponential_workers(workers)
        assert growth(limit) == pytest.approx(1, abs=1e-9)
        assert growth(0.98 * limit) < 1 < growth(1.02 * limit)

    @pytest.mark.parametrize("workers", [2, 4, 8])
    def test_the_mean_square_shrinks_below_and_grows_above(self, workers: int) -> None:
        def mean_square(share: float) -> float:
            c = share * stability.exponential_workers(workers)
            runs = (end("async", workers, 400, c, compute="exponential:1", seed=seed) for seed in range(8))
            return sum(x**2 for x in runs) / 8

        assert mean_square(0.7) < 1e-6
        assert mean_square(1.5) > 1e4

    def test_random_order_bears_more_than_taking_turns(self) -> None:
        c = 2 * stability.constant_delay(9)
        assert end("async", 10, 1500, c) > 1e6
        assert end("async", 10, 1500, c, compute="exponential:1") < 1e-3


class TestWindows:
    """Ten workers in turn; a window covers 1 - (1 - c)^window of the distance, and that takes the place of c."""

    LIMIT = stability.constant_delay(9)

    def downpour(self, window: int) -> float:
        return 1 - (1 - self.LIMIT) ** (1 / window)

    def agn(self, window: int) -> float:
        return 1 - (1 - window * self.LIMIT) ** (1 / window)

    def test_the_limits_have_their_published_values(self) -> None:
        assert [self.downpour(window) for window in (1, 5, 10, 20)] == pytest.approx(
            [0.165, 0.035, 0.018, 0.009], abs=5e-4
        )
        assert [self.agn(window) for window in (1, 5)] == pytest.approx([0.165, 0.295], abs=5e-4)
        assert stability.window_gain(1.0, 6) / 6 > self.LIMIT > stability.window_gain(1.0, 7) / 7

    @pytest.mark.parametrize("window", [1, 5, 10, 20])
    def test_the_gain_is_what_a_window_covers(self, window: int) -> None:
        gain = stability.window_gain(self.downpour(window), window)
        assert gain == pytest.approx(self.LIMIT)
        assert end("downpour-easy", 1, 1, self.downpour(window), window=window) == pytest.approx(1 - gain)
        mean = stability.window_gain(0.3, window) / window
        assert end("agn", 1, 1, 0.3, window=window) == pytest.approx(1 - mean)

    @pytest.mark.parametrize("window", [1, 10])
    @pytest.mark.parametrize("name", ["downpour-easy", "downpour"])
    def test_downpour_converges_below_and_diverges_above(self, name: str, window: int) -> None:
        hyper = {"window": window} | ({"server_rule": "sgd"} if name == "downpour" else {})
        c = self.downpour(window)
        assert end(name, 10, 900, 0.93 * c, **hyper) < 0.02
        assert end(name, 10, 900, 1.07 * c, **hyper) > 10

    def test_agn_converges_below_and_diverges_above(self) -> None:
        assert end("agn", 10, 1500, 0.93 * self.agn(5), window=5) < 0.02
        assert end("agn", 10, 1500, 1.07 * self.agn(5), window=5) > 5

    def test_a_long_window_makes_agn_stable_for_every_sensible_rate(self) -> None:
        assert max(end("agn", 10, 700, c, window=7) for c in (0.1, 0.4, 1.0)) < 1e-2


class TestElastic:
    @pytest.mark.parametrize("workers", [1, 6])
    @pytest.mark.parametrize("c", [0.3, 1.0, 1.7])
    def test_easgd_converges_below_its_beta_and_diverges_above(self, workers: int, c: float) -> None:
        limit = stability.easgd_beta(c, workers)
        assert end("easgd", workers, 400, c, beta=0.95 * limit) < 1e-3
        assert end("easgd", workers, 400, c, beta=1.05 * limit) > 30

    @pytest.mark.parametrize("workers", [1, 2, 5, 50])
    @pytest.mark.parametrize("c", [0.1, 0.5, 1.0, 1.9])
    def test_at_its_beta_the_largest_root_has_length_one(self, workers: int, c: float) -> None:
        def growth(beta: float) -> float:  # of (mean of y, x)
            return radius(np.array([[1 - c - beta / workers, beta / workers], [beta, 1 - beta]]))

        limit = stability.easgd_beta(c, workers)
        assert growth(limit) == pytest.approx(1, abs=1e-9)
        assert growth(0.99 * limit) < 1 < growth(1.01 * limit)

    @pytest.mark.parametrize("workers", [1, 2, 7])
    @pytest.mark.parametrize("c", [0.3, 1.0, 1.7])
    def test_aeasgd_converges_below_its_alpha_however_many_workers(self, workers: int, c: float) -> None:
        assert end("aeasgd", workers, 250 * workers, c, alpha=0.94 * stability.aeasgd_alpha(c), window=1) < 1e-2

    @pytest.mark.parametrize("c", [0.3, 1.0, 1.7])
    def test_alone_aeasgd_diverges_above_its_alpha(self, c: float) -> None:
        assert end("aeasgd", 1, 1000, c, alpha=1.04 * stability.aeasgd_alpha(c), window=1) > 30

    def test_one_worker_has_one_limit_in_both_forms(self) -> None:
        for c in (0.1, 0.7, 1.3, 1.9):
            assert stability.aeasgd_alpha(c) == pytest.approx(stability.easgd_beta(c, 1))

    def test_many_workers_bear_a_beta_of_two(self) -> None:
        assert stability.easgd_beta(0.5, 10**6) == pytest.approx(2, rel=1e-5)
