"""Nobody waits. Algorithms, section 9: identities 4, 9, 12, 13; and every server's listing, push by push.

Compute times are exponential here, so the order of pushes is irregular; the oracles draw it from the same streams.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from heapq import heapify, heappop, heappush

import pytest
import torch
from oracles import EXACT, SEED, Gradients, alone, bowl, clocks, crew, each_task, in_double, network, path, pushes, run
from torch import Tensor

from paceline import Task
from paceline.result import digest

LR, RANDOM = 0.02, "exponential:1"

Apply = Callable[[Tensor, Tensor, Tensor, int], Tensor]  # x, sum of the window's gradients, x_i, staleness


def server(task: Task, workers: int, updates: int, window: int, apply: Apply) -> Tensor:
    """pull; `window` local steps of SGD; push their sum; the server's `apply` gives the next x."""
    x, gradients = task.start(SEED), crew(task, workers)
    pulled, version = [x.clone() for _ in gradients], [0] * workers
    for v, i in enumerate(pushes(alone(workers), updates, window)):
        y, total = pulled[i], torch.zeros_like(x)
        for _ in range(window):
            g = gradients[i](y)
            total, y = total + g, y.add(g, alpha=-LR)
        x = apply(x, total, pulled[i], v - version[i])
        pulled[i], version[i] = x, v + 1
    return x


@each_task
@pytest.mark.parametrize("workers", [2, 5])
def test_async_adds_every_gradient_as_it_comes_bit_for_bit(task: Callable[[], Task], workers: int) -> None:
    oracle = server(task(), workers, 60, 1, lambda x, g, _, __: x.add(g, alpha=-LR))
    assert run(task(), "async", workers, 60, lr=LR, compute=RANDOM).digest == digest(oracle)


@each_task
@pytest.mark.parametrize("compute", [RANDOM, "constant:1", "pareto:1,1.5"])
def test_what_is_asynchronous_sgd_under_another_name_has_its_bits(task: Callable[[], Task], compute: str) -> None:
    names = {
        "agn": {"window": 1},
        "downpour-easy": {"window": 1},
        "downpour": {"server_rule": "sgd"},
        "adag": {"window": 1, "gamma": 1e30},
        "groups": {"size": 1},
        "hogwild": {"chunks": 1},
    }
    oracle = run(task(), "async", 4, 50, lr=LR, compute=compute).digest
    found = {name: run(task(), name, 4, 50, lr=LR, compute=compute, **hyper).digest for name, hyper in names.items()}
    assert found == dict.fromkeys(names, oracle)


@pytest.mark.parametrize("compute", [RANDOM, "constant:1"])
def test_a_large_gamma_makes_adag_a_plain_push_bit_for_bit(compute: str) -> None:
    for hyper, plain in (({}, "downpour-easy"), ({"normalise": True}, "agn"), ({"distance": "norm"}, "downpour-easy")):
        left = run(network(), "adag", 4, 40, lr=LR, window=3, gamma=math.inf, compute=compute, **hyper)
        assert left.digest == run(network(), plain, 4, 40, lr=LR, window=3, compute=compute).digest


@in_double
@pytest.mark.parametrize("window", [1, 4])
class TestListings:
    def test_downpour_easy_adds_the_workers_way(self, task: Callable[[], Task], window: int) -> None:
        oracle = server(task(), 4, 40, window, lambda x, total, _, __: x - LR * total)
        x = run(task(), "downpour-easy", 4, 40, lr=LR, window=window, compute=RANDOM).vector
        torch.testing.assert_close(x, oracle, **EXACT)

    def test_agn_adds_the_mean_of_the_window(self, task: Callable[[], Task], window: int) -> None:
        oracle = server(task(), 4, 40, window, lambda x, total, _, __: x - LR * total / window)
        x = run(task(), "agn", 4, 40, lr=LR, window=window, compute=RANDOM).vector
        torch.testing.assert_close(x, oracle, **EXACT)

    def test_downpour_runs_adagrad_on_the_pushed_sums(self, task: Callable[[], Task], window: int) -> None:
        squares = torch.zeros_like(task().start(SEED))

        def adagrad(x: Tensor, total: Tensor, _: Tensor, __: int) -> Tensor:
            squares.add_(total**2)
            return x - 0.05 * total / (squares.sqrt() + 1e-10)

        oracle = server(task(), 4, 40, window, adagrad)
        x = run(task(), "downpour", 4, 40, lr=LR, window=window, compute=RANDOM, server_lr=0.05).vector
        torch.testing.assert_close(x, oracle, **EXACT)

    def test_dynsgd_divides_by_staleness_plus_one(self, task: Callable[[], Task], window: int) -> None:
        oracle = server(task(), 4, 40, window, lambda x, total, _, tau: x - LR * total / (tau + 1))
        x = run(task(), "dynsgd", 4, 40, lr=LR, window=window, compute=RANDOM).vector
        torch.testing.assert_close(x, oracle, **EXACT)
        full = run(task(), "downpour-easy", 4, 40, lr=LR, window=window, compute=RANDOM).vector
        assert (x - full).abs().max() > 1e-3

    def test_consgd_divides_by_the_number_of_workers(self, task: Callable[[], Task], window: int) -> None:
        oracle = server(task(), 4, 40, window, lambda x, total, _, __: x - LR * total / 4)
        x = run(task(), "dynsgd", 4, 40, lr=LR, window=window, compute=RANDOM, weight="constant").vector
        torch.testing.assert_close(x, oracle, **EXACT)

    @pytest.mark.parametrize("distance", ["element", "norm"])
    @pytest.mark.parametrize("normalise", [False, True])
    def test_adag_damps_where_the_centre_has_moved(
        self, task: Callable[[], Task], window: int, distance: str, normalise: bool
    ) -> None:
        gamma = 1e-2

        def damped(x: Tensor, total: Tensor, pulled: Tensor, _: int) -> Tensor:
            square = (x - pulled) ** 2
            square = square if distance == "element" else square.sum()
            return x - LR * total / (window if normalise else 1) / (square / gamma + 1)

        oracle = server(task(), 4, 40, window, damped)
        hyper = {"gamma": gamma, "distance": distance, "normalise": normalise}
        x = run(task(), "adag", 4, 40, lr=LR, window=window, compute=RANDOM, **hyper).vector
        torch.testing.assert_close(x, oracle, **EXACT)


