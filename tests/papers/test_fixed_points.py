"""Where schemes come to rest, and how far they scatter about it. Algorithms, section 11.5."""

from __future__ import annotations

import pytest
import torch
from oracles import run

from paceline import Task
from paceline.simulator.engine import SimulationEngine
from paceline.tasks.quadratic import quadratic

CURVATURES, CENTRES, TIMES = (1.0, 2.0, 0.5), (0.0, 1.0, 4.0), (1.0, 2.0, 5.0)
SPEEDS = tuple(1 / seconds for seconds in TIMES)


def three() -> Task:
    """f_i(x) = h_i/2 (x - s_i)^2 for three workers that disagree."""
    return quadratic(dim=1, curvatures=CURVATURES, centres=CENTRES, dtype="float64")


def rest(name: str, steps: int, **options: object) -> float:
    return run(three(), name, 3, steps, **options).vector.item()


def weighted(weights: tuple[float, ...]) -> float:
    return sum(w * s for w, s in zip(weights, CENTRES, strict=True)) / sum(weights)


FAIR = weighted(CURVATURES)
HASTY = weighted(tuple(h / seconds for h, seconds in zip(CURVATURES, TIMES, strict=True)))


def test_the_example_has_its_published_values() -> None:
    assert pytest.approx(1.1429, abs=5e-5) == FAIR
    assert pytest.approx(0.6667, abs=5e-5) == HASTY


@pytest.mark.parametrize("name", ["sync", "allreduce", "sync-rates"])
@pytest.mark.parametrize("speeds", [(), SPEEDS])
def test_synchronous_schemes_rest_at_the_optimum_whatever_the_speeds(name: str, speeds: tuple[float, ...]) -> None:
    assert rest(name, 600, lr=0.1, speeds=speeds) == pytest.approx(FAIR, abs=1e-9)


def pace(e: SimulationEngine, places: list[float]) -> None:
    places.append(e.centre.x.item())


@pytest.mark.parametrize("name", ["async", "downpour-easy", "agn", "dynsgd", "hogwild"])
def test_asynchronous_schemes_favour_the_fast(name: str) -> None:
    """Worker i pushes 1 / time_i as often, and so counts."""
    places: list[float] = []
    hyper = {} if name in ("async", "hogwild") else {"window": 1}
    run(three(), name, 3, 2550, lr=4e-3, speeds=SPEEDS, watch=lambda e: pace(e, places), **hyper)
    mean = sum(places[-850:]) / 850  # fifty times the 10 s in which everybody is back where it began
    if name == "dynsgd":  # it gives some of that back: the slow are stale, and count less still
        assert mean < HASTY - 0.05
    else:
        assert mean == pytest.approx(HASTY, abs=4e-3)


def test_random_times_favour_the_fast_no_less() -> None:
    places: list[float] = []
    options = {"compute": "exponential:1", "speeds": SPEEDS}
    run(three(), "async", 3, 8000, lr=3e-3, watch=lambda e: pace(e, places), **options)
    mean = sum(places[3000:]) / 5000
    assert mean == pytest.approx(HASTY, abs=0.03)
    assert abs(mean - FAIR) > 0.3


def test_equal_workers_rest_at_the_optimum_even_asynchronously() -> None:
    assert rest("async", 4500, lr=4e-3) == pytest.approx(FAIR, abs=8e-3)


@pytest.mark.parametrize("window", [1, 2, 5, 20])
@pytest.mark.parametrize("lr", [0.02, 0.3])
def test_averaging_weighs_by_the_distance_that_a_window_covers(window: int, lr: float) -> None:
    covered = tuple(1 - (1 - lr * h) ** window for h in CURVATURES)
    rounds = 1000 // window + 50
    assert rest("averaging", rounds, lr=lr, window=window) == pytest.approx(weighted(covered), abs=1e-9)


def test_the_bias_of_averaging_grows_with_the_window() -> None:
    places = [rest("averaging", 100, lr=0.3, window=window) for window in (1, 2, 5, 20)]
    assert places[0] == pytest.approx(FAIR, abs=1e-9)
    assert places == sorted(places)
    assert places[-1] > 1.5  # endless windows would give the mean of the centres, 5/3


@pytest.mark.parametrize("window", [2, 10])
def test_sagn_rests_where_averaging_does(window: int) -> None:
    """It goes a share of the same way."""
    averaging = rest("averaging", 200, lr=0.1, window=window)
    assert rest("sagn", 500, lr=0.1, window=window) == pytest.approx(averaging, abs=1e-9)


@pytest.mark.parametrize(("name", "lr", "tolerance"), [("easgd", 0.05, 1e-9), ("aeasgd", 0.005, 7e-3)])
def test_elastic_workers_rest_where_springs_and_slopes_balance(name: str, lr: float, tolerance: float) -> None:
    """Worker i at y_i: lr h_i (y_i - s_i) + alpha (y_i - x) = 0, x at the mean of the y_i, give or take an exchange."""
    alpha = 4 * lr
    pull = tuple(lr * h * alpha / (lr * h + alpha) for h in CURVATURES)  # slope and spring in series
    assert weighted(pull) - FAIR > 0.05
    steps = 900 if name == "easgd" else 6000
    assert rest(name, steps, lr=lr, alpha=alpha, window=1) == pytest.approx(weighted(pull), abs=tolerance)


class TestStationaryVariance:
    """lr s^2 / (h (2 - lr h)) for noise s; the mean of N workers has s^2 / N. 4000 coordinates are as many samples."""

    H, NOISE = 2.0, 0.6

    def variance(self, name: str, workers: int, lr: float, **options: object) -> float:
        task = quadratic(dim=4000, curvature=self.H, noise=self.NOISE, dtype="float64")
        found: list[torch.Tensor] = []

        def late(e: SimulationEngine) -> None:
            if e.updates >= 160 and e.updates % 20 == 0:
                found.append(e.scheme.model(e.centre).clone())

        run(task, name, workers, 300, lr=lr, watch=late, **options)
        return float(torch.stack(found).square().mean())

    def law(self, lr: float, square: float) -> float:
        return lr * square / (self.H * (2 - lr * self.H))

    @pytest.mark.parametrize("lr", [0.05, 0.3, 0.8])
    def test_of_sgd(self, lr: float) -> None:
        assert self.variance("sgd", 1, lr) == pytest.approx(self.law(lr, self.NOISE**2), rel=0.04)

    @pytest.mark.parametrize("name", ["sync", "allreduce"])
    @pytest.mark.parametrize("workers", [2, 5])
    def test_of_synchronous_workers(self, name: str, workers: int) -> None:
        law = self.law(0.3, self.NOISE**2 / workers)
        assert self.variance(name, workers, 0.3) == pytest.approx(law, rel=0.04)

    def test_of_a_larger_batch(self) -> None:
        assert self.variance("sgd", 1, 0.3, batch=9) == pytest.approx(self.law(0.3, self.NOISE**2 / 9), rel=0.04)

    def test_of_slices_of_one_batch(self) -> None:
        sliced = self.variance("sync", 3, 0.3, batch=10, feed="slice")
        assert sliced == pytest.approx(self.law(0.3, self.NOISE**2 / 10), rel=0.04)

    def test_of_backup_workers(self) -> None:
        """Only those count that were averaged."""
        law = self.law(0.3, self.NOISE**2 / 3)
        assert self.variance("sync", 5, 0.3, aggregate=3, compute="exponential:1") == pytest.approx(law, rel=0.04)
