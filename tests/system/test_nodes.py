"""Training on several nodes: the bits of one machine, and every role killed. Data: scikit-learn's digits."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import beds.commands
import pytest
from nodes import nodes
from processes import Linger, finished, leaving_nothing, run

from paceline.api.simulate import simulate
from paceline.errors import UsageError
from paceline.processes.memory import snapshot
from paceline.processes.supervisor.status import Status
from paceline.runs import checkpoint
from paceline.runs.replay.replay import replay

TASK = "digits-mlp"


def digest(scheme: str, workers: int, steps: int, **settings: Any) -> str:
    return simulate(TASK, scheme, workers=workers, steps=steps, **settings.pop("hyper", {}), **settings).digest


@pytest.mark.parametrize(
    ("scheme", "settings"),
    [
        ("sync", {"workers": 3}),
        ("sync", {"workers": 2, "servers": 2}),
        ("sync", {"workers": 2, "servers": 3, "hyper": {"rule": "adam"}}),
        ("sagn", {"workers": 2}),
        ("async", {"workers": 1}),
        ("downpour", {"workers": 1}),
        ("sync", {"workers": 2, "inside": "ddp:2"}),
        ("sync", {"workers": 2, "inside": "fsdp:2"}),
    ],
)
def test_the_bits_are_those_of_the_simulator(tmp_path: Path, scheme: str, settings: dict[str, Any]) -> None:
    with leaving_nothing(), nodes() as made:
        story = run(tmp_path / "run", TASK, scheme, steps=60, launcher=made.launcher, **settings)
    alike = {key: value for key, value in settings.items() if key != "servers"}
    assert finished(story, 60).digest == digest(scheme, alike.pop("workers"), 60, **alike)


@pytest.mark.parametrize("scheme", ["async", "agn", "dynsgd", "aeasgd", "hogwild", "sync-rates"])
def test_every_kind_of_scheme_with_a_server_trains(tmp_path: Path, scheme: str) -> None:
    with leaving_nothing(), nodes() as made:
        story = run(tmp_path / "run", TASK, scheme, steps=300, workers=2, launcher=made.launcher)
    assert finished(story, 300, over=8).metrics["accuracy"] > 0.5


@pytest.mark.parametrize("scheme", ["async", "sync"])
@pytest.mark.parametrize("victim", ["worker:1", "chief", "server:0"])
def test_a_killed_role_is_brought_back(tmp_path: Path, scheme: str, victim: str) -> None:
    with leaving_nothing(), nodes() as made:
        story = run(
            tmp_path / "run",
            TASK,
            scheme,
            steps=600,
            workers=2,
            checkpoint_steps=50,
            kills=[victim] * 2,
            launcher=made.launcher,
        )
    finished(story, 600, over=2)


class Once:
    """Does something once, when so many updates have been made."""

    def __init__(self, update: int, deed: Callable[[], object]) -> None:
        self.update, self.deed, self.done = update, deed, False

    def __call__(self, status: Status) -> None:
        if not self.done and status.updates >= self.update:
            self.done = True
            self.deed()


def gated(tmp_path: Path, update: int) -> tuple[Path, Linger]:
    """A file without which steps after an update are slow: the run waits for what the test is about."""
    gate = tmp_path / "gate"
    return gate, Linger(gate, update)


@pytest.mark.parametrize("scheme", ["async", "sync"])
def test_a_worker_whose_node_is_lost_comes_back_on_another(tmp_path: Path, scheme: str) -> None:
    gate, linger = gated(tmp_path, 150)
    with leaving_nothing(), nodes() as made:

        def replace() -> None:
            made.cut("worker:1")
            made.start("worker:1")

        def look(status: Status) -> None:
            lost(status)
            if lost.done and any("worker:1 is here" in text for text in told) and status.updates > 200:
                gate.touch()

        lost, told = Once(50, replace), []
        story = run(
            tmp_path / "run",
            TASK,
            scheme,
            steps=400,
            workers=3,
            watch=look,
            hooks=[linger],
            launcher=made.launcher,
            said=told,
        )
    finished(story, 400, over=3)
    assert story.told("worker:1", "node", "gone")
    assert story.told("worker:1 is here")


@pytest.mark.parametrize("scheme", ["async", "sync"])
def test_a_server_whose_node_is_lost_goes_on_from_the_checkpoint_where_somebody_comes_for_it(
    tmp_path: Path, scheme: str
) -> None:
    gate, linger = gated(tmp_path, 300)
    with leaving_nothing(), nodes() as made:

        def replace() -> None:
            made.cut("server:0")
            made.start("server:0")
            gate.touch()

        story = run(
            tmp_path / "run",
            TASK,
            scheme,
            steps=400,
            workers=2,
            checkpoint_steps=50,
            watch=Once(150, replace),
            hooks=[linger],
            launcher=made.launcher,
        )
    result = finished(story, 400, over=2)
    [back] = [text for text in story.said if "returning to the checkpoint" in text]
    lost = re.search(r"of update ([\d,]+) \(([\d,]+) updates are lost\)", back)
    assert lost is not None, back
    at, updates = (int(number.replace(",", "")) for number in lost.groups())
    assert result.rolled_back_updates == updates  # none, if a checkpoint was written at that moment
    assert 150 <= at + updates < 400
    assert result.metrics["accuracy"] > 0.5


def test_a_server_that_nobody_comes_for_moves_to_a_node_that_is_left(tmp_path: Path) -> None:
    gate, linger = gated(tmp_path, 300)
    with leaving_nothing(), nodes() as made:

        def lose() -> None:
            made.cut("server:0")
            gate.touch()

        story = run(
            tmp_path / "run",
            TASK,
            "async",
            steps=400,
            workers=2,
            checkpoint_steps=50,
            patience=2.0,
            watch=Once(150, lose),
            hooks=[linger],
            launcher=made.launcher,
        )
    finished(story, 400, over=2)
    assert story.told("server:0 moves to")


def test_a_node_may_have_several_roles_and_they_share_its_memory(tmp_path: Path) -> None:
    with leaving_nothing(), nodes(together=("worker:1+server:0",)) as made:
        story = run(tmp_path / "run", TASK, "sync", steps=60, workers=2, launcher=made.launcher)
    assert finished(story, 60).digest == digest("sync", 2, 60)


def test_exact_runs_have_the_same_bits_on_several_nodes_whichever_role_dies(tmp_path: Path) -> None:
    alone = run(tmp_path / "alone", TASK, "sync", steps=80, workers=1, exact=True, micro=4)
    with leaving_nothing(), nodes() as made:
        story = run(
            tmp_path / "run",
            TASK,
            "sync",
            steps=80,
            workers=2,
            exact=True,
            micro=4,
            checkpoint_steps=20,
            kills=["worker:1", "server:0"],
            launcher=made.launcher,
        )
    assert finished(story, 80).digest == finished(alone, 80).digest


def test_an_evaluator_may_join_that_nobody_had_planned(tmp_path: Path) -> None:
    with leaving_nothing(), nodes(extra=("evaluator",)) as made:
        story = run(tmp_path / "run", TASK, "async", steps=300, workers=2, checkpoint_steps=100, launcher=made.launcher)
    finished(story, 300, over=2)
    assert story.told("evaluator: update")
    assert checkpoint.best(tmp_path / "run") is not None


def test_who_does_not_know_the_secret_is_turned_away(tmp_path: Path) -> None:
    gate, linger = gated(tmp_path, 100)
    with leaving_nothing(), nodes() as made:

        def look(status: Status) -> None:
            knock(status)
            if "stranger" in made.agents and made.ended("stranger"):
                gate.touch()

        knock = Once(30, lambda: made.start("stranger", secret=b"x" * 32))
        story = run(
            tmp_path / "run",
            TASK,
            "async",
            steps=200,
            workers=2,
            watch=look,
            hooks=[linger],
            launcher=made.launcher,
        )
    finished(story, 200, over=2)
    assert made.codes["stranger"] == 2
    assert story.told("turned", "away")


def test_connections_can_be_encrypted(tmp_path: Path) -> None:
    certificates = beds.commands.certificates(tmp_path)
    with leaving_nothing(), nodes(certificates=certificates) as made:
        story = run(tmp_path / "run", TASK, "sync", steps=60, workers=2, servers=2, launcher=made.launcher)
    assert finished(story, 60).digest == digest("sync", 2, 60)


def test_roles_may_begin_in_fresh_interpreters(tmp_path: Path) -> None:
    with leaving_nothing(), nodes() as made:
        story = run(tmp_path / "run", TASK, "sync", steps=20, workers=2, start="exec", launcher=made.launcher)
    assert finished(story, 20).digest == digest("sync", 2, 20)


@pytest.mark.parametrize("scheme", ["async", "sync"])
def test_a_run_on_several_nodes_is_repeated_bit_for_bit(tmp_path: Path, scheme: str) -> None:
    with leaving_nothing(), nodes() as made:
        story = run(
            tmp_path / "run",
            TASK,
            scheme,
            steps=300,
            workers=2,
            checkpoint_steps=50,
            kills=["worker:1", "server:0"],
            launcher=made.launcher,
        )
    finished(story, 300, over=2)
    assert replay(tmp_path / "run").match


@pytest.mark.parametrize("scheme", ["allreduce", "averaging", "easgd", "d-psgd", "sgp", "ad-psgd", "gosgd"])
def test_schemes_without_a_server_have_the_bits_of_the_simulator(tmp_path: Path, scheme: str) -> None:
    with leaving_nothing(), nodes() as made:
        story = run(tmp_path / "run", TASK, scheme, steps=60, workers=3, launcher=made.launcher)
    assert finished(story, 60).digest == digest(scheme, 3, 60)


@pytest.mark.parametrize("kills", [[], ["worker:1", "chief"]])
def test_means_can_be_encrypted(tmp_path: Path, kills: list[str]) -> None:
    steps = 400 if kills else 60
    with leaving_nothing(), nodes(certificates=beds.commands.certificates(tmp_path)) as made:
        story = run(
            tmp_path / "run",
            TASK,
            "allreduce",
            steps=steps,
            workers=3,
            kills=kills,
            checkpoint_steps=50,
            launcher=made.launcher,
        )
    result = finished(story, steps)
    assert kills or result.digest == digest("allreduce", 3, 60)
    assert not story.told("neither authenticated nor encrypted")


def test_connections_that_tls_does_not_cover_are_refused_for_means_with_it(tmp_path: Path) -> None:
    with nodes(certificates=beds.commands.certificates(tmp_path)) as made:
        story = run(tmp_path / "run", TASK, "allreduce", collective="gloo", launcher=made.launcher)
    assert isinstance(story.error, UsageError)
    assert "use --collective tcp" in str(story.error)


def test_a_run_says_once_that_connections_of_gloo_are_open(tmp_path: Path) -> None:
    with leaving_nothing(), nodes() as made:
        story = run(tmp_path / "run", TASK, "allreduce", steps=60, workers=2, collective="gloo", launcher=made.launcher)
    assert finished(story, 60).digest == digest("allreduce", 2, 60)
    assert sum("neither authenticated nor encrypted" in line for line in story.said) == 1


@pytest.mark.parametrize("victim", ["worker:1", "chief"])
def test_means_continue_without_a_dead_worker_and_with_it_when_it_is_back(tmp_path: Path, victim: str) -> None:
    with leaving_nothing(), nodes() as made:
        story = run(
            tmp_path / "run",
            TASK,
            "allreduce",
            steps=600,
            workers=3,
            checkpoint_steps=50,
            kills=[victim] * 2,
            launcher=made.launcher,
        )
    assert finished(story, 600).metrics["accuracy"] > 0.5


@pytest.mark.parametrize(("scheme", "settings"), [("sync", {"servers": 2}), ("allreduce", {}), ("async", {})])
def test_nodes_of_one_host_share_its_memory(tmp_path: Path, scheme: str, settings: dict[str, Any]) -> None:
    seen = set()
    with leaving_nothing(), nodes(share=True) as made:
        story = run(
            tmp_path / "run",
            TASK,
            scheme,
            steps=300,
            workers=3,
            kills=["worker:1", "worker:2"],
            watch=lambda status: seen.update(made.homes() if status.updates > 20 else ()),
            launcher=made.launcher,
            **settings,
        )
    finished(story, 300, over=3)
    assert seen == {0}


def test_exact_means_have_the_same_bits_on_several_nodes(tmp_path: Path) -> None:
    alone = run(tmp_path / "alone", TASK, "allreduce", steps=60, workers=1, exact=True, micro=4)
    with leaving_nothing(), nodes() as made:
        story = run(
            tmp_path / "run",
            TASK,
            "allreduce",
            steps=60,
            workers=2,
            exact=True,
            micro=4,
            checkpoint_steps=20,
            kills=["worker:1"],
            launcher=made.launcher,
        )
    assert finished(story, 60).digest == finished(alone, 60).digest


@pytest.mark.parametrize("share", [False, True])
def test_a_server_that_joins_late_is_waited_for_before_anybody_decides_where_it_is(tmp_path: Path, share: bool) -> None:
    with leaving_nothing(), nodes(share=share, late=("server:0", "server:1")) as made:
        story = run(
            tmp_path / "run", TASK, "async", steps=200, workers=2, servers=2, patience=5.0, launcher=made.launcher
        )
    finished(story, 200)


def test_the_first_of_two_servers_goes_on_elsewhere_and_the_other_follows_it_there(tmp_path: Path) -> None:
    gate, linger = gated(tmp_path, 300)
    with leaving_nothing(), nodes() as made:

        def lose() -> None:
            made.cut("server:0")
            gate.touch()

        story = run(
            tmp_path / "run",
            TASK,
            "async",
            steps=400,
            workers=2,
            servers=2,
            checkpoint_steps=50,
            patience=2.0,
            watch=Once(150, lose),
            hooks=[linger],
            launcher=made.launcher,
        )
    finished(story, 400, over=2)
    assert story.told("server:0 moves to")


@pytest.mark.parametrize("servers", [1, 2])
def test_a_server_that_loads_its_checkpoint_for_longer_than_patience_is_waited_for(
    tmp_path: Path, servers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    patience, load = 2.0, snapshot.restore_shard

    def slowly(*args: Any) -> None:
        until = time.process_time() + 1.5 * patience
        while time.process_time() < until:
            pass
        load(*args)

    monkeypatch.setattr(snapshot, "restore_shard", slowly)
    gate, linger = gated(tmp_path, 300)
    with leaving_nothing(), nodes() as made:

        def lose() -> None:
            made.cut("server:0")
            gate.touch()

        story = run(
            tmp_path / "run",
            TASK,
            "async",
            steps=400,
            workers=2,
            servers=servers,
            checkpoint_steps=50,
            patience=patience,
            watch=Once(100, lose),
            hooks=[linger],
            launcher=made.launcher,
        )
    finished(story, 400, over=2)
    assert story.told("returning to the checkpoint")


def test_nodes_that_share_no_disk_are_sent_the_checkpoint_and_send_back_their_logs(tmp_path: Path) -> None:
    gate, linger = gated(tmp_path, 300)
    with leaving_nothing(), nodes(one_disk=False, extra=("evaluator",)) as made:

        def replace() -> None:
            made.cut("server:0")
            made.start("server:0")
            gate.touch()

        story = run(
            tmp_path / "run",
            TASK,
            "async",
            steps=400,
            workers=2,
            checkpoint_steps=50,
            watch=Once(150, replace),
            hooks=[linger],
            launcher=made.launcher,
        )
    finished(story, 400, over=2)
    assert story.told("returning to the checkpoint")
    assert story.told("evaluator: update")
    assert checkpoint.best(tmp_path / "run") is not None
    logs = {path.name for path in (tmp_path / "run" / "logs").iterdir()}
    assert {"worker-1.log", "server-0.log", "evaluator.log"} <= logs
    assert list((tmp_path / "run" / "order" / "001").glob("worker-1-*.log"))


def test_an_evaluator_whose_node_is_lost_goes_on_at_the_hub(tmp_path: Path) -> None:
    gate, linger = gated(tmp_path, 200)
    with leaving_nothing(), nodes(extra=("evaluator",)) as made:

        def look(status: Status) -> None:
            lost(status)
            if any("evaluator moves to" in text for text in told):
                gate.touch()

        lost, told = Once(100, lambda: made.cut("evaluator")), []
        story = run(
            tmp_path / "run",
            TASK,
            "async",
            steps=300,
            workers=2,
            checkpoint_steps=50,
            patience=2.0,
            watch=look,
            hooks=[linger],
            launcher=made.launcher,
            said=told,
        )
    finished(story, 300, over=2)
    assert story.told("evaluator: update 300") or story.told("evaluator: update 301")
