"""Bounded and corrected staleness, optimal time. Algorithms, section 9: identities 8 to 11, 13 to 17, 34, 35, 37, and
what must differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracles import (
    EXACT,
    SEED,
    alone,
    bowl,
    by_torch,
    crew,
    descent,
    each_task,
    in_double,
    line,
    network,
    path,
    pushes,
    run,
)
from torch import Tensor

from paceline import Task
from paceline.config.build import scheme_of
from paceline.result import digest
from paceline.tasks.quadratic import quadratic

LR, RANDOM = 0.02, "exponential:1"
TIMES = [RANDOM, "constant:1", "pareto:1,1.5"]


def digests(task: Callable[[], Task], names: dict[str, dict[str, Any]], workers: int, **options: Any) -> dict[str, str]:
    return {name: run(task(), name, workers, 50, lr=LR, **options, **hyper).digest for name, hyper in names.items()}


@each_task
@pytest.mark.parametrize("compute", TIMES)
def test_what_is_synchronous_sgd_has_its_bits(task: Callable[[], Task], compute: str) -> None:
    """Identity 8."""
    names = {"k-sync": {"k": 4}, "k-async": {"k": 4}, "m-sync": {"k": 4}}
    oracle = run(task(), "sync", 4, 50, lr=LR, compute=compute).digest
    assert digests(task, names, 4, compute=compute) == dict.fromkeys(names, oracle)


@each_task
@pytest.mark.parametrize("compute", TIMES)
def test_what_is_asynchronous_sgd_has_its_bits(task: Callable[[], Task], compute: str) -> None:
    """Identities 9, 13, 16."""
    names: dict[str, dict[str, Any]] = {
        "k-async": {"k": 1},
        "k-batch-async": {"k": 1},
        "softsync": {"n": 4, "weight": "constant"},
        "ssp": {"bound": None},
        "ringmaster": {"threshold": 10**6},
        "drop-stale": {"bound": 10**6},
        "delay-adaptive": {"bound": 10**6},
        "dc-asgd": {"lam": 0.0},
        "dana": {"momentum": 0.0},
        "ormo": {"momentum": 0.0},
    }
    oracle = run(task(), "async", 4, 50, lr=LR, compute=compute).digest
    assert digests(task, names, 4, compute=compute) == dict.fromkeys(names, oracle)


@each_task
@pytest.mark.parametrize("hyper", [{}, {"times": (1, 1, 1, 1)}])
def test_equal_times_make_rescaled_asynchronous_sgd(task: Callable[[], Task], hyper: dict[str, Any]) -> None:
    """Identity 34, bit for bit: also where the server has to find out that times are equal."""
    oracle = run(task(), "async", 4, 60, lr=LR)
    assert run(task(), "rescaled", 4, 60, lr=LR, **hyper).digest == oracle.digest


@each_task
@pytest.mark.parametrize(("k", "workers"), [(1, 3), (3, 3), (5, 2), (4, 7)])
def test_rennala_is_k_batch_sync(task: Callable[[], Task], k: int, workers: int) -> None:
    """Identity 10."""
    same = [run(task(), name, workers, 40, lr=LR, k=k, compute=RANDOM) for name in ("rennala", "k-batch-sync")]
    assert same[0].digest == same[1].digest
    assert same[0].virtual_seconds == same[1].virtual_seconds


@in_double
@pytest.mark.parametrize("read", ["eager", "lazy"])
@pytest.mark.parametrize("compute", [RANDOM, "constant:1"])
def test_ssp_of_bound_0_is_sync_at_the_workers_share_of_the_rate(
    task: Callable[[], Task], read: str, compute: str
) -> None:
    """Identity 8, to rounding: pushes are added one by one."""
    rounds, workers = 12, 4
    ssp = run(task(), "ssp", workers, rounds * workers, lr=LR / workers, bound=0, read=read, compute=compute)
    sync = run(task(), "sync", workers, rounds, lr=LR, compute=compute)
    torch.testing.assert_close(ssp.vector, sync.vector, **EXACT)
    assert ssp.virtual_seconds == sync.virtual_seconds


@pytest.mark.parametrize("stop", [True, False])
def test_a_threshold_of_one_is_sgd_on_whichever_gradient_comes_first(stop: bool) -> None:
    """Identity 11: every applied gradient is fresh, and replaying their samples by SGD gives x."""
    task, workers = network(), 3
    result = run(task, "ringmaster", workers, 60, lr=LR, threshold=1, stop=stop, compute=RANDOM)
    assert set(result.staleness.histogram) == {0}
    assert (result.dropped > 0) != stop
    if not stop:
        return
    # a stopped gradient's batch is the worker's next one: the batches of each worker enter in their order
    x, gradients = task.start(SEED), crew(task, workers)
    points, order = [x], []
    seen = [0] * workers

    def watch(e: Any) -> None:
        points.append(e.centre.x.clone())
        now = [seat.gradients for seat in e.seats]
        order.append(next(rank for rank in range(workers) if now[rank] > seen[rank]))
        seen[:] = now

    run(task, "ringmaster", workers, 60, lr=LR, threshold=1, compute=RANDOM, watch=watch)
    for rank in order:
        x = x.add(gradients[rank](x), alpha=-LR)
    assert digest(x) == result.digest
    assert len(set(order)) == workers


def test_ringmaster_drops_as_drop_stale_does() -> None:
    for bound in (0, 1, 3):
        ours = run(network(), "ringmaster", 4, 50, lr=LR, threshold=bound + 1, stop=False, compute=RANDOM)
        theirs = run(network(), "drop-stale", 4, 50, lr=LR, bound=bound, compute=RANDOM)
        assert (ours.digest, ours.dropped) == (theirs.digest, theirs.dropped)
        assert ours.staleness.max <= bound


@in_double
def test_the_look_ahead_of_dana_zero_is_the_x_of_dana_slim(task: Callable[[], Task]) -> None:
    """Identity 14: all points at which gradients are taken are the same."""

    def looked(variant: str) -> list[Tensor]:
        points: list[Tensor] = []

        def watch(e: Any) -> None:
            s = e.centre
            points.append(s.x - LR * 0.9 * s.total if variant == "zero" else s.x.clone())

        run(task(), "dana", 4, 60, lr=LR, variant=variant, compute=RANDOM, watch=watch)
        return points

    for zero, slim in zip(looked("zero"), looked("slim"), strict=True):
        torch.testing.assert_close(zero, slim, **EXACT)


def test_one_worker_of_dana_is_nesterov_and_of_ormo_heavy_ball() -> None:
    """Identities 15 and 17, against torch.optim."""
    task = network()
    nesterov = by_torch(task, 40, lambda x: torch.optim.SGD(x, lr=LR, momentum=0.9, nesterov=True))
    assert run(task, "dana", 1, 40, lr=LR).digest == digest(nesterov)
    heavy = by_torch(task, 40, lambda x: torch.optim.SGD(x, lr=LR, momentum=0.9))
    torch.testing.assert_close(run(task, "ormo", 1, 40, lr=LR).vector, heavy, **EXACT)


@in_double
def test_ormo_in_order_is_synchronous_momentum_on_sums(task: Callable[[], Task]) -> None:
    """Identity 17. In turn, every worker computes at the x that its own last push left; so by the listing."""
    workers, mu = 3, 0.9
    points, gradients = path(task(), "ormo", workers, 30, lr=LR), crew(task(), workers)
    x, u = points[0], torch.zeros_like(points[0])
    pulled, tags = [x] * workers, [0] * workers
    for t in range(30):
        i, b = t % workers, t // workers
        if t and t % workers == 0:
            x, u = x - mu * u, mu * u
        lag = b - -(-tags[i] // workers)
        g = gradients[i](pulled[i])
        u, x = u + mu**lag * LR * g, x - LR * g * (1 - mu ** (lag + 1)) / (1 - mu)
        pulled[i], tags[i] = x, t + 1
        torch.testing.assert_close(points[t + 1], x, **EXACT)
    # gradients that do not depend on x: what is left is the order alone
    flat = quadratic(dim=5, curvature=1e-300, heterogeneity=0.0, noise=1.0, dtype="float64")
    ours = run(flat, "ormo", workers, 30, lr=LR)
    theirs = run(flat, "sync", workers, 10, lr=LR, rule="momentum", reduce="sum")
    torch.testing.assert_close(ours.vector, theirs.vector, **EXACT)


def ordered(arrivals: list[tuple[int, Tensor]], workers: int) -> tuple[Tensor, Tensor]:
    """OrMo's x and u after these gradients, each with the version that it was computed at."""
    scheme: Any = scheme_of("ormo", {"momentum": 0.9, "lr": 1.0})
    s = scheme.server(torch.zeros_like(arrivals[0][1]), workers)
    for version, g in arrivals:
        type(scheme).push.function(scheme, s, g, version)
    return s.x, s.u


