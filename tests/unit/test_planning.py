"""`paceline plan`: spellings, forecasts with known answers, laws, failures, refusals, the report."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline import UsageError, plan
from paceline.cli.main import main
from paceline.compute_times import ComputeTime, Constant, Gamma, LogNormal, ShiftedExponential
from paceline.config import build
from paceline.config.planning import SCHEMES
from paceline.experiments.length import Goal
from paceline.planning import check, measure
from paceline.planning.check import calibrated
from paceline.planning.failures import Failures
from paceline.planning.forecast import Assumptions, coarsened, simulated, throughput
from paceline.planning.laws import SumOf, fitted, law_text, mean_of_law
from paceline.planning.learning import Needed, sizes_within
from paceline.planning.measure import Arithmetic, Software
from paceline.planning.spelling import Stragglers, count_text, duration, network_of, seconds_text, worker_numbers
from paceline.planning.timed_engine import MessageCosts
from paceline.planning.timing_task import TimingTask
from paceline.simulator.cost import Cost, NetworkLink
from paceline.simulator.engine import SimulationEngine
from paceline.simulator.faults import parse_fault

GRADIENT, BATCH, SIZE = 0.01, 32, 4_000_000


def assumed(**changes: Any) -> Assumptions:
    """A gradient of 10 ms, a vector of 4 MB, a network and a processor that cost nothing."""
    names = [*SCHEMES.split(","), "downpour", "d-psgd"]
    plain = Assumptions(
        gradient=measure.given_gradients(GRADIENT),
        batch=BATCH,
        vector_bytes=SIZE,
        network=NetworkLink(),
        software=Software(0.0, 0.0),
        arithmetic={name: Arithmetic(0.0) for name in names},
    )
    return replace(plain, **changes)


def rate(name: str, workers: int, given: Assumptions, **hyper: Any) -> float:
    return throughput(name, build.scheme_of(name, hyper), workers, given).samples_per_second


class TestCheck:
    @pytest.mark.parametrize(
        ("name", "workers", "empty"),
        [("async", 4, 5e-6), ("async", 2, 80e-6), ("sync", 4, 300e-6), ("aeasgd", 2, 80e-6)],
    )
    def test_costs_are_such_that_a_run_without_gradients_takes_what_was_measured(
        self, name: str, workers: int, empty: float
    ) -> None:
        """Also where the calls alone, which were measured one by one, would take longer."""
        scheme, given = build.scheme_of(name, {}), assumed()
        calls = dict.fromkeys(scheme.methods, 2e-05)
        costs = calibrated(scheme, workers, empty, 1e-6, given, MessageCosts(per_call=0.0, calls=calls, mean=0.0))
        law = Constant(1e-6)
        found = simulated(scheme, workers, TimingTask(64), law, given, costs).samples_per_second
        assert 1 / found == pytest.approx(empty, rel=0.02)

    def test_more_expensive_exchanges_are_forecast_slower(self) -> None:
        given = assumed(gradient=measure.given_gradients(300e-6))
        forecasts = [
            check._forecast("async", build.scheme_of("async", {}), 2, check._Here(300e-6, 0.0, empty, 1e-6), given)
            for empty in (10e-6, 100e-6)
        ]
        # each of two workers makes a gradient in 300 us and an exchange in twice the time for each gradient
        assert forecasts == pytest.approx([2 * BATCH / 320e-6, 2 * BATCH / 500e-6], rel=0.03)


class TestSpelling:
    @pytest.mark.parametrize(
        ("text", "numbers"),
        [("2..256", (2, 4, 8, 16, 32, 64, 128, 256)), ("3..10", (3, 4, 8, 10)), ("8,2,2", (2, 8)), ("1..1", (1,))],
    )
    def test_numbers_of_workers(self, text: str, numbers: tuple[int, ...]) -> None:
        assert worker_numbers(text) == numbers

    @pytest.mark.parametrize("text", ["0", "0..4", "8..2", "two", "2..", "", "5000", "-1"])
    def test_wrong_numbers_of_workers(self, text: str) -> None:
        with pytest.raises(UsageError, match="workers"):
            worker_numbers(text)

    def test_a_network_is_bits_per_second_and_a_latency(self) -> None:
        assert network_of("10gbit,100us") == NetworkLink(1e-4, 1.25e9)
        assert network_of("100Mbit, 2ms") == NetworkLink(2e-3, 1.25e7)

    @pytest.mark.parametrize("text", ["10gbit", "10,100us", "10gb,100us", "gbit,1ms", "10gbit,fast", "0gbit,1us", ""])
    def test_a_wrong_network(self, text: str) -> None:
        with pytest.raises(UsageError, match=r"10gbit,100us|a time such as"):
            network_of(text)

    def test_times(self) -> None:
        assert [duration(text, "x") for text in ("35ms", "2s", "0.5", "7 us")] == [0.035, 2.0, 0.5, 7e-6]
        assert [seconds_text(s) for s in (3e-5, 0.035, 1.25, 90, 150, 7200, 2e5)] == [
            *("30 µs", "35 ms", "1.25 s", "90 s", "2.5 min", "2 h", "2.31 d")
        ]
        assert [count_text(n) for n in (950, 999.9, 12_340, 1e6)] == ["950", "1k", "12.3k", "1M"]

    def test_stragglers(self) -> None:
        assert Stragglers.read("slow:0.25,3").speeds(4) == (1.0, 1.0, 1.0, 1 / 3)
        assert Stragglers.read("slow:0.1,5").speeds(2) == (1.0, 0.2)  # a share that is there has at least one node
        assert Stragglers.read("measured") == Stragglers()
        assert Stragglers.read("log-normal:1,0.3").factors == LogNormal(1.0, 0.3)
        for text in ("slow:2,5", "slow:0.1,0.5", "slow:0.1", "trace:times.csv", "sluggish"):
            with pytest.raises(UsageError):
                Stragglers.read(text)


class TestKnownAnswers:
    @pytest.mark.parametrize("name", [*SCHEMES.split(","), "d-psgd"])
    @pytest.mark.parametrize("workers", [2, 16])
    def test_nothing_in_the_way_is_the_ideal(self, name: str, workers: int) -> None:
        assert rate(name, workers, assumed()) == pytest.approx(workers * BATCH / GRADIENT, rel=0.02)

    def test_the_servers_link_bounds_async(self) -> None:
        """A gradient comes in over the server's link: no more of them than its bandwidth carries."""
        given = assumed(network=NetworkLink(0.0, 1e8))
        assert rate("async", 32, given) == pytest.approx(BATCH * 1e8 / SIZE, rel=0.01)
        assert rate("async", 64, given) == pytest.approx(BATCH * 1e8 / SIZE, rel=0.01)
        assert rate("async", 32, replace(given, servers=2)) == pytest.approx(2 * BATCH * 1e8 / SIZE, rel=0.01)

    def test_the_servers_arithmetic_bounds_async(self) -> None:
        given = assumed(arithmetic={"async": Arithmetic(0.0, {"push": 0.004})})
        assert rate("async", 32, given) == pytest.approx(BATCH / 0.004, rel=0.01)

    def test_one_worker_waits_for_its_own_messages(self) -> None:
        """Pull: there and back with the vector; the push is not waited for, but leaves the node first."""
        given = assumed(network=NetworkLink(1e-3, 1e9))
        cycle = GRADIENT + 2 * 1e-3 + 2 * SIZE / 1e9
        assert rate("async", 1, given) == pytest.approx(BATCH / cycle, rel=0.01)

    @pytest.mark.parametrize("workers", [2, 8, 64])
    def test_a_mean_has_the_traffic_of_a_ring(self, workers: int) -> None:
        given = assumed(network=NetworkLink(1e-4, 1e9))
        mean = 2 * 1e-4 + 2 * (workers - 1) / workers * SIZE / 1e9
        assert rate("allreduce", workers, given) == pytest.approx(workers * BATCH / (GRADIENT + mean), rel=0.01)

    def test_small_and_compressed_vectors_go_to_all(self) -> None:
        costs = MessageCosts(NetworkLink(1e-4, 1e9))
        assert costs.mean_seconds(4, 1000.0) == pytest.approx(1e-4 + 3 * 1000 / 1e9)
        assert costs.mean_seconds(4, 1e8, gathered=True) == pytest.approx(1e-4 + 3 * 1e8 / 1e9)
        assert costs.mean_seconds(1, 1e8) == 0.0

    def test_a_processor_moves_every_byte_twice(self) -> None:
        costs = MessageCosts(NetworkLink(0.0, 1e12), per_byte=1e-9)
        assert costs.mean_seconds(2, 1e8) == pytest.approx(2 * 1e8 * 1e-9)

    def test_sync_waits_for_slow_nodes_and_async_does_not(self) -> None:
        given = assumed(stragglers=Stragglers.read("slow:0.25,3"))
        assert rate("sync", 4, given) == pytest.approx(4 * BATCH / (3 * GRADIENT), rel=0.01)
        assert rate("async", 4, given) == pytest.approx((3 + 1 / 3) * BATCH / GRADIENT, rel=0.02)

    def test_a_round_takes_the_largest_of_exponential_times(self) -> None:
        """Their expectation is the harmonic number."""
        given = assumed(stragglers=Stragglers.read("exponential:7"))  # factors: only the shape counts
        harmonic = sum(1 / k for k in range(1, 9))
        assert rate("allreduce", 8, given) == pytest.approx(8 * BATCH / (GRADIENT * harmonic), rel=0.08)

    def test_a_window_divides_the_messages(self) -> None:
        given = assumed(network=NetworkLink(0.0, 1e8))
        mean = 2 * 3 / 4 * SIZE / 1e8
        assert rate("local-sgd", 4, given, window=5) == pytest.approx(4 * 5 * BATCH / (5 * GRADIENT + mean), rel=0.01)

    def test_a_long_window_is_simulated_in_parts(self) -> None:
        """Nothing happens inside it: sums of times stand for it, with the same throughput."""
        scheme = build.scheme_of("local-sgd", {"window": 60})
        short, times = coarsened(scheme)
        assert times * short.gradients_per_update(2) == scheme.gradients_per_update(2)  # type: ignore[operator]
        given = assumed(network=NetworkLink(0.0, 1e8))
        mean = 2 * 3 / 4 * SIZE / 1e8
        assert rate("local-sgd", 4, given, window=60) == pytest.approx(
            4 * 60 * BATCH / (60 * GRADIENT + mean), rel=0.01
        )
        assert coarsened(build.scheme_of("local-sgd", {"window": 13}))[1] == 1  # no parts of equal length
        assert coarsened(build.scheme_of("async", {}))[1] == 1

    def test_arithmetic_of_the_worker_is_added_to_each_gradient(self) -> None:
        given = assumed(arithmetic={"allreduce": Arithmetic(0.002)})
        assert rate("allreduce", 2, given) == pytest.approx(2 * BATCH / (GRADIENT + 0.002), rel=0.01)


