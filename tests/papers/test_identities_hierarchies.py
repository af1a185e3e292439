"""Hierarchies of workers, gossip between windows, a quorum that grows: what these schemes equal at their limits, and
their arithmetic, written down once more from the papers. Algorithms, sections 1.6, 5.2 and 6: identity 36."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracles import EXACT, SEED, bowl, crew, each_task, engine, in_double, network, run
from torch import Tensor, nn

from paceline import Task
from paceline.compute_times import parse_times
from paceline.config.build import scheme_of
from paceline.errors import UsageError
from paceline.simulator.cost import Cost, NetworkLink
from paceline.simulator.engine import SimulationEngine
from paceline.simulator.faults import Fault

LR, RANDOM = 0.05, "exponential:1"
COST = Cost(parse_times(RANDOM))
INSIDE: dict[str, Any] = {"lr": LR, "rule": "sgd", "window": 3}


def close(left: Tensor, right: Tensor) -> None:
    torch.testing.assert_close(left, right, **EXACT)


def places(held: SimulationEngine, cell: str = "x") -> Tensor:
    """A cell of all workers, a row each."""
    return torch.stack([seat.worker.state.cell(cell).clone() for seat in held.seats])


def at(task: Task, scheme: str, workers: int, steps: int, **hyper: Any) -> SimulationEngine:
    """After this number of steps of every worker."""
    held = engine(task, scheme, workers, RANDOM, **hyper)
    held.run(park_at=steps)
    return held


class TestHierarchical:
    """Hierarchical local SGD (arXiv 1808.07217), with any number of levels (2007.13819)."""

    @each_task
    @pytest.mark.parametrize("window", [1, 4])
    def test_one_level_is_averaging_for_each_worker_bit_for_bit(self, task: Callable[[], Task], window: int) -> None:
        ours = at(task(), "hierarchical", 3, 12, lr=LR, sizes=(), windows=(window,))
        for name in ("averaging", "local-sgd"):
            assert places(ours).equal(places(at(task(), name, 3, 12, lr=LR, window=window))), name

    @in_double
    @pytest.mark.parametrize("sizes", [(2,), (2, 2)])
    def test_windows_of_one_are_synchronous_sgd(self, task: Callable[[], Task], sizes: tuple[int, ...]) -> None:
        ours = run(task(), "hierarchical", 5, 20, lr=LR, sizes=sizes, windows=(1,) * (len(sizes) + 1))
        close(ours.vector, run(task(), "allreduce", 5, 20, lr=LR).vector)

    @in_double
    def test_a_group_of_all_workers_is_averaging(self, task: Callable[[], Task]) -> None:
        ours = at(task(), "hierarchical", 3, 9, lr=LR, sizes=(3,), windows=(2, 4))
        assert places(ours).equal(places(at(task(), "averaging", 3, 9, lr=LR, window=2)))

    @in_double
    @pytest.mark.parametrize(("workers", "steps"), [(8, 12), (7, 11), (3, 7)])
    def test_three_levels_written_down(self, task: Callable[[], Task], workers: int, steps: int) -> None:
        """Pairs after every two steps, fours after every third of these, all after every second of those."""
        y = [task().start(SEED) for _ in range(workers)]
        gradients = crew(task(), workers)
        for number in range(1, steps + 1):
            for rank, g in enumerate(gradients):
                for _ in range(2):
                    y[rank] = y[rank] - LR * g(y[rank])
            size = workers if number % 6 == 0 else 4 if number % 3 == 0 else 2
            for first in range(0, workers, size):
                block = y[first : first + size]
                y[first : first + size] = [torch.stack(block).mean(0)] * len(block)
        held = at(task(), "hierarchical", workers, steps, lr=LR, sizes=(2, 2), windows=(2, 3, 2))
        close(places(held), torch.stack(y))
        close(held.model(), torch.stack(y).mean(0))

    def test_means_in_groups_keep_the_mean_of_all(self) -> None:
        held = engine(bowl(), "hierarchical", 6, RANDOM, lr=0.0, sizes=(2,), windows=(1, 3))
        generator = torch.Generator().manual_seed(3)
        for seat in held.seats:
            seat.worker.x = torch.randn(23, generator=generator, dtype=torch.float64)
        before = places(held).mean(0)
        held.run(2)
        close(held.model(), before)
        assert len({tuple(row.tolist()) for row in places(held)}) == 3  # a model for each pair
        held.run(3)
        assert len({tuple(row.tolist()) for row in places(held)}) == 1

    def test_a_group_waits_for_its_own_members_only_until_the_mean_of_all(self) -> None:
        held = engine(bowl(), "hierarchical", 4, lr=LR, sizes=(2,), windows=(1, 5))
        held.injector.strike(Fault("stop", 0, 0.0, duration=100.0))
        held.run(seconds=50.0)
        assert [seat.worker.t for seat in held.seats] == [0, 0, 4, 4]

    @pytest.mark.parametrize("moment", [0.6, 2.3, 4.9, 7.2])
    @pytest.mark.parametrize("dead", [(0, 1), (2, 3), (4, 5, 6, 7), (1, 2)])
    def test_groups_that_die_come_back_at_the_step_of_their_next_of_kin(
        self, moment: float, dead: tuple[int, ...]
    ) -> None:
        made = scheme_of("hierarchical", {"sizes": (2, 2), "windows": (1, 2, 3), "lr": LR})
        faults = [Fault("kill", rank, moment + 0.1 * rank, duration=1.5) for rank in dead]
        held = SimulationEngine(bowl(), made, workers=8, seed=SEED, cost=COST, faults=faults)
        held.run(24)
        held.run(park_at=max(seat.worker.t for seat in held.seats))
        assert all(seat.worker.alive for seat in held.seats)
        assert len({seat.worker.v for seat in held.seats}) == 1
        assert len({tuple(row.tolist()) for row in places(held)}) == 1

    @pytest.mark.parametrize(("sizes", "windows"), [((), (1, 2)), ((2,), (1,)), ((2, 2), (1, 2))])
    def test_a_window_is_missing_or_too_many(self, sizes: tuple[int, ...], windows: tuple[int, ...]) -> None:
        with pytest.raises(UsageError, match="give a window for each level"):
            run(bowl(), "hierarchical", 4, 1, sizes=sizes, windows=windows)


class TestDASO:
    """DASO (arXiv 2104.05588): identity 36, and its arithmetic."""

    @each_task
    def test_blocking_exchanges_after_every_batch_are_averaging_bit_for_bit(self, task: Callable[[], Task]) -> None:
        plain = places(at(task(), "averaging", 4, 12, lr=LR, window=1))
        assert places(at(task(), "daso", 4, 12, lr=LR, skip=1, wait=0)).equal(plain)
        assert places(at(task(), "daso", 4, 12, lr=LR, skip=4, wait=1, warmup=12)).equal(plain)
        assert places(at(task(), "daso", 4, 12, lr=LR, skip=4, wait=1, warmup=5, cooldown=5)).equal(plain)

    @each_task
    def test_one_node_is_averaging_bit_for_bit(self, task: Callable[[], Task]) -> None:
        ours = at(task(), "daso", 3, 9, lr=LR, size=3, skip=4, wait=2)
        assert places(ours).equal(places(at(task(), "averaging", 3, 9, lr=LR, window=2)))

    @in_double
    @pytest.mark.parametrize(("skip", "wait", "workers"), [(4, 1, 4), (4, 2, 6), (2, 2, 5)])
    def test_written_down(self, task: Callable[[], Task], skip: int, wait: int, workers: int) -> None:
        """Everybody leaves the model of the start of a step with the others, and finds theirs at its end."""
        y = [task().start(SEED) for _ in range(workers)]
        gradients, nodes = crew(task(), workers), math.ceil(workers / 2)
        for number in range(11):
            sent = torch.stack(y)
            for rank, g in enumerate(gradients):
                for _ in range(wait):
                    y[rank] = y[rank] - LR * g(y[rank])
            if number % (skip // wait) == 0:
                total = nodes * sent.mean(0)
                y = [(2 * wait * one + total) / (2 * wait + nodes) for one in y]
            for first in range(0, workers, 2):
                block = y[first : first + 2]
                y[first : first + 2] = [torch.stack(block).mean(0)] * len(block)
        held = at(task(), "daso", workers, 11, lr=LR, skip=skip, wait=wait)
        close(places(held), torch.stack(y))

    @pytest.mark.parametrize(("wait", "seconds"), [(0, 1.5), (2, 2.5)])
    def test_an_exchange_costs_no_time_while_batches_are_computed(self, wait: int, seconds: float) -> None:
        """A gradient takes 1 s, a mean 0.5 s: a step has the mean inside the node, and with `wait` no second one."""
        slow = Cost(parse_times("constant:1"), NetworkLink(latency=0.25))
        made = scheme_of("daso", {"skip": max(wait, 1), "wait": wait, "size": 2})
        held = SimulationEngine(bowl(), made, workers=4, seed=SEED, cost=slow)
        held.run(park_at=6)
        assert held.now == pytest.approx(6 * seconds)

    def test_on_a_plateau_exchanges_become_more_frequent_and_then_start_again(self) -> None:
        """With a rate of 0 the loss does not fall: the first look has nothing to compare with, two are a plateau."""
        held = engine(bowl(), "daso", 4, lr=0.0, skip=8, wait=2, adapt_every=1)
        found = []
        for steps in range(1, 60):
            held.run(park_at=steps)
            skips = {seat.worker.skip for seat in held.seats}
            assert len(skips) == 1
            found.append(skips.pop())
        seen = [one for k, one in enumerate(found) if k == 0 or one != found[k - 1]]
        assert seen[:6] == [8, 4, 2, 1, 8, 4]

    @pytest.mark.parametrize("moment", [0.6, 2.3, 4.9])
    @pytest.mark.parametrize("dead", [(0, 1), (1, 2), (2, 3)])
    def test_nodes_that_die_come_back(self, moment: float, dead: tuple[int, ...]) -> None:
        made = scheme_of("daso", {"skip": 4, "wait": 2, "lr": LR, "cooldown": 23})
        faults = [Fault("kill", rank, moment + 0.1 * rank, duration=1.5) for rank in dead]
        held = SimulationEngine(bowl(), made, workers=6, seed=SEED, cost=COST, faults=faults)
        held.run(24)
        held.run(park_at=max(seat.worker.t for seat in held.seats))
        assert all(seat.worker.alive for seat in held.seats)
        assert len({seat.worker.v for seat in held.seats}) == 1
        assert len({tuple(row.tolist()) for row in places(held)}) == 1

    def test_a_skip_that_is_no_multiple_of_wait_is_refused(self) -> None:
        with pytest.raises(UsageError, match="a multiple of wait"):
            run(bowl(), "daso", 4, 1, skip=4, wait=3)


class TestNoLoCo:
    """NoLoCo (arXiv 2506.10911)."""

    @in_double
    @pytest.mark.parametrize("workers", [1, 2])
    @pytest.mark.parametrize("gamma", [None, 0.3, 1.7])
    def test_one_worker_and_two_are_diloco_with_heavy_ball(
        self, task: Callable[[], Task], workers: int, gamma: float | None
    ) -> None:
        """Two always meet each other: their x are the same, and gamma has nothing to pull together."""
        ours = run(task(), "noloco", workers, 8, gamma=gamma, **INSIDE).vector
        outer = {"outer": "momentum", "outer.momentum": 0.5, "outer_lr": 0.7}
        close(ours, run(task(), "diloco", workers, 8, **INSIDE, **outer).vector)

    @in_double
    @pytest.mark.parametrize(("workers", "size"), [(4, 2), (5, 2), (6, 3), (4, 4)])
    def test_the_papers_arithmetic_written_down(self, task: Callable[[], Task], workers: int, size: int) -> None:
        """The group's mean of the deltas and of the x as two terms, as in the paper and in its authors' code."""
        alpha, beta, gamma = 0.4, 0.6, 0.9
        scheme: Any = scheme_of("noloco", {"size": size})
        x = [task().start(SEED) for _ in range(workers)]
        m = [torch.zeros_like(one) for one in x]
        gradients = crew(task(), workers)
        for t in range(7):
            y = [one.clone() for one in x]
            for rank, g in enumerate(gradients):
                for _ in range(3):
                    y[rank] = y[rank] - LR * g(y[rank])
            moved = []
            for rank in range(workers):
                group = scheme.group(rank, workers, t, SEED)
                delta = torch.stack([y[j] - x[j] for j in group]).mean(0)
                m[rank] = (
                    alpha * m[rank] + beta * delta - gamma * (x[rank] - torch.stack([x[j] for j in group]).mean(0))
                )
                moved.append(x[rank] + m[rank])
            x = moved
        hyper = {"size": size, "momentum": alpha, "outer_lr": beta, "gamma": gamma}
        held = at(task(), "noloco", workers, 7, **INSIDE, **hyper)
        close(places(held, "slow"), torch.stack(x))
        close(held.model(), torch.stack(x).mean(0))

    @pytest.mark.parametrize(("workers", "size"), [(6, 2), (7, 2), (7, 3), (5, 1), (3, 8)])
    def test_groups_are_a_partition_that_changes(self, workers: int, size: int) -> None:
        scheme: Any = scheme_of("noloco", {"size": size})
        seen = set()
        for t in range(30):
            groups = {tuple(sorted(scheme.group(rank, workers, t, SEED))) for rank in range(workers)}
            assert sorted(rank for group in groups for rank in group) == list(range(workers))
            assert sum(len(group) < size for group in groups) <= 1
            seen |= groups
        assert len(seen) > len(groups) or size in (1, 8)

    def scattered(self, workers: int, **hyper: Any) -> SimulationEngine:
        """Workers at places of their own, and no gradients."""
        held = engine(bowl(), "noloco", workers, RANDOM, **INSIDE | {"lr": 0.0} | hyper)
        generator = torch.Generator().manual_seed(3)
        for seat in held.seats:
            seat.worker.slow = seat.worker.x = torch.randn(23, generator=generator, dtype=torch.float64)
        return held

    def test_gossip_keeps_the_mean_and_brings_the_models_together(self) -> None:
        held = self.scattered(6)
        before, spread = places(held).mean(0), places(held).std(0).norm()
        held.run(40)
        close(held.model(), before)
        assert places(held).std(0).norm() < 1e-3 * spread

    @pytest.mark.parametrize(("momentum", "gamma", "stable"), [(0.5, 2.9, True), (0.5, 3.1, False), (0.0, 1.9, True)])
    def test_the_limit_of_gamma(self, momentum: float, gamma: float, stable: bool) -> None:
        """The difference of two workers is a heavy ball of curvature gamma: stable below 2 * (1 + momentum)."""
        held = self.scattered(2, momentum=momentum, gamma=gamma)
        before = (places(held)[0] - places(held)[1]).norm()
        held.run(200)
        assert bool((places(held)[0] - places(held)[1]).norm() < before) == stable

    def test_alone_without_momentum_a_window_is_taken_as_it_is(self) -> None:
        held = at(bowl(), "noloco", 3, 6, size=1, momentum=0.0, outer_lr=1.0, **INSIDE)
        for rank, g in enumerate(crew(bowl(), 3)):
            x = bowl().start(SEED)
            for _ in range(18):
                x = x - LR * g(x)
            close(places(held)[rank], x)


K_SCHEMES = ["k-sync", "k-batch-sync", "k-async", "k-batch-async"]


class TestAdaSync:
    """A k that grows as the loss falls: ceil(first k * sqrt(first loss / loss)), at most the workers (2003.10579)."""

    def quorums(self, scheme: str, workers: int, steps: int, task: Task | None = None, **hyper: Any) -> list[int]:
        """How many gradients make the next update, after every update."""
        held = engine(task or bowl(noise=0.0), scheme, workers, RANDOM, **{"lr": LR, "adapt_every": 4} | hyper)
        found: list[int] = []
        held.run(steps, watch=lambda e: found.append(int(e.centre.need)))
        return found

    @pytest.mark.parametrize("scheme", K_SCHEMES)
    @pytest.mark.parametrize("workers", [1, 3, 8])
    def test_k_never_falls_and_is_at_most_the_workers(self, scheme: str, workers: int) -> None:
        ks = self.quorums(scheme, workers, 120, k=1)
        assert ks == sorted(ks)
        assert ks[:4] == [1, 1, 1, 1]  # the first losses are what later ones are compared with
        assert ks[-1] <= workers
        assert ks[-1] > 1 or workers == 1

    @pytest.mark.parametrize("scheme", K_SCHEMES)
    def test_until_k_changes_the_scheme_is_as_without(self, scheme: str) -> None:
        plain = run(bowl(), scheme, 5, 30, lr=LR, compute=RANDOM)
        assert run(bowl(), scheme, 5, 30, lr=LR, compute=RANDOM, adapt_every=31).digest == plain.digest

    def test_k_follows_the_rule_written_down(self) -> None:
        """K-sync with equal workers: the first k of them make every update, all at one x, where the loss is known."""
        task, workers, every = bowl(noise=0.0, heterogeneity=0.0), 6, 3
        x, k, first, losses, expected = task.start(SEED), 2, None, [], []
        batch = next(task.batches(0, workers, SEED))
        for v in range(1, 61):
            loss, g = task.grad(x, batch, torch.empty_like(x))
            losses += [loss] * k
            x = x - LR * g
            if v % every == 0:
                mean = sum(losses) / len(losses)
                first, losses = first or mean, []
                k = max(k, min(workers, math.ceil(2 * math.sqrt(first / mean))))
            expected.append(k)
        held = engine(task, "k-sync", workers, lr=LR, k=2, adapt_every=every)
        found: list[int] = []
        held.run(60, watch=lambda e: found.append(int(e.centre.need)))
        assert found == expected
        assert len(set(found)) > 2
        close(held.model(), x)

    @pytest.mark.parametrize("scheme", K_SCHEMES)
    def test_the_dead_are_not_waited_for_whatever_k_is(self, scheme: str) -> None:
        made = scheme_of(scheme, {"k": 1, "adapt_every": 2, "lr": LR})
        faults = [Fault("kill", rank, 4.0 + rank) for rank in (0, 1, 3)]
        held = SimulationEngine(bowl(noise=0.0), made, workers=4, seed=SEED, cost=COST, faults=faults)
        held.run(80)
        assert held.updates == 80
        assert int(held.centre.most) > 1

    def test_a_loss_that_is_not_above_zero_leaves_k_as_it_is(self) -> None:
        class Below(type(bowl())):  # type: ignore[misc]
            def grad(self, *args: Any, **more: Any) -> tuple[float, Tensor]:
                return -1.0, super().grad(*args, **more)[1]

        task = bowl(noise=0.0)
        task.__class__ = Below
        assert set(self.quorums("k-async", 4, 30, task, k=2)) == {2}

    @pytest.mark.parametrize("moment", [4, 5, 6])
    def test_k_async_does_not_wait_for_the_gradient_of_a_dead_worker_twice(self, moment: int) -> None:
        """Two die, one of them with a gradient kept: after the update with it, only the third one's is waited for."""
        made = scheme_of("k-async", {"k": 3, "lr": LR})
        for other in (4, 5, 6):
            faults = [Fault("kill", 0, 0.3 * moment), Fault("kill", 2, 0.3 * other)]
            held = SimulationEngine(bowl(), made, workers=3, seed=SEED, cost=COST, faults=faults)
            held.run(12)
            assert held.updates == 12


