"""How long things take in virtual time. Algorithms, section 11.4: exactly, from the same draws; and on average."""

from __future__ import annotations

import math
from collections.abc import Iterable
from heapq import heapify, heappop, heappush

import pytest
from oracles import clocks, line, run

from paceline import simulate
from paceline.simulator.cost import NetworkLink


def seconds(name: str, workers: int, steps: int, **options: object) -> float:
    return run(line(), name, workers, steps, lr=0.0, **options).virtual_seconds


def harmonic(n: int) -> float:
    return sum(1 / k for k in range(1, n + 1))


def slowest(workers: int, windows: Iterable[int], mean: float = 1.0, speeds: tuple[float, ...] = ()) -> float:
    """Rounds that end with their slowest worker; a worker's round is the sum of its exponential draws."""
    rngs, now = clocks(workers), 0.0
    for window in windows:
        ends = [now] * workers
        for rank, rng in enumerate(rngs):
            for _ in range(window):
                ends[rank] += mean * rng.standard_exponential() / (speeds[rank] if speeds else 1.0)
        now = max(ends)
    return now


class TestExactly:
    """The very draws, added up in the same order: equal to the last bit."""

    @pytest.mark.parametrize("workers", [1, 2, 5])
    @pytest.mark.parametrize("name", ["sync", "sync-rates", "allreduce", "easgd"])
    def test_a_synchronous_round_takes_the_slowest_draw(self, name: str, workers: int) -> None:
        expected = slowest(workers, [1] * 40, 0.7)
        assert seconds(name, workers, 40, compute="exponential:0.7") == expected

    @pytest.mark.parametrize("name", ["sync", "allreduce"])
    def test_speeds_divide_the_draws(self, name: str) -> None:
        speeds = (1.0, 4.0, 0.3)
        expected = slowest(3, [1] * 40, speeds=speeds)
        assert seconds(name, 3, 40, compute="exponential:1", speeds=speeds) == expected

    @pytest.mark.parametrize("window", [1, 2, 6])
    @pytest.mark.parametrize("name", ["averaging", "sagn"])
    def test_a_round_of_windows_takes_the_slowest_sum_of_draws(self, name: str, window: int) -> None:
        assert seconds(name, 4, 20, window=window, compute="exponential:1") == slowest(4, [window] * 20)

    def test_elastic_workers_meet_after_their_first_gradient_and_then_every_window(self) -> None:
        assert seconds("easgd", 4, 20, window=3, compute="exponential:1") == slowest(4, [1] + [3] * 19)

    @pytest.mark.parametrize("window", [1, 5])
    @pytest.mark.parametrize("name", ["downpour", "downpour-easy", "agn", "adag", "dynsgd"])
    def test_a_lone_worker_takes_the_sum_of_its_draws(self, name: str, window: int) -> None:
        assert seconds(name, 1, 20, window=window, compute="exponential:1") == slowest(1, [window] * 20)

    @pytest.mark.parametrize("window", [1, 3])
    def test_asynchronous_workers_push_whenever_their_own_draws_are_over(self, window: int) -> None:
        ends: list[float] = []
        for rng in clocks(5):
            now = 0.0
            for _ in range(100):
                for _ in range(window):
                    now += rng.standard_exponential()
                ends.append(now)
        hundredth = sorted(ends)[99]
        assert seconds("downpour-easy", 5, 100, window=window, compute="exponential:1") == hundredth

    def test_in_a_given_time_everybody_pushes_as_often_as_its_own_times_fit_into_it(self) -> None:
        speeds = (1.0, 0.5, 4.0, 0.3)
        result = simulate(line(), "async", workers=4, lr=0.0, steps=10**6, seconds=25.5, speeds=speeds)
        assert result.updates == sum(math.floor(25.5 * speed) for speed in speeds)
        assert result.virtual_seconds == 25.5

    def test_a_group_takes_as_long_as_its_slowest_member(self) -> None:
        """Groups {0, 1} of 2 s and {2, 3} of 5 s: 5 + 2 updates in 10 s."""
        result = simulate(line(), "groups", workers=4, lr=0.0, size=2, seconds=10, speeds=(1, 0.5, 0.2, 1))
        assert result.updates == 5 + 2

    @pytest.mark.parametrize("aggregate", [1, 3, 5])
    def test_backup_workers_finish_what_they_began_before_they_join_again(self, aggregate: int) -> None:
        """A straggler ends its old gradient, which is refused, and begins anew at once."""
        workers, version, got, rngs = 5, 0, 0, clocks(5)
        events = [(rng.standard_exponential(), rank, 0) for rank, rng in enumerate(rngs)]
        heapify(events)
        waiting: list[int] = []
        dropped = 0
        while version < 60:
            now, rank, began = heappop(events)
            ready = [rank]
            if began < version:
                dropped += 1
            else:
                waiting.append(rank)
                ready, got = [], got + 1
                if got == aggregate:
                    version, got, ready, waiting = version + 1, 0, waiting, []
            for who in ready:
                heappush(events, (now + rngs[who].standard_exponential(), who, version))
        result = run(line(), "sync", workers, 60, lr=0.0, aggregate=aggregate, compute="exponential:1")
        assert result.virtual_seconds == now
        assert result.dropped == dropped
        assert (dropped > 0) == (aggregate < workers)

    def test_a_straggler_that_is_a_backup_costs_nothing(self) -> None:
        speeds = (1, 1, 1, 0.1)
        assert seconds("sync", 4, 30, speeds=speeds, aggregate=3) == 30.0
        assert seconds("sync", 4, 30, speeds=speeds) == 300.0

    @pytest.mark.parametrize("workers", [1, 3])
    @pytest.mark.parametrize(("chunks", "share"), [(1, 0.0), (2, 0.5), (4, 0.75), (9, 0.75)])
    def test_hogwild_takes_its_time_to_read_and_to_add(self, workers: int, chunks: int, share: float) -> None:
        """Toy has four numbers: at most four pieces. The first piece of a pass takes no time, and nobody waits."""
        result = run("toy", "hogwild", workers, 10 * workers, lr=0.001, chunks=chunks, access=1.0)
        assert result.virtual_seconds == 10 * (share + 1.0 + share)