class TestLaws:
    @pytest.mark.parametrize("law", [Gamma(1.0, 0.2), LogNormal(1.0, 0.6), ShiftedExponential(1.0, 0.3)])
    def test_the_law_of_many_times_is_found(self, law: ComputeTime) -> None:
        rng = np.random.Generator(np.random.PCG64(1))
        found = fitted([law.draw(0, t, rng) for t in range(3000)])
        assert type(found) is type(law)
        assert mean_of_law(found) == pytest.approx(mean_of_law(law), rel=0.05)

    def test_equal_times_are_constant(self) -> None:
        assert fitted([0.5, 0.5, 0.5, 0.5]) == Constant(0.5)
        assert fitted([0.25]) == Constant(0.25)

    def test_a_sum_of_gradients(self) -> None:
        rng = np.random.Generator(np.random.PCG64(1))
        assert SumOf(Constant(2.0), 10, 0.5).draw(0, 0, rng) == pytest.approx(25.0)

    def test_a_law_is_written_as_the_simulator_takes_it(self) -> None:
        assert law_text(LogNormal(0.5, 0.25)) == "log-normal:0.5,0.25"


class TestFailures:
    def test_by_hand(self) -> None:
        failures = Failures(rate=1.0, restart=360.0, checkpoint=720.0)
        assert failures.workers_there(0.0) == pytest.approx(1 / 1.1)
        assert failures.going(0, 8) == pytest.approx(1 / 1.2)  # the chief's node: 360 s and half of 720 s
        assert failures.going(2, 8) == pytest.approx(1 / 1.6)
        assert failures.kept(workers=8, servers=2, step=0.0) == pytest.approx(1 / 1.1 / 1.6)
        held = replace(failures, quorum="hold", checkpoint=1e-9)
        assert held.kept(workers=8, servers=0, step=0.0) == pytest.approx(1 / (1 + 0.8))
        assert Failures().kept(workers=256, servers=4, step=9.0) == 1.0

    @pytest.mark.parametrize("name", ["async", "allreduce"])
    def test_as_the_simulator_with_faults(self, name: str) -> None:
        """Two of four workers are killed for 100 s of 1000: the others go on."""
        faults = [parse_fault("kill:1@time=200,back=100"), parse_fault("kill:2@time=500,back=100")]
        task, scheme = build.task_of("toy", {}), build.scheme_of(name, {"lr": 0.001})
        engine = SimulationEngine(task, scheme, workers=4, seed=0, cost=Cost(Constant(1.0)), faults=faults)
        engine.run(seconds=1000.0)
        there = 4 * 1000 - 2 * 100  # node-seconds
        failures = Failures(rate=3600 * 2 / there, restart=100.0)
        assert engine.samples / 4000 == pytest.approx(failures.workers_there(1.0), rel=0.005)