class TestMuLoCo:
    """Muon inside DiLoCo (arXiv 2505.23725): matrices by Muon, biases by AdamW, as users of Muon train."""

    WINDOW, ROUNDS, WORKERS = 4, 3, 2

    def by_hand(self, task: Task, others_lr: float) -> Tensor:
        """A model, a Muon and an AdamW of torch for each worker, and an outer SGD with Nesterov momentum."""
        shapes = [(8, 4), (8,), (3, 8), (3,)]  # of the network's parameters

        def cut(vector: Tensor) -> list[Tensor]:
            edges = [0, 32, 40, 64, 67]
            parts = zip(edges, edges[1:], shapes, strict=False)
            return [vector[low:high].view(shape).clone() for low, high, shape in parts]

        centre = nn.Parameter(task.start(SEED))
        outer = torch.optim.SGD([centre], lr=0.7, momentum=0.9, nesterov=True)
        crews = []
        for g in crew(task, self.WORKERS):
            parameters = [nn.Parameter(part) for part in cut(centre.detach())]
            matrices, biases = parameters[::2], parameters[1::2]
            inner = (
                torch.optim.Muon(matrices, lr=0.02, weight_decay=0.1, momentum=0.95),
                torch.optim.AdamW(biases, lr=others_lr, weight_decay=0.1),
            )
            crews.append((g, parameters, inner))
        for _ in range(self.ROUNDS):
            deltas = []
            for g, parameters, inner in crews:
                for _ in range(self.WINDOW):
                    gradient = g(torch.cat([one.detach().flatten() for one in parameters]))
                    for one, part in zip(parameters, cut(gradient), strict=True):
                        one.grad = part
                    for optimizer in inner:
                        optimizer.step()
                deltas.append(centre.detach() - torch.cat([one.detach().flatten() for one in parameters]))
            centre.grad = torch.stack(deltas).mean(0)
            outer.step()
            for _, parameters, _ in crews:
                for one, part in zip(parameters, cut(centre.detach()), strict=True):
                    one.data.copy_(part)
        return centre.detach()

    @pytest.mark.parametrize("others_lr", [None, 0.003])
    def test_matrices_by_muon_and_biases_by_adamw(self, others_lr: float | None) -> None:
        rule = {"rule": "muon", "lr": 0.02} | ({} if others_lr is None else {"rule.others_lr": others_lr})
        ours = run(network(), "diloco", self.WORKERS, self.ROUNDS, window=self.WINDOW, **rule).vector
        torch.testing.assert_close(ours, self.by_hand(network(), others_lr or 0.02), rtol=0, atol=1e-9)

    def test_a_rate_that_follows_a_schedule_keeps_the_shapes(self) -> None:
        rule = {"rule": "muon", "rule.lr": "step:0.02,over=1000,gamma=0.5"}
        ours = run(network(), "diloco", self.WORKERS, self.ROUNDS, window=self.WINDOW, **rule).vector
        torch.testing.assert_close(ours, self.by_hand(network(), 0.02), rtol=0, atol=1e-9)
