"""Everybody at the same version. Algorithms, section 9: identities 6, 7, 8, 23, 37, and what must differ."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from oracles import EXACT, SEED, bowl, by_torch, crew, each_task, in_double, network, run
from torch import Tensor

from paceline import Task
from paceline.config import discovery
from paceline.result import digest

LR = 0.07


def averaged(task: Task, workers: int, steps: int, batches: int = 1) -> Tensor:
    """Sequential SGD along the mean of all workers' gradients, added up by rank; `batches` of each."""
    x, gradients = task.start(SEED), crew(task, workers)
    for _ in range(steps):
        every = [g(x) for g in gradients for _ in range(batches)]
        total = every[0].clone()
        for one in every[1:]:
            total += one
        x = x.add(total / len(every), alpha=-LR)
    return x


@each_task
@pytest.mark.parametrize("workers", [2, 3, 7])
def test_sync_steps_along_the_mean_of_the_workers_gradients_bit_for_bit(task: Callable[[], Task], workers: int) -> None:
    oracle = digest(averaged(task(), workers, 25))
    assert run(task(), "sync", workers, 25, lr=LR).digest == oracle
    assert run(task(), "allreduce", workers, 25, lr=LR).digest == oracle


@in_double
@pytest.mark.parametrize("compute", ["exponential:1", "pareto:1,1.2"])
def test_who_is_late_does_not_matter_to_a_synchronous_scheme(task: Callable[[], Task], compute: str) -> None:
    for name in ("sync", "sync-rates", "allreduce", "sagn", "averaging", "easgd"):
        punctual = run(task(), name, 4, 15, lr=LR)
        late = run(task(), name, 4, 15, lr=LR, compute=compute, speeds=(1, 3, 0.5, 2), network="0.1,1e4")
        assert late.digest == punctual.digest, name


@pytest.mark.parametrize("rule", ["momentum", "nesterov", "adam", "adagrad"])
def test_allreduce_is_sync_bit_for_bit_under_any_rule(rule: str) -> None:
    assert run(bowl(), "allreduce", 3, 20, rule=rule).digest == run(bowl(), "sync", 3, 20, rule=rule).digest


@each_task
@pytest.mark.parametrize("compute", ["constant:1", "exponential:1"])
def test_a_window_of_one_makes_sagn_sync_bit_for_bit(task: Callable[[], Task], compute: str) -> None:
    left = run(task(), "sagn", 4, 20, lr=LR, window=1, compute=compute)
    assert left.digest == run(task(), "sync", 4, 20, lr=LR, compute=compute).digest


@each_task
def test_without_backup_workers_sync_waits_for_all(task: Callable[[], Task]) -> None:
    assert run(task(), "sync", 5, 20, lr=LR, aggregate=5).digest == run(task(), "sync", 5, 20, lr=LR).digest


@each_task
@pytest.mark.parametrize("size", [4, 9])
def test_one_group_of_all_is_sync_bit_for_bit(task: Callable[[], Task], size: int) -> None:
    group = run(task(), "groups", 4, 20, lr=LR, size=size, compute="exponential:1")
    assert group.digest == run(task(), "sync", 4, 20, lr=LR).digest
    assert group.staleness.histogram == {0: 20}


@in_double
@pytest.mark.parametrize("window", [2, 5])
def test_sagn_is_fedopt_with_an_outer_rate_of_one_over_the_window(task: Callable[[], Task], window: int) -> None:
    """FedOpt: everybody trains alone from x; x goes the outer rate times the mean way."""
    x, gradients = task().start(SEED), crew(task(), 3)
    for _ in range(10):
        ways = []
        for g in gradients:
            y = x.clone()
            for _ in range(window):
                y = y - LR * g(y)
            ways.append(y - x)
        x = x + sum(ways) / 3 / window
    torch.testing.assert_close(run(task(), "sagn", 3, 10, lr=LR, window=window).vector, x, **EXACT)


@in_double
@pytest.mark.parametrize("window", [1, 4])
def test_averaging_is_fedavg(task: Callable[[], Task], window: int) -> None:
    x, gradients = task().start(SEED), crew(task(), 3)
    for _ in range(10):
        ends = []
        for g in gradients:
            y = x.clone()
            for _ in range(window):
                y = y - LR * g(y)
            ends.append(y)
        x = sum(ends) / 3
    torch.testing.assert_close(run(task(), "averaging", 3, 10, lr=LR, window=window).vector, x, **EXACT)


@in_double
@pytest.mark.parametrize("rule", ["sgd", "momentum", "nesterov"])
def test_averaging_after_every_step_is_sync(task: Callable[[], Task], rule: str) -> None:
    models = run(task(), "averaging", 4, 40, lr=0.02, window=1, rule=rule).vector
    torch.testing.assert_close(models, run(task(), "sync", 4, 40, lr=0.02, rule=rule).vector, **EXACT)


@pytest.mark.parametrize("rule", ["adam", "adagrad", "rmsprop"])
def test_averaging_after_every_step_of_an_adaptive_rule_is_not_sync(rule: str) -> None:
    models = run(bowl(), "averaging", 4, 40, lr=0.02, window=1, rule=rule).vector
    assert (models - run(bowl(), "sync", 4, 40, lr=0.02, rule=rule).vector).abs().max() > 1e-3


@in_double
def test_equal_rates_are_sync(task: Callable[[], Task]) -> None:
    oracle = run(task(), "sync", 4, 20, lr=LR).vector
    for hyper in ({"rates": (LR / 4,) * 4}, {"rates": (LR,) * 4, "reduce": "mean"}, {"lr": LR / 4}):
        torch.testing.assert_close(run(task(), "sync-rates", 4, 20, **hyper).vector, oracle, **EXACT)
    assert run(task(), "sync-rates", 4, 20, lr=LR, reduce="mean").digest == digest(oracle)