class TestMeasured:
    def test_gradients_of_a_task(self) -> None:
        found = measure.gradient_times(build.task_of("digits-mlp", {}), "cpu", 1)
        assert len(found.seconds) == measure.GRADIENTS
        assert 1e-6 < found.mean < 1.0
        assert mean_of_law(found.law) == pytest.approx(found.mean, rel=0.2)

    def test_gradients_are_kept_for_the_task_that_they_are_of(self, tmp_path: Path) -> None:
        task = build.task_of("toy", {})
        first = measure.kept_gradients(task, "cpu", tmp_path)
        assert measure.kept_gradients(task, "cpu", tmp_path) == first
        assert measure.kept_gradients(task.configured(batch=2), "cpu", tmp_path).seconds != first.seconds

    def test_arithmetic_grows_with_the_vector(self) -> None:
        def push(dim: int) -> float:
            task = build.task_of("quadratic", {"dim": dim})
            return measure.arithmetic_of(build.scheme_of("async", {}), task, "cpu", 1).calls["push"]

        assert push(2_000_000) > 3 * push(1000)

    def test_messages_cost_something(self) -> None:
        found = measure.loopback()
        assert 1e-7 < found.per_message < 1e-2
        assert 1e-12 < found.per_byte < 1e-7


class TestSamplesToATarget:
    def test_sizes_within_a_budget(self) -> None:
        sizes, batches = sizes_within(1e9, 1e-3, 6, (2, 4, 8))
        assert (sizes, batches) == ((2, 4, 8), 10_000)
        sizes, batches = sizes_within(1e-3, 1.0, 6, (2, 4, 8))
        assert (sizes, batches) == ((2,), 10)

    def test_what_was_not_simulated_is_a_lower_bound(self) -> None:
        needed = Needed(Goal("accuracy", 0.9), 1000, (2, 4), {("a", 2): 50.0, ("a", 4): 80.0, ("b", 2): None})
        assert needed.of("a", 4) == (80.0, True)
        assert needed.of("a", 64) == (80.0, False)
        assert needed.of("b", 2) == (None, True)


