"""Local updates with means. Algorithms, section 9: identities 7, 23 to 27, section 11.5, and what must differ."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracles import EXACT, SEED, bowl, crew, each_task, engine, in_double, run
from torch import Tensor, nn

from paceline import Task
from paceline.result import digest
from paceline.tasks.quadratic import quadratic

LR = 0.05


def close(left: Tensor, right: Tensor) -> None:
    torch.testing.assert_close(left, right, **EXACT)


# local SGD


@each_task
@pytest.mark.parametrize("window", [1, 4])
def test_local_sgd_is_model_averaging_bit_for_bit(task: Callable[[], Task], window: int) -> None:
    left = run(task(), "local-sgd", 3, 12, lr=LR, window=window)
    assert left.digest == run(task(), "averaging", 3, 12, lr=LR, window=window).digest


@in_double
@pytest.mark.parametrize("rule", ["sgd", "momentum", "nesterov"])
@pytest.mark.parametrize("buffers", ["local", "average"])
def test_a_window_of_one_is_sync(task: Callable[[], Task], rule: str, buffers: str) -> None:
    left = run(task(), "local-sgd", 4, 40, lr=0.02, window=1, rule=rule, buffers=buffers)
    close(left.vector, run(task(), "sync", 4, 40, lr=0.02, rule=rule).vector)


def test_reset_momentum_is_not_sync_momentum() -> None:
    left = run(bowl(), "local-sgd", 4, 40, lr=0.02, window=1, rule="momentum", buffers="reset").vector
    close(left, run(bowl(), "sync", 4, 40, lr=0.02).vector)  # each step is the first of its momentum
    assert (left - run(bowl(), "sync", 4, 40, lr=0.02, rule="momentum").vector).abs().max() > 1e-3


@pytest.mark.parametrize("buffers", ["local", "average"])
def test_local_adam_with_a_window_of_one_is_not_sync_adam(buffers: str) -> None:
    left = run(bowl(), "local-sgd", 4, 40, lr=0.02, window=1, rule="adam", buffers=buffers).vector
    assert (left - run(bowl(), "sync", 4, 40, lr=0.02, rule="adam").vector).abs().max() > 1e-3


@in_double
def test_averaged_adam_buffers_are_equal_at_all_workers_and_their_mean(task: Callable[[], Task]) -> None:
    e = engine(task(), "local-sgd", 3, lr=0.02, rule="adam", window=3, buffers="average")
    e.run(4)
    e.run(park_at=4)
    means = [seat.worker.state.adam_mean for seat in e.seats]
    assert all(torch.equal(means[0], other) for other in means[1:])
    plain = engine(task(), "local-sgd", 3, lr=0.02, rule="adam", window=3)
    plain.run(park_at=1)
    first = engine(task(), "local-sgd", 3, lr=0.02, rule="adam", window=3, buffers="average")
    first.run(park_at=1)
    rows = torch.stack([seat.worker.state.adam_square for seat in plain.seats])
    close(first.seats[1].worker.state.adam_square, rows.mean(0))


@in_double
def test_post_local_is_a_window_of_one_first(task: Callable[[], Task]) -> None:
    """The first updates are those of a window of one; then one more window begins from there."""
    early = run(task(), "local-sgd", 3, 7, lr=LR, window=5, post_local=7)
    assert early.digest == run(task(), "local-sgd", 3, 7, lr=LR, window=1).digest
    later = run(task(), "local-sgd", 3, 9, lr=LR, window=5, post_local=7)
    assert later.gradients == 3 * (7 + 2 * 5)


def test_a_window_follows_its_schedule() -> None:
    taken: list[int] = []
    run(bowl(), "local-sgd", 2, 9, lr=LR, window="step:1,over=3,gamma=2", watch=lambda e: taken.append(e.gradients))
    per_worker = [(now - before) // 2 for before, now in zip([0, *taken], taken, strict=False)]
    assert per_worker == [1, 1, 1, 2, 2, 2, 4, 4, 4]


CURVATURES, CENTRES = (1.0, 2.0, 0.5), (0.0, 1.0, 4.0)


@pytest.mark.parametrize("window", [1, 4, 16])
@pytest.mark.parametrize("scheme", ["local-sgd", "diloco", "slowmo"])
def test_windows_weigh_workers_by_the_distance_that_they_cover(scheme: str, window: int) -> None:
    """x* = sum a_i s_i / sum a_i with a_i = 1 - (1 - lr h_i)^window, whatever the outer rule."""
    task = quadratic(dim=1, curvatures=CURVATURES, centres=CENTRES, dtype="float64")
    weights = [1 - (1 - 0.1 * h) ** window for h in CURVATURES]
    rest = sum(a * s for a, s in zip(weights, CENTRES, strict=True)) / sum(weights)
    found = run(task, scheme, 3, 800, lr=0.1, rule="sgd", window=window).vector.item()
    assert found == pytest.approx(rest, abs=1e-9)
    if window > 1:
        assert abs(found - 8 / 7) > 0.01  # the optimum of the sum


# outer rules


@in_double
@pytest.mark.parametrize("window", [1, 6])
def test_diloco_with_an_outer_rate_of_one_is_local_sgd_and_fedavg(task: Callable[[], Task], window: int) -> None:
    local = run(task(), "local-sgd", 3, 10, lr=LR, window=window).vector
    plain = {"lr": LR, "rule": "sgd", "window": window}
    close(run(task(), "diloco", 3, 10, outer="sgd", outer_lr=1.0, **plain).vector, local)


@in_double
@pytest.mark.parametrize("window", [1, 6])
def test_sagn_is_diloco_with_an_outer_rate_of_one_over_the_window(task: Callable[[], Task], window: int) -> None:
    outer = {"rule": "sgd", "outer": "sgd", "outer_lr": 1 / window}
    left = run(task(), "sagn", 3, 10, lr=LR, window=window).vector
    close(run(task(), "diloco", 3, 10, lr=LR, window=window, **outer).vector, left)


@in_double
def test_slowmo_without_momentum_is_local_sgd(task: Callable[[], Task]) -> None:
    left = run(task(), "slowmo", 3, 10, lr=LR, window=6, beta=0.0).vector
    close(left, run(task(), "local-sgd", 3, 10, lr=LR, window=6).vector)


@in_double
@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 0.5), (0.7, 0.8)])
def test_slowmo_is_diloco_with_outer_heavy_ball(task: Callable[[], Task], alpha: float, beta: float) -> None:
    left = run(task(), "slowmo", 3, 10, lr=LR, window=6, alpha=alpha, beta=beta).vector
    outer = {"rule": "sgd", "outer": "momentum", "outer.momentum": beta, "outer_lr": alpha}
    close(run(task(), "diloco", 3, 10, lr=LR, window=6, **outer).vector, left)


def test_slowmo_alone_without_momentum_is_lookahead() -> None:
    x, (g,) = bowl().start(SEED), crew(bowl(), 1)
    for _ in range(10):
        y = x.clone()
        for _ in range(5):
            y = y - LR * g(y)
        x = x + 0.5 * (y - x)
    close(run(bowl(), "slowmo", 1, 10, lr=LR, window=5, alpha=0.5, beta=0.0).vector, x)


def by_hand(task: Task, workers: int, rounds: int, window: int) -> Tensor:
    """DiLoCo with torch's own optimizers: a model and an AdamW for each worker, an outer SGD with Nesterov momentum.
    Each worker's parameters are set back to the outer ones after a round, as torchft does."""
    centre = nn.Parameter(task.start(SEED))
    outer = torch.optim.SGD([centre], lr=0.7, momentum=0.9, nesterov=True)
    gradients = crew(task, workers)
    models = [nn.Parameter(task.start(SEED)) for _ in range(workers)]
    inner = [torch.optim.AdamW([model], lr=4e-4, weight_decay=0.1) for model in models]
    for _ in range(rounds):
        for g, model, optimizer in zip(gradients, models, inner, strict=True):
            for _ in range(window):
                model.grad = g(model.detach())
                optimizer.step()
        ways = [centre.detach() - model.detach() for model in models]
        total = ways[0].clone()
        for way in ways[1:]:
            total += way
        centre.grad = total / workers
        outer.step()
        for model in models:
            model.data.copy_(centre.data)
    return centre.detach()


