"""Clients and a server: federated rounds, buffers, asynchronous windows. Algorithms, section 9: 9, 18, 19, 24, 28."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracles import EXACT, SEED, bowl, by_torch, crew, each_task, engine, in_double, line, network, run
from torch import Tensor, nn

from paceline import Task
from paceline.config.build import scheme_of
from paceline.errors import UsageError
from paceline.scheme import State

LR = 0.05


def close(left: Tensor, right: Tensor) -> None:
    torch.testing.assert_close(left, right, **EXACT)


# rounds


@each_task
def test_no_proximal_term_and_an_outer_rate_of_one_are_fedavg_bit_for_bit(task: Callable[[], Task]) -> None:
    hyper: dict[str, Any] = {"lr": LR, "window": 4, "fraction": 0.6}
    oracle = run(task(), "fedavg", 5, 9, **hyper).digest
    assert run(task(), "fedprox", 5, 9, mu=0.0, **hyper).digest == oracle
    assert run(task(), "fedopt", 5, 9, server_rule="sgd", server_lr=1.0, **hyper).digest == oracle
    assert run(task(), "fedopt", 5, 9, server_rule="sgd", **hyper).digest == oracle


def rounds(task: Task, window: int, count: int, weights: list[float], mu: float = 0.0) -> Tensor:
    x, gradients = task.start(SEED), crew(task, len(weights))
    for _ in range(count):
        ends = []
        for g in gradients:
            y = x.clone()
            for _ in range(window):
                y = y - LR * (g(y) + mu * (y - x))
            ends.append(y)
        x = sum(n * y for n, y in zip(weights, ends, strict=True)) / sum(weights)
    return x


@in_double
@pytest.mark.parametrize("weights", [(1.0, 1.0, 1.0), (100.0, 20.0, 3.0)])
def test_models_are_averaged_by_samples(task: Callable[[], Task], weights: tuple[float, ...]) -> None:
    found = run(task(), "fedavg", 3, 8, lr=LR, window=4, weights=weights).vector
    close(found, rounds(task(), 4, 8, list(weights)))


@in_double
def test_fedavg_of_all_clients_is_local_sgd_and_with_one_step_sync(task: Callable[[], Task]) -> None:
    close(run(task(), "fedavg", 3, 8, lr=LR, window=4).vector, run(task(), "local-sgd", 3, 8, lr=LR, window=4).vector)
    close(run(task(), "fedavg", 3, 8, lr=LR, window=1).vector, run(task(), "sync", 3, 8, lr=LR).vector)


@in_double
def test_fedprox_pulls_the_clients_back(task: Callable[[], Task]) -> None:
    close(run(task(), "fedprox", 3, 8, lr=LR, window=4, mu=0.7).vector, rounds(task(), 4, 8, [1.0] * 3, mu=0.7))


@in_double
def test_fedavgm_is_diloco_with_outer_heavy_ball(task: Callable[[], Task]) -> None:
    left = run(task(), "fedopt", 3, 8, lr=LR, window=4, server_rule="momentum").vector
    outer = {"rule": "sgd", "outer": "momentum", "outer_lr": 1.0}
    close(left, run(task(), "diloco", 3, 8, lr=LR, window=4, **outer).vector)


def test_a_fraction_of_the_clients_takes_part_and_all_do_in_time() -> None:
    """Chosen by `draw` and the version alone: the same for any speeds; each about as often."""

    def counts(**options: Any) -> list[int]:
        e = engine(bowl(), "fedavg", 6, options.pop("compute", "constant:1"), window=2, fraction=0.5, lr=LR, **options)
        e.run(60)
        assert e.gradients == 60 * 3 * 2
        return [seat.gradients // 2 for seat in e.seats]

    found = counts()
    assert sum(found) == 180
    assert min(found) > 15
    assert max(found) < 45
    assert counts(compute="exponential:1") == found
    assert counts(draw=1) != found


def test_clients_that_cannot_be_are_refused() -> None:
    for hyper in ({"weights": (1.0, 2.0)}, {"weights": (1.0, 0.0, 2.0)}, {"fraction": 0.0}):
        with pytest.raises(UsageError):
            run(bowl(), "fedavg", 3, 1, **hyper)


# a buffer


@each_task
@pytest.mark.parametrize("compute", ["constant:1", "exponential:1"])
def test_a_buffer_of_one_push_without_weights_is_async_bit_for_bit(task: Callable[[], Task], compute: str) -> None:
    left = run(task(), "fedbuff", 4, 30, lr=LR, window=1, buffer=1, power=0.0, compute=compute)
    right = run(task(), "async", 4, 30, lr=LR, compute=compute)
    assert left.digest == right.digest
    assert left.staleness.histogram == right.staleness.histogram


@pytest.mark.parametrize("buffer", [1, 3, 10])
@pytest.mark.parametrize("window", [1, 4])
def test_staleness_is_conserved(buffer: int, window: int) -> None:
    """Sum of staleness + what workers are behind now = updates * (workers - 1), as integers; section 11.2."""
    workers, updates = 5, 40
    e = engine(bowl(), "fedbuff", workers, "exponential:1", lr=0.01, window=window, buffer=buffer)
    e.run(updates)
    ledger = e.scheduler.ledger.cells  # type: ignore[union-attr]
    behind = sum(updates - held for held in ledger.held.tolist() if held >= 0)  # one has yet to pull after its push
    assert ledger.admitted == updates * buffer
    assert ledger.total + behind == updates * (workers - 1)


def test_weights_fall_with_staleness() -> None:
    scheme = scheme_of("fedbuff", {"buffer": 2, "lr": 1.0, "power": 0.5})
    s = scheme.server(torch.zeros(3, dtype=torch.float64), 2)
    push = type(scheme).push.function  # type: ignore[attr-defined]
    push(scheme, s, torch.ones(3, dtype=torch.float64), 0)
    assert (s.v, s.got) == (0, 1)
    push(scheme, s, torch.ones(3, dtype=torch.float64), 0)
    close(s.x, torch.full((3,), -1.0, dtype=torch.float64))
    s.v = 3
    for _ in range(2):
        push(scheme, s, torch.ones(3, dtype=torch.float64), 0)
    close(s.x, torch.full((3,), -1.5, dtype=torch.float64))


# delayed Nesterov


def pushed(ways: list[Tensor], workers: int, **hyper: Any) -> list[Tensor]:
    """The centre after each push of the server alone."""
    scheme = scheme_of("async-diloco", {"outer_lr": 0.3, **hyper})
    s: State = scheme.server(torch.zeros_like(ways[0]), workers)
    found = []
    for way in ways:
        type(scheme).push.function(scheme, s, way, s.v, 1, 0)  # type: ignore[attr-defined]
        found.append(s.x.clone())
    return found


def nesterov(ways: list[Tensor], lr: float = 0.3) -> list[Tensor]:
    x = nn.Parameter(torch.zeros_like(ways[0]))
    optimizer = torch.optim.SGD([x], lr=lr, momentum=0.9, nesterov=True)
    found = []
    for way in ways:
        x.grad = way
        optimizer.step()
        found.append(x.detach().clone())
    return found


def given(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(7, generator=generator, dtype=torch.float64) for _ in range(count)]


@pytest.mark.parametrize("activation", [0.0, 0.4, 1.0])
def test_a_buffer_of_one_is_nesterov(activation: float) -> None:
    for left, right in zip(pushed(given(20), 4, buffer=1, activation=activation), nesterov(given(20)), strict=True):
        close(left, right)


@pytest.mark.parametrize("n", [2, 4])
def test_at_multiples_of_n_it_is_nesterov_on_block_means(n: int) -> None:
    ways = given(24)
    blocks = [sum(ways[k : k + n]) / n for k in range(0, 24, n)]
    for left, right in zip(pushed(ways, n)[n - 1 :: n], nesterov(blocks), strict=True):
        close(left, right)
    between = pushed(ways, n)[0]
    assert not torch.allclose(between, torch.zeros_like(between))  # every push moves x at once


def test_the_momentum_is_spread_over_the_pushes_with_an_activation() -> None:
    """Written out for n = 2 and c = 0.25."""
    ways = given(4)
    x, m, b = torch.zeros_like(ways[0]), torch.zeros_like(ways[0]), torch.zeros_like(ways[0])
    for t, p in enumerate(ways):
        b = b + p
        if t % 2:
            m, b = 0.9 * m + b / 2, torch.zeros_like(b)
            x = x - 0.3 * (0.75 * 0.9 * m + p / 2)
        else:
            x = x - 0.3 * (0.25 * 0.9 * m + p / 2)
    close(pushed(ways, 2, activation=0.25)[-1], x)


@in_double
def test_alone_with_a_buffer_of_one_it_is_diloco(task: Callable[[], Task]) -> None:
    left = run(task(), "async-diloco", 1, 8, window=4, buffer=1).vector
    close(left, run(task(), "diloco", 1, 8, window=4).vector)


def test_alone_with_a_window_of_one_it_is_nesterov() -> None:
    left = run(bowl(), "async-diloco", 1, 20, window=1, buffer=1, rule="sgd", lr=LR, outer_lr=1.0).vector
    right = by_torch(bowl(), 20, lambda p: torch.optim.SGD(p, lr=LR, momentum=0.9, nesterov=True))
    close(left, right)


def test_delayed_momentum_is_not_momentum_on_every_push() -> None:
    left = run(network(), "async-diloco", 4, 20, window=3, outer_lr=0.1).vector
    assert (left - run(network(), "async-diloco", 4, 20, window=3, outer_lr=0.1, buffer=1).vector).abs().max() > 1e-4


@pytest.mark.parametrize("paces", [(), (1.0, 1.0, 0.25)])
def test_windows_follow_the_speed_of_a_worker(paces: tuple[float, ...]) -> None:
    """A worker with a quarter of the speed makes windows of a quarter: all push about as often."""
    hyper = {"window": 16, "dynamic": True, "paces": paces, "rule": "sgd", "lr": 1e-3}
    taken: list[int] = []
    run(line(), "async-diloco", 3, 90, speeds=(1, 1, 0.25), watch=lambda e: taken.append(_pushes(e)), **hyper)
    e = engine(line(), "async-diloco", 3, **hyper)
    assert len(taken) == 90
    assert e.scheme.gradients_per_update(3) is None
    slow, fast = taken[-1] % 1000, taken[-1] // 1000
    assert slow >= 0.8 * fast / 2  # without it, a quarter


def _pushes(e: Any) -> int:
    """Steps of the slow worker, and 1000 times those of the two others."""
    return int(e.seats[2].worker.t) + 1000 * int(e.seats[0].worker.t + e.seats[1].worker.t)


def test_grace_lets_those_that_end_together_start_together() -> None:
    hyper = {"window": 4, "rule": "sgd", "lr": 1e-3}
    apart = run(line(), "async-diloco", 3, 30, speeds=(1, 0.95, 0.9), **hyper)
    together = run(line(), "async-diloco", 3, 30, speeds=(1, 0.95, 0.9), grace=0.6, **hyper)
    assert apart.staleness.histogram[0] == 1
    assert together.staleness.histogram == {0: 10, 1: 10, 2: 10}  # rounds: each begins at one version
    assert together.virtual_seconds > apart.virtual_seconds


def test_an_activation_above_one_over_n_is_refused() -> None:
    with pytest.raises(UsageError, match="at most 1 / n"):
        run(bowl(), "async-diloco", 4, 1, activation=0.5)


# regions

PLAIN_REGION = {
    **{"size": 8, "pushes": 1, "merge": 1.0, "rule": "sgd", "lr": LR},
    **{"local_lr": 1.0, "local_momentum": 0.0, "local_buffer": 1},
    **{"global_lr": 1.0, "global_momentum": 0.0, "global_buffer": 1},
}


@in_double
@pytest.mark.parametrize("window", [1, 4])
def test_one_plain_region_is_a_push_of_ways(task: Callable[[], Task], window: int) -> None:
    left = run(task(), "halos", 4, 25, window=window, compute="exponential:1", **PLAIN_REGION)
    right = run(task(), "downpour-easy", 4, 25, lr=LR, window=window, compute="exponential:1")
    close(left.vector, right.vector)
    assert left.staleness.histogram == right.staleness.histogram


def test_regions_exchange_as_written_by_hand() -> None:
    """Two regions whose pushes alternate; K = 2, a = 0.25, delayed momenta with buffers of 2 and 1."""
    hyper = {"size": 1, "pushes": 2, "merge": 0.25, "local_lr": 0.2, "local_momentum": 0.9, "local_buffer": 2}
    scheme = scheme_of("halos", {**hyper, "global_lr": 0.3, "global_momentum": 0.5, "global_buffer": 1})
    ways = given(12)
    s = scheme.server(torch.ones(7, dtype=torch.float64), 2)
    x, gm = torch.ones(7, dtype=torch.float64), torch.zeros(7, dtype=torch.float64)
    local = [x.clone(), x.clone()]
    snapshot, m, b, count = [x.clone(), x.clone()], [gm.clone(), gm.clone()], [gm.clone(), gm.clone()], [0, 0]
    for k, p in enumerate(ways):
        r = k % 2
        type(scheme).push.function(scheme, s, p, s.v, r)  # type: ignore[attr-defined]
        count[r] += 1
        b[r] = b[r] + p
        if count[r] % 2 == 0:
            m[r], b[r] = 0.9 * m[r] + b[r] / 2, torch.zeros_like(p)
            local[r] = local[r] - 0.4 * (0.9 * m[r] + p / 2)
            d = snapshot[r] - local[r]
            gm = 0.5 * gm + d
            x = x - 0.3 * (0.5 * gm + d)
            local[r] = 0.75 * local[r] + 0.25 * x
            snapshot[r] = local[r]
        else:
            local[r] = local[r] - 0.4 * (p / 2)
        close(s.x, x)
        close(s.local[r], local[r])
    assert s.v == 6
