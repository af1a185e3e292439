"""Exact runs: who may be one, who lives where, and what is refused with which words."""

from __future__ import annotations

import dataclasses
import threading
from dataclasses import dataclass
from typing import Any

import pytest

from paceline import attach, simulate
from paceline.config import build, discovery, exact
from paceline.config.plan import Plan
from paceline.config.validate import check, planned
from paceline.errors import UsageError
from paceline.processes.roles.main import hosted
from paceline.processes.roles.roles import Role, ranks, roles_of
from paceline.scheme import Scheme
from paceline.tasks.toy import toy
from paceline.worker import Worker

ALWAYS = {"allreduce", "averaging", "easgd", "sagn", "sync", "sync-rates"}
ALWAYS |= {
    "diloco",
    "fedavg",
    "fedopt",
    "fedprox",
    "local-sgd",
    "slowmo",
    "sparseloco",
    "streaming-diloco",
}  # local updates
ALWAYS |= {"d-psgd", "ad-psgd", "sgp", "gosgd"}  # decentralised
ALWAYS |= {"daso", "hierarchical", "noloco"}  # groups, gossip


@dataclass(frozen=True)
class Mute(Scheme, name="mute"):
    """Synchronous for all we know, but it does not say so."""

    async def step(self, w: Worker) -> None:
        g = await w.mean(await w.grad())
        w.x -= 0.1 * g
        w.v += 1


class TestSchemes:
    def test_who_can(self) -> None:
        made = {name: build.scheme_of(found.value, {}) for name, found in discovery.schemes().items()}
        assert {name for name, scheme in made.items() if scheme.exact(8) is None} == ALWAYS | {"sgd"}
        assert build.scheme_of("groups", {"size": 8}).exact(8) is None
        assert build.scheme_of("sync", {"aggregate": 8}).exact(8) is None

    @pytest.mark.parametrize(
        ("scheme", "hyper", "why"),
        [
            ("async", {}, "async cannot be exact: its updates have no fixed order; .* `paceline replay` instead"),
            ("hogwild", {}, "hogwild cannot be exact: its updates have no fixed order"),
            ("groups", {}, "8 workers in groups of 2 update in no fixed order; size=8 makes one group"),
            ("sync", {"aggregate": 6}, "which 6 of 8 gradients come first is chance; omit aggregate"),
            ("sync-repeat", {"aggregate": 9}, "the fastest workers give more gradients than others"),
            (Mute, {}, r"mute cannot be exact: it does not say .* fixed_order = True"),
        ],
    )
    def test_who_cannot_and_why(self, scheme: Any, hyper: dict[str, Any], why: str) -> None:
        with pytest.raises(UsageError, match=why):
            planned("toy", scheme, exact=True, hyper=hyper)
        with pytest.raises(UsageError, match=why):
            simulate("toy", scheme, exact=True, **hyper)