def test_every_worker_steps_at_its_own_rate() -> None:
    rates, task = (0.1, 0.0, 0.03), bowl()
    x, gradients = task.start(SEED), crew(task, 3)
    for _ in range(20):
        x = x - sum(rate * g(x) for rate, g in zip(rates, gradients, strict=True))
    torch.testing.assert_close(run(task, "sync-rates", 3, 20, rates=rates).vector, x, **EXACT)


@pytest.mark.parametrize("name", ["sync", "allreduce"])
@pytest.mark.parametrize(("batch", "workers"), [(30, 3), (30, 1), (31, 3), (29, 4), (5, 5), (13, 6)])
def test_slices_of_one_batch_are_sgd_on_the_whole_batch(name: str, batch: int, workers: int) -> None:
    task = network(batch=batch)
    sequential = run(task, "sgd", 1, 15, lr=LR)
    sliced = run(task, name, workers, 15, lr=LR, feed="slice")
    torch.testing.assert_close(sliced.vector, sequential.vector, **EXACT)
    assert sliced.samples == sequential.samples == 15 * batch


def test_slices_of_real_digits_are_sgd_on_the_whole_batch() -> None:
    task = discovery.task("digits-mlp")(dtype="float64")
    sequential = run(task, "sgd", 1, 20, batch=31)
    for workers in (2, 4):
        sliced = run(task, "sync", workers, 20, batch=31, feed="slice").vector
        torch.testing.assert_close(sliced, sequential.vector, **EXACT)


def test_slices_carry_momentum_as_the_whole_batch_does() -> None:
    task = network(batch=31)
    whole = by_torch(task, 20, lambda p: torch.optim.SGD(p, lr=LR, momentum=0.9, nesterov=True))
    sliced = run(task, "sync", 4, 20, lr=LR, rule="nesterov", feed="slice").vector
    torch.testing.assert_close(sliced, whole, **EXACT)


class TestBackupWorkers:
    @pytest.mark.parametrize("name", ["sync", "sagn"])
    def test_the_slow_ones_are_dropped_and_leave_no_trace(self, name: str) -> None:
        """Workers 3 and 4 are ten times slower, so the three fast ones train as if they were alone."""
        task = bowl(heterogeneity=0.0)
        with_backup = run(task, name, 5, 45, lr=LR, aggregate=3, speeds=(1, 1, 1, 0.1, 0.1))
        assert with_backup.digest == run(task, name, 3, 45, lr=LR).digest
        rounds = with_backup.virtual_seconds / (5 if name == "sagn" else 1)
        assert rounds == pytest.approx(45)
        assert with_backup.dropped == 2 * 4  # at 10, 20, 30 and 40 rounds
        assert with_backup.staleness.histogram == {0: 3 * 45}

    @pytest.mark.parametrize("aggregate", [1, 2, 3, 4])
    def test_a_tie_is_won_by_the_lower_ranks(self, aggregate: int) -> None:
        task = bowl(heterogeneity=0.0)
        tied = run(task, "sync", 4, 1, lr=LR, aggregate=aggregate)
        assert tied.digest == digest(averaged(task, aggregate, 1))

    def test_late_gradients_never_enter(self) -> None:
        for seed in range(5):
            result = run(bowl(), "sync", 6, 100, lr=LR, aggregate=4, compute="exponential:1", seed=seed)
            assert result.staleness.histogram == {0: 4 * 100}
            assert result.gradients == 400 + result.dropped
            assert result.dropped > 0


class TestRepeat:
    @pytest.mark.parametrize("batches", [2, 3])
    @in_double
    def test_everybody_gives_several_batches_to_an_update(self, task: Callable[[], Task], batches: int) -> None:
        several = run(task(), "sync-repeat", 2, 15, lr=LR, aggregate=2 * batches)
        assert several.digest == digest(averaged(task(), 2, 15, batches))
        assert several.gradients == 15 * 2 * batches
        assert several.staleness.histogram == {0: 15 * 2 * batches}

    def test_a_fast_worker_gives_what_a_slow_one_cannot(self) -> None:
        """Three gradients an update: two of the worker that is twice as fast, one of the other."""
        task, x = bowl(), bowl().start(SEED)
        fast, slow = crew(task, 2)
        for _ in range(12):
            x = x - LR * (fast(x) + fast(x) + slow(x)) / 3
        result = run(task, "sync-repeat", 2, 12, lr=LR, aggregate=3, speeds=(2, 1))
        torch.testing.assert_close(result.vector, x, **EXACT)
        assert result.virtual_seconds == 12.0

    def test_as_many_tokens_as_workers_are_one_for_each(self) -> None:
        hyper = {"lr": LR, "aggregate": 3, "speeds": (1, 1, 0.2)}
        assert run(bowl(), "sync-repeat", 3, 10, **hyper).digest == run(bowl(), "sync", 3, 10, **hyper).digest

    def test_a_fast_worker_takes_the_token_that_a_straggler_left(self) -> None:
        """Two gradients an update: worker 2 misses the first one, and from the second on worker 0 gives both."""
        task, x = bowl(), bowl().start(SEED)
        fast, medium, _ = crew(task, 3)
        x = x - LR * (fast(x) + medium(x)) / 2
        for _ in range(2):
            x = x - LR * (fast(x) + fast(x)) / 2
        hyper = {"lr": LR, "aggregate": 2, "speeds": (4, 1, 0.2)}
        result = run(task, "sync-repeat", 3, 3, **hyper)
        torch.testing.assert_close(result.vector, x, **EXACT)
        assert result.virtual_seconds == 1 + 0.5 + 0.5
        assert (run(task, "sync", 3, 3, **hyper).vector - x).abs().max() > 1e-3