@each_task
@pytest.mark.parametrize("workers", [1, 3])
def test_diloco_is_adamw_inside_and_nesterov_outside_bit_for_bit(task: Callable[[], Task], workers: int) -> None:
    left = run(task(), "diloco", workers, 6, window=5)
    assert left.digest == digest(by_hand(task(), workers, 6, 5))


def test_muon_inside_diloco() -> None:
    """MuLoCo: the local steps are those of torch's Muon on the parameters' own shapes."""

    def matrices() -> Task:
        from paceline import TorchTask

        generator = torch.Generator().manual_seed(3)
        rows = torch.randn(60, 4, generator=generator)
        model = lambda: nn.Sequential(nn.Linear(4, 6, bias=False), nn.Tanh(), nn.Linear(6, 4, bias=False))  # noqa: E731
        return TorchTask(model, nn.functional.mse_loss, (rows, rows.flip(1)), batch=6, name="matrices")

    task = matrices()
    model = nn.Sequential(nn.Linear(4, 6, bias=False), nn.Tanh(), nn.Linear(6, 4, bias=False))
    flat, (g,) = task.start(SEED), crew(task, 1)
    weights = [model[0].weight, model[2].weight]
    edges = [0, weights[0].numel(), flat.numel()]

    def put(vector: Tensor, *, grad: bool) -> None:
        for weight, low, high in zip(weights, edges, edges[1:], strict=False):
            part = vector[low:high].view(weight.shape).clone()
            if grad:
                weight.grad = part
            else:
                weight.data.copy_(part)

    put(flat, grad=False)
    optimizer = torch.optim.Muon(weights, lr=0.02, weight_decay=0.1, momentum=0.95, nesterov=True, eps=1e-7)
    for _ in range(4):
        put(g(torch.cat([weight.detach().flatten() for weight in weights])), grad=True)
        optimizer.step()
    ended = torch.cat([weight.detach().flatten() for weight in weights])
    hyper: dict[str, Any] = {"rule": "muon", "lr": 0.02, "outer": "sgd", "outer_lr": 1.0, "window": 4}
    torch.testing.assert_close(run(matrices(), "diloco", 1, 1, **hyper).vector, ended, rtol=0, atol=1e-6)
    assert math.isfinite(run(matrices(), "diloco", 2, 3, rule="muon", lr=0.02, window=4).metrics["loss"])