class TestSettings:
    def test_what_is_asked_for_are_processes(self) -> None:
        plan, scheme, _ = planned("toy", "sync", exact=True, workers=3)
        assert (plan.workers, plan.processes, plan.hosts, plan.micro) == (8, 3, 3, 8)
        assert (plan.quorum, plan.feed) == ("hold", "slice")
        assert [str(part) for part in roles_of(plan, scheme)] == ["chief", "worker:1", "worker:2", "server:0"]
        assert [list(ranks(part, plan)) for part in roles_of(plan, scheme)] == [[0, 3, 6], [1, 4, 7], [2, 5], []]

    def test_what_nobody_says(self) -> None:
        for scheme, given, processes, micro in (
            ("sync", {}, 2, 8),
            ("sync", {"micro": 1}, 1, 1),
            ("sgd", {}, 1, 1),
        ):
            plan, _, _ = planned("toy", scheme, exact=True, **given)
            assert (plan.processes, plan.workers, plan.micro) == (processes, micro, micro)

    def test_a_plain_run_is_as_before(self) -> None:
        plan, _, _ = planned("toy", "sync", workers=3)
        assert (plan.workers, plan.processes, plan.hosts, plan.quorum, plan.feed) == (3, None, 3, "shrink", None)
        assert [list(ranks(Role("worker", index), plan)) for index in (1, 2)] == [[1], [2]]

    @pytest.mark.parametrize(
        ("given", "why"),
        [
            ({"workers": 9}, "workers must be from 1 to 8, not 9: .* 8 micro-batches; a larger --micro allows more"),
            ({"workers": 3, "micro": 2}, "workers must be from 1 to 2, not 3"),
            ({"workers": 0}, "workers must be (from 1 to 8|at least 1), not 0"),
            ({"micro": 0}, "micro must be at least 1, not 0"),
            ({"quorum": "shrink"}, "cannot continue with fewer workers: its quorum is hold; omit --quorum"),
            ({"feed": "shared"}, "splits one common batch: its feed is slice, not shared"),
        ],
    )
    def test_what_cannot_be(self, given: dict[str, Any], why: str) -> None:
        with pytest.raises(UsageError, match=why):
            planned("toy", "sync", exact=True, **given)
        with pytest.raises(UsageError, match=why):
            simulate("toy", "sync", exact=True, **given)

    def test_micro_is_for_exact_runs(self) -> None:
        with pytest.raises(UsageError, match="micro is for exact runs"):
            planned("toy", "sync", micro=4)
        with pytest.raises(UsageError, match="micro is for exact runs"):
            simulate("toy", "sync", micro=4)

    def test_every_micro_batch_needs_a_sample(self) -> None:
        with pytest.raises(UsageError, match="8 micro-batches cannot share a batch of 4; raise --batch, or lower"):
            exact.check_task(toy().configured(batch=4), 8)
        with pytest.raises(UsageError, match="8 micro-batches cannot share a batch of 7"):
            simulate("digits-mlp", "sync", exact=True, batch=7)

    def test_a_plan_of_one_that_was_changed_by_hand(self) -> None:
        plan, scheme, _ = planned("toy", "sync", exact=True)
        with pytest.raises(UsageError, match="workers must be from 1 to 8, not 12"):
            check(dataclasses.replace(plan, processes=12), scheme)

    def test_a_script_is_one_worker(self) -> None:
        with pytest.raises(UsageError, match="a script cannot be exact: its loop is that of one worker"):
            check(Plan(script=["mine.py"], exact=True), build.scheme_of("sync", {}))
        with pytest.raises(UsageError, match="a script cannot be exact"):
            attach(None, "sync", exact=True)  # type: ignore[arg-type]

    def test_a_simulated_death_sets_all_back_to_a_virtual_checkpoint_and_changes_no_bit(self) -> None:
        given: dict[str, Any] = {"exact": True, "micro": 4, "workers": 2, "steps": 12}
        found = simulate("digits-mlp", "sync", faults=["kill:1@step=5,back=1"], checkpoint_steps=3, **given)
        assert found.rolled_back_updates > 0
        assert found.digest == simulate("digits-mlp", "sync", **given).digest


class TestResult:
    def test_it_says_what_was_asked_for(self) -> None:
        found = simulate("digits-mlp", "sync", exact=True, micro=4, workers=3, steps=2)
        assert (found.workers, found.micro, found.gradients) == (3, 4, 8)
        assert found.as_dict()["micro"] == 4
        assert "micro" not in simulate("digits-mlp", "sync", workers=3, steps=2).as_dict()

    def test_processes_do_not_matter_to_virtual_time(self) -> None:
        found = [simulate("digits-mlp", "easgd", exact=True, workers=workers, steps=5) for workers in (1, 5)]
        assert found[0].digest == found[1].digest
        assert found[0].virtual_seconds == found[1].virtual_seconds


class TestHosting:
    def test_all_play_at_the_same_time(self) -> None:
        together, played = threading.Barrier(3), []

        def play(rank: int) -> None:
            together.wait(10)
            played.append(rank)

        assert hosted([0, 3, 6], play, lambda *_: None)
        assert sorted(played) == [0, 3, 6]

    def test_an_error_is_told_while_the_others_still_wait(self) -> None:
        told, told_of = threading.Event(), []

        def play(rank: int) -> None:
            if rank == 3:
                raise ValueError("mine")
            assert told.wait(10)

        def failed(rank: int, error: BaseException) -> None:
            told_of.append((rank, str(error)))
            told.set()

        assert not hosted([0, 3], play, failed)
        assert told_of == [(3, "mine")]