def test_the_momentum_of_ormo_weighs_gradients_by_their_round() -> None:
    """The example of the paper's Figure 1: after the tenth gradient of 4 workers, 0.81, 0.9 and 1."""
    one_each = torch.eye(10, dtype=torch.float64)
    x, u = ordered([(k // 4 * 4, one_each[k]) for k in range(10)], 4)
    torch.testing.assert_close(u, torch.tensor([0.81] * 4 + [0.9] * 4 + [1.0] * 2, dtype=torch.float64), **EXACT)
    torch.testing.assert_close(-x, torch.tensor([2.71] * 4 + [1.9] * 4 + [1.0] * 2, dtype=torch.float64), **EXACT)


@pytest.mark.parametrize("late", [(0,), (1, 4), (2, 5)])
def test_what_is_late_enters_ormo_as_if_it_had_come_in_time(late: tuple[int, ...]) -> None:
    """Rounds of three: some gradients of the first two come after all of the third."""
    one_each = torch.eye(9, dtype=torch.float64)
    gradients = [(k // 3 * 3, one_each[k]) for k in range(9)]
    early = [gradients[k] for k in range(9) if k not in late]
    arrivals = [(min(version, at), g) for at, (version, g) in enumerate(early)] + [gradients[k] for k in late]
    for ours, theirs in zip(ordered(arrivals, 3), ordered(gradients, 3), strict=True):
        torch.testing.assert_close(ours, theirs, **EXACT)


def stale_server(task: Task, workers: int, updates: int, apply: Callable[..., Tensor]) -> Tensor:
    """pull; a gradient; push; `apply(x, g, pulled x, staleness, worker)` gives the next x."""
    x, gradients = task.start(SEED), crew(task, workers)
    pulled, version = [x.clone() for _ in gradients], [0] * workers
    for v, i in enumerate(pushes(alone(workers), updates)):
        x = apply(x, gradients[i](pulled[i]), pulled[i], v - version[i], i)
        pulled[i], version[i] = x, v + 1
    return x


@in_double
class TestListings:
    def same(self, task: Callable[[], Task], name: str, apply: Callable[..., Tensor], **hyper: Any) -> None:
        x = run(task(), name, 4, 50, lr=LR, compute=RANDOM, **hyper).vector
        torch.testing.assert_close(x, stale_server(task(), 4, 50, apply), **EXACT)

    @pytest.mark.parametrize("adaptive", [False, True])
    def test_dc_asgd(self, task: Callable[[], Task], adaptive: bool) -> None:
        ms = torch.zeros_like(task().start(SEED))

        def apply(x: Tensor, g: Tensor, pulled: Tensor, tau: int, i: int) -> Tensor:
            nonlocal ms
            ms = 0.95 * ms + 0.05 * g * g
            lam = 0.3 / (ms + 1e-7).sqrt() if adaptive else 0.3
            return x - LR * (g + lam * g * g * (x - pulled))

        self.same(task, "dc-asgd", apply, lam=0.3, adaptive=adaptive)

    @pytest.mark.parametrize("momentum", [0.0, 0.5])
    def test_gap_aware(self, task: Callable[[], Task], momentum: float) -> None:
        start = torch.zeros_like(task().start(SEED))
        state = {"ema": start, "m": start, "t": 0}

        def apply(x: Tensor, g: Tensor, pulled: Tensor, tau: int, i: int) -> Tensor:
            usual = (state["ema"] / (1 - 0.999 ** state["t"])).sqrt() if state["t"] else start
            g = g / (1 + (x - pulled).abs() / (LR * (usual + 1e-8)))
            state["m"] = momentum * state["m"] + g
            state["ema"] = 0.999 * state["ema"] + 0.001 * state["m"] ** 2
            state["t"] += 1
            return x - LR * state["m"]

        hyper = {"rule": "momentum", "rule.momentum": momentum} if momentum else {}
        self.same(task, "gap-aware", apply, **hyper)

    def test_delay_adaptive(self, task: Callable[[], Task]) -> None:
        self.same(task, "delay-adaptive", lambda x, g, _, tau, i: x - LR * g * 4 / max(4, tau))

    @pytest.mark.parametrize("weight", ["polynomial", "hinge", "constant"])
    def test_fedasync(self, task: Callable[[], Task], weight: str) -> None:
        def apply(x: Tensor, g: Tensor, pulled: Tensor, tau: int, i: int) -> Tensor:
            hinge = 1 / (0.5 * max(0, tau - 2) + 1)
            a = 0.6 * {"polynomial": (tau + 1) ** -0.5, "constant": 1.0, "hinge": hinge}[weight]
            return (1 - a) * x + a * (pulled - LR * g)

        self.same(task, "fedasync", apply, weight=weight, window=1, hinge=2)

    def test_rescaled(self, task: Callable[[], Task]) -> None:
        takes: dict[int, float] = {}

        def apply(x: Tensor, g: Tensor, pulled: Tensor, tau: int, i: int) -> Tensor:
            takes[i] = takes[i] + 0.1 * (tau + 1 - takes[i]) if i in takes else 4.0
            return x - LR * takes[i] / 4 * g

        self.same(task, "rescaled", apply, ema=0.1)

    def test_softsync_divides_by_staleness_and_by_the_number_of_pushes(self, task: Callable[[], Task]) -> None:
        workers, count = 6, 3
        x, gradients = task().start(SEED), crew(task(), workers)
        pulled, version, kept, v = [x] * workers, [0] * workers, [], 0
        for i in pushes(alone(workers), 20 * count):
            kept.append(gradients[i](pulled[i]) / max(1, v - version[i]))
            if len(kept) == count:
                x, v, kept = x - LR * sum(kept) / count, v + 1, []
            pulled[i], version[i] = x, v
        result = run(task(), "softsync", workers, 20, lr=LR, n=2, compute=RANDOM)
        torch.testing.assert_close(result.vector, x, **EXACT)

    def test_ace_steps_along_the_mean_of_the_latest_gradients(self, task: Callable[[], Task]) -> None:
        workers = 3
        points, gradients = path(task(), "ace", workers, 30, lr=LR), crew(task(), workers)
        table = [g(points[0]) for g in gradients]  # all at the first x; the last one makes the update
        x = points[0] - LR * sum(table) / workers
        torch.testing.assert_close(points[1], x, **EXACT)
        pulled = [x] * workers
        for t in range(29):
            i = t % workers
            table[i] = gradients[i](pulled[i])
            x = x - LR * sum(table) / workers
            pulled[i] = x
            torch.testing.assert_close(points[t + 2], x, **EXACT)

    def test_malenia_averages_every_worker_first(self, task: Callable[[], Task]) -> None:
        """Worker 0 is four times as fast: it gives four gradients to a round."""
        x, gradients = task().start(SEED), crew(task(), 2)
        for _ in range(10):
            own = [sum(gradients[0](x) for _ in range(4)) / 4, gradients[1](x)]
            x = x - LR * sum(own) / 2
        result = run(task(), "malenia", 2, 10, lr=LR, speeds=(4.0, 1.0))
        torch.testing.assert_close(result.vector, x, **EXACT)

    def test_ringleader_updates_once_per_worker_and_round(self, task: Callable[[], Task]) -> None:
        """Equal times, in turn: the last of phase 1 makes the first update, the others follow with fresh gradients."""
        points = path(task(), "ringleader", 3, 9, lr=LR)
        gradients = crew(task(), 3)
        x = points[0]
        table = [g(x) for g in gradients]
        x1 = x - LR * sum(table) / 3
        torch.testing.assert_close(points[1], x1, **EXACT)
        table[0] = (table[0] + gradients[0](x)) / 2  # it had begun at the first x again
        x2 = x1 - LR * sum(table) / 3
        torch.testing.assert_close(points[2], x2, **EXACT)


@pytest.mark.parametrize("name", ["sync", "malenia", "ringleader", "ace"])
def test_equal_times_count_every_worker_alike(name: str) -> None:
    """Identity 35: with equal, constant times every update is a mean over all workers."""
    task = quadratic(dim=1, curvatures=(1.0, 1.0, 1.0), centres=(0.0, 3.0, 9.0), dtype="float64")
    assert run(task, name, 3, 900, lr=0.05).vector.item() == pytest.approx(4.0, abs=1e-6)


def test_equal_batches_of_workers_are_one_large_batch() -> None:
    """Identity 37, by slices of the same samples."""
    one = run(network(batch=12), "sgd", 1, 30, lr=LR, feed="slice")
    for name in ("sync", "k-sync", "malenia", "mindflayer"):
        hyper = {"k": 3} if name == "k-sync" else {}
        several = run(network(batch=12), name, 3, 30, lr=LR, feed="slice", **hyper)
        torch.testing.assert_close(several.vector, one.vector, **EXACT)


def test_what_must_differ() -> None:
    def x(name: str, **hyper: Any) -> Tensor:
        return run(bowl(), name, 4, 40, lr=LR, compute=RANDOM, **hyper).vector

    def apart(a: Tensor, b: Tensor) -> bool:
        return bool((a - b).abs().max() > 1e-4)

    assert apart(x("softsync", n=1), x("sync"))
    assert apart(x("k-batch-sync", k=3), x("k-sync", k=3))
    assert apart(x("softsync", n=4), x("dynsgd", window=1))  # 1 / tau and 1 / (tau + 1)
    assert apart(x("ssp", read="lazy"), x("ssp", read="eager"))
    assert apart(x("dana"), run(bowl(), "async", 4, 40, lr=LR, rule="nesterov", compute=RANDOM).vector)


def test_mindflayer_without_a_deadline_is_sync_of_all_tries() -> None:
    x, gradients = network().start(SEED), crew(network(), 3)
    for _ in range(15):
        x = x - LR * sum(g(x) for g in gradients for _ in range(2)) / 6
    torch.testing.assert_close(run(network(), "mindflayer", 3, 15, lr=LR, tries=2).vector, x, **EXACT)


def test_mindflayer_gives_up_what_takes_too_long() -> None:
    """A twentieth of the gradients take a hundred times as long: rounds without a deadline wait for one of them."""
    slow = {"compute": "slowdown:1,100,0.05", "lr": LR}
    patient = run(line(), "mindflayer", 8, 60, **slow)
    brisk = run(line(), "mindflayer", 8, 60, deadline=1.5, **slow)
    assert patient.virtual_seconds > 10 * brisk.virtual_seconds
    assert brisk.virtual_seconds <= 60 * 1.5
    assert 0.85 * patient.gradients < brisk.gradients < patient.gradients


def test_one_worker_of_ace_is_sequential_to_rounding() -> None:
    torch.testing.assert_close(run(network(), "ace", 1, 40, lr=LR).vector, descent(network(), 40, LR), **EXACT)