@in_double
@pytest.mark.parametrize("crews", [[[0, 1], [2, 3]], [[0, 1, 2], [3, 4, 5], [6]]])
def test_a_group_pushes_its_mean_gradient_once(task: Callable[[], Task], crews: list[list[int]]) -> None:
    workers = sum(map(len, crews))
    x, gradients = task().start(SEED), crew(task(), workers)
    pulled = [x.clone() for _ in crews]
    for group in pushes(crews, 50):
        every = [gradients[rank](pulled[group]) for rank in crews[group]]
        x = x - LR * sum(every) / len(every)
        pulled[group] = x
    result = run(task(), "groups", workers, 50, lr=LR, size=len(crews[0]), compute=RANDOM)
    torch.testing.assert_close(result.vector, x, **EXACT)


@pytest.mark.parametrize(("n_push", "n_fetch"), [(1, 3), (3, 1), (2, 3), (4, 2), (1, 1)])
@pytest.mark.parametrize("literal", [False, True])
def test_downpour_fetches_and_pushes_on_schedules_of_their_own(n_push: int, n_fetch: int, literal: bool) -> None:
    task = network()
    x, g, v, s = task.start(SEED), Gradients(task), 0, 0
    a, squares, y = torch.zeros_like(x), torch.zeros_like(x), x
    while v < 12:
        if s % n_fetch == 0:
            y = x
        gradient = g(y)
        a, y = a + gradient, y - LR * gradient
        if (s if literal else s + 1) % n_push == 0:
            squares = squares + a**2
            x = x - LR * a / (squares.sqrt() + 1e-10)
            a, v = torch.zeros_like(x), v + 1
        s += 1
    hyper = {"n_push": n_push, "n_fetch": n_fetch, "paper_schedule": literal}
    torch.testing.assert_close(run(task, "downpour", 1, 12, lr=LR, **hyper).vector, x, **EXACT)


@in_double
@pytest.mark.parametrize("workers", [2, 5])
def test_in_turn_dynsgd_settles_to_async_at_a_share_of_the_rate(task: Callable[[], Task], workers: int) -> None:
    """After the first round every push is workers - 1 versions old, and so counts one over workers."""
    points, gradients = path(task(), "dynsgd", workers, 40, lr=0.1, window=1), crew(task(), workers)
    for k in range(40):
        pulled = points[max(0, k - workers + 1)]
        rate = 0.1 / min(k + 1, workers)
        torch.testing.assert_close(points[k + 1], points[k] - rate * gradients[k % workers](pulled), **EXACT)


def test_a_push_of_staleness_one_counts_half() -> None:
    """1 / (tau + 1), not 1 / tau."""
    task = bowl(noise=0.0, heterogeneity=0.0)
    x0, x1, x2 = path(task, "dynsgd", 2, 2, lr=LR, window=1)
    torch.testing.assert_close(x2 - x1, (x1 - x0) / 2, **EXACT)


@pytest.mark.parametrize("chunks", [2, 5, 23])
def test_hogwild_reads_and_adds_piece_by_piece(chunks: int) -> None:
    """Every piece of every read and add is an event of its own; what a worker reads may never have been x."""
    task, workers, access, updates = bowl(), 3, 0.7, 50
    x, gradients, rngs = task.start(SEED), crew(task, workers), clocks(workers)
    edges = [23 * k // chunks for k in range(chunks + 1)]
    torn, g = [x.clone() for _ in rngs], [x.clone() for _ in rngs]
    events = [(0.0, rank, "read", 0) for rank in range(workers)]
    heapify(events)
    begun, last = [0.0] * workers, chunks - 1
    while updates:
        now, i, what, k = heappop(events)
        part = slice(edges[k], edges[k + 1])
        if what == "read":
            torn[i][part] = x[part]
        else:
            x[part] -= LR * g[i][part]
            updates -= k == last
        if k < last:
            heappush(events, (begun[i] + (k + 1) * access / chunks, i, what, k + 1))
        elif what == "read":
            begun[i] = now + rngs[i].standard_exponential()
            g[i] = gradients[i](torn[i])
            heappush(events, (begun[i], i, "add", 0))
        else:
            begun[i] = now
            heappush(events, (now, i, "read", 0))
    result = run(task, "hogwild", workers, 50, lr=LR, chunks=chunks, access=access, compute=RANDOM)
    torch.testing.assert_close(result.vector, x, **EXACT)
    assert result.virtual_seconds == now
    whole = run(task, "hogwild", workers, 50, lr=LR, chunks=1, access=access, compute=RANDOM)
    assert (whole.vector - x).abs().max() > 1e-4