class TestMessages:
    """Latency and bytes over bandwidth, for each message; toy is 4 numbers of 4 bytes, a version or a rank 8."""

    NETWORK = "latency=0.25,bandwidth=1024"

    def toy(self, name: str, workers: int, steps: int, **options: object) -> float:
        return run("toy", name, workers, steps, lr=0.001, **options).virtual_seconds

    @staticmethod
    def wire(*sizes: int) -> float:
        return sum(0.25 + size / 1024 for size in sizes)

    def test_async_pulls_and_pushes(self) -> None:
        pull, push, done = self.wire(0, 16 + 8), self.wire(16 + 8), self.wire(8)
        assert self.toy("async", 1, 1, network=self.NETWORK) == pull + 1 + push
        assert self.toy("async", 1, 20, network=self.NETWORK) == 20 * (pull + 1 + push) + 19 * done

    def test_sync_pulls_and_pushes(self) -> None:
        pull, push, done = self.wire(8, 16 + 8), self.wire(16 + 8 + 8), self.wire(8)
        expected = 20 * (pull + 1 + push) + 19 * done
        assert self.toy("sync", 3, 20, network=self.NETWORK) == expected

    def test_allreduce_sends_one_vector_each_way(self) -> None:
        assert self.toy("allreduce", 3, 20, network=self.NETWORK) == 20 * (1 + self.wire(16, 16))

    def test_elastic_averaging_exchanges_in_one_call(self) -> None:
        exchange = self.wire(16 + 8), self.wire(16 + 8)
        expected = 20 * exchange[0] + 19 * (exchange[1] + 4 * 1)
        assert self.toy("aeasgd", 1, 20, network=self.NETWORK, window=4) == expected

    def test_windows_spare_messages(self) -> None:
        pull, push, done = self.wire(0, 16 + 8), self.wire(16 + 8), self.wire(8)
        expected = 20 * (pull + 5 + push) + 19 * done
        assert self.toy("agn", 1, 20, network=self.NETWORK, window=5) == expected

    def test_every_worker_has_its_own_wire(self) -> None:
        links = {1: NetworkLink(1.0, 64.0), 2: NetworkLink(0.5, math.inf)}
        wires = [0.25 + 16 / 1024, 1.0 + 16 / 64, 0.5]
        ready, last = [0.0, 0.0, 0.0], 0.0
        for _ in range(12):
            met = max(start + 1 + wire for start, wire in zip(ready, wires, strict=True))
            ready = [met + wire for wire in wires]
            last = ready[0]  # the chief has the new centre
        assert self.toy("allreduce", 3, 12, network=self.NETWORK, links=links) == last

    def test_double_precision_costs_double(self) -> None:
        double = self.toy("allreduce", 2, 4, network=self.NETWORK, task_options={"dtype": "float64"})
        assert double == 4 * (1 + self.wire(32, 32))