REFUSED = [
    (["--schemes", "allreduse"], "allreduce"),
    (["--schemes", "hogwild"], "shared memory of one machine"),
    (["--schemes", "sgd"], "nothing to scale"),
    (["--network", "10gb,100us"], "10gbit,100us"),
    (["--workers", "0"], "from 1 to 4,096, not 0"),
    (["--failures", "-1"], "failures"),
    (["--gradient-time", "fast"], "35ms"),
    (["--gradient-time", "35ms", "--gpu"], "omit gpu or gradient_time"),
    (["--stragglers", "slow:3"], "slow:0.1,5"),
    (["--target", "beauty=1"], "beauty"),
    (["--samples", "10", "--target", "loss=1"], "one of them"),
    (["windo=3"], "windo"),
]


@pytest.mark.parametrize(("words", "reason"), REFUSED, ids=[" ".join(words) for words, _ in REFUSED])
def test_mistakes_are_refused(words: Sequence[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plan", "toy", *words])
    assert ended.value.code == 2
    assert reason in " ".join(capsys.readouterr().err.split())


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_gpu_that_is_not_there() -> None:
    with pytest.raises(UsageError, match="--gradient-time"):
        plan("toy", gpu=True)


@pytest.mark.long
def test_a_plan_and_its_files(tmp_path: Path) -> None:
    found = plan(
        "quadratic",
        "allreduce,async",
        workers="2,8",
        network=["1gbit,50us", "100mbit,1ms"],
        gradient_time="10ms",
        failures=0.5,
        price=3.0,
        directory=tmp_path,
        task_options={"dim": 100_000},
        say=lambda _: None,
    )
    assert {(one.scheme, one.workers) for one in found.cells} == {
        (s, n) for s in ("allreduce", "async") for n in (2, 8)
    }
    assert found.given.vector_bytes in (400_000, 800_000)
    for one in found.cells:
        assert 0 < one.rate < one.bare
        assert one.nodes == one.workers + (one.scheme == "async")
        assert one.seconds == pytest.approx(1e6 / one.rate)
        assert one.cost == pytest.approx(one.seconds / 3600 * one.nodes * 3.0)
    names = [one.name for one in found.variations]
    assert "failures × 3" in names
    assert "network 100 Mbit/s, 1 ms" in names
    slower = next(one for one in found.variations if one.name.startswith("network"))
    assert slower.change < 1
    page = Path(found.page).read_text(encoding="utf-8")
    assert not re.search(r'(src|href)="(https?:)?//', page)  # it needs no network
    assert "<svg" in page
    assert found.found.split("\n")[0].split(":")[0] in page
    with (tmp_path / "forecast.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert [float(row["rate"]) for row in rows] == [one.rate for one in found.cells]
    assert all(Path(name).stat().st_size for name in found.figures)
    assert math.isfinite(sum(one.efficiency for one in found.cells))