class TestOnAverage:
    def rate(self, name: str, workers: int, steps: int, **options: object) -> float:
        return seconds(name, workers, steps, **options) / steps

    @pytest.mark.parametrize("workers", [2, 4, 8])
    def test_sync_waits_for_the_slowest_of_exponential_workers(self, workers: int) -> None:
        mean = self.rate("allreduce", workers, 2000, compute="exponential:2")
        assert mean == pytest.approx(2 * harmonic(workers), rel=0.03)

    def test_a_shift_adds_to_every_round(self) -> None:
        mean = self.rate("allreduce", 4, 1500, compute="shifted-exponential:3,0.5")
        assert mean == pytest.approx(3 + 0.5 * harmonic(4), rel=0.02)

    def test_the_slowest_of_uniform_workers(self) -> None:
        mean = self.rate("allreduce", 4, 1500, compute="uniform:1,3")
        assert mean == pytest.approx(1 + 2 * 4 / 5, rel=0.01)

    def test_the_slowest_of_pareto_workers(self) -> None:
        scale, shape, n = 0.5, 3.0, 4
        order = math.gamma(n + 1) * math.gamma(1 - 1 / shape) / math.gamma(n + 1 - 1 / shape)
        mean = self.rate("allreduce", n, 4000, compute=f"pareto:{scale},{shape}")
        assert mean == pytest.approx(scale * order, rel=0.03)

    @pytest.mark.parametrize(
        ("compute", "mean"),
        [
            ("constant:2", 2.0),
            ("exponential:2", 2.0),
            ("shifted-exponential:1,0.5", 1.5),
            ("uniform:1,3", 2.0),
            ("pareto:1,3", 1.5),
            ("log-normal:2,0.5", 2 * math.exp(0.5**2 / 2)),
            ("weibull:2,1.5", 2 * math.gamma(1 + 1 / 1.5)),
            ("gamma:2,0.6", 2.0),
            ("slowdown:1,5,0.1", 1.4),
        ],
    )
    def test_async_takes_the_mean_over_the_workers_whatever_the_law(self, compute: str, mean: float) -> None:
        assert self.rate("async", 4, 4000, compute=compute) == pytest.approx(mean / 4, rel=0.04)

    def test_the_rates_of_uneven_asynchronous_workers_add_up(self) -> None:
        mean = self.rate("async", 3, 4000, compute="exponential:1", speeds=(1, 2, 0.2))
        assert mean == pytest.approx(1 / (1 + 2 + 0.2), rel=0.03)

    def test_sync_needs_the_harmonic_number_times_the_wall_time_of_async(self) -> None:
        """Per gradient, exponential workers: 2.72 for eight."""
        sync = self.rate("allreduce", 8, 2000, compute="exponential:1") / 8
        assert sync / self.rate("async", 8, 8000, compute="exponential:1") == pytest.approx(2.72, rel=0.04)

    @pytest.mark.parametrize("aggregate", [4, 6])
    def test_backup_workers_save_time_within_provable_bounds(self, aggregate: int) -> None:
        """At least K-sync's order statistic: a straggler has its old gradient to end first, and exponential times
        forget how long it has taken already. At most the slowest of K: those who made the last update begin afresh."""
        mean = self.rate("sync", 8, 500, compute="exponential:1", aggregate=aggregate)
        assert harmonic(8) - harmonic(8 - aggregate) < mean < harmonic(aggregate) < harmonic(8)

    def test_windows_take_the_sum_of_their_draws(self) -> None:
        assert self.rate("agn", 4, 1500, window=6, compute="exponential:1") == pytest.approx(6 / 4, rel=0.03)
