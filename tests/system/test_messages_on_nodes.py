"""Messages between workers of several nodes: wherever a process dies or a connection breaks, nothing that was sent is
lost or counted twice; a node that is lost with its workers' cells sends all back to the checkpoint; replay gives bits.

Data: scikit-learn's digits.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from message_runs import ANY, TOSSING, WORKERS, check_replay, checkpoints, states, weight
from nodes import nodes
from processes import Linger, finished, leaving_nothing, run

from paceline.hook import Hook, Session
from paceline.network.means import mean_rooms
from paceline.network.means.linked_messages import LinkedMessages, MessageLinks
from paceline.processes.supervisor.status import Status
from paceline.runtime.messages import under_way

TASK = "digits-mlp"


@pytest.fixture(autouse=True)
def pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A vector travels in several messages; processes are forks and see it too."""
    monkeypatch.setattr(mean_rooms, "SLICE", 1000)


@dataclass
class Together(Hook):
    """Nobody makes a step before all have begun: no worker waits for another here, and the chief may be far ahead."""

    place: Path

    def before_step(self, session: Session) -> None:
        (self.place / f"begun-{session.worker.rank}").touch()
        while len([*self.place.glob("begun-*")]) < WORKERS:
            threading.Event().wait(0.01)


def conserved(directory: Path) -> None:
    """No weight was lost, in any checkpoint, and every message is in one place."""
    for one in checkpoints(directory):
        assert weight(one) == pytest.approx(WORKERS, rel=1e-12)


def test_killed_at_any_place_of_a_step_nothing_is_lost_or_counted_twice(tmp_path: Path) -> None:
    file = tmp_path / "tossing.py"
    file.write_text(TOSSING, encoding="utf-8")
    with leaving_nothing(), nodes() as made:
        story = run(
            tmp_path / "run",
            TASK,
            f"{file}:Tossing",
            workers=WORKERS,
            steps=150,
            checkpoint_steps=10,
            keep=100,
            launcher=made.launcher,
        )
    result = finished(story, 150)
    assert result.restarts == 5
    assert result.rolled_back_updates == 0
    conserved(tmp_path / "run")
    for one in checkpoints(tmp_path / "run"):
        workers = states(one)
        assert sum(w.sent for w in workers) == sum(w.came for w in workers) + len(under_way(workers))
    assert sum(w.came for w in states(checkpoints(tmp_path / "run")[-1])) > 10
    check_replay(tmp_path / "run", result.digest)


@pytest.mark.parametrize(
    ("scheme", "hyper", "compress"),
    [("gosgd", {"p": 0.7}, "none"), ("ad-psgd", {}, "none"), ("gosgd", {"p": 0.7}, "int8")],
)
def test_the_schemes_survive_kills_and_are_replayed(
    scheme: str, hyper: dict[str, Any], compress: str, tmp_path: Path
) -> None:
    kills, steps = ["worker:1", "chief"], 400
    settings: dict[str, Any] = {
        "workers": WORKERS,
        "steps": steps,
        "checkpoint_steps": 40,
        "keep": 100,
        "compress": compress,
    }
    settings["hooks"] = [Together(tmp_path)]
    with leaving_nothing(), nodes(together=("worker:1+worker:2",)) as made:  # one of them beside the other
        story = run(tmp_path / "run", TASK, scheme, kills=kills, hyper=ANY | hyper, launcher=made.launcher, **settings)
    result = finished(story, steps)
    assert result.restarts == len(kills)
    assert not story.falls
    assert result.metrics["accuracy"] > 0.8
    assert (sum(result.traffic["sent"]) < 0.5 * sum(result.traffic["uncompressed"])) == (compress != "none")
    if scheme == "gosgd":
        conserved(tmp_path / "run")
    check_replay(tmp_path / "run", result.digest)


def test_a_connection_that_breaks_inside_a_message_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, cuts = MessageLinks._exchange, tmp_path / "cuts"

    def cutting(self: MessageLinks, peer: Any, link: Any) -> None:
        plain(self, peer, link)
        if link._letter is not None and self._rank == 1 and not cuts.exists():
            cuts.touch()
            link.channel.close()

    monkeypatch.setattr(MessageLinks, "_exchange", cutting)
    with leaving_nothing(), nodes() as made:
        story = run(
            tmp_path / "run",
            TASK,
            "gosgd",
            hyper=ANY | {"p": 0.9},
            workers=WORKERS,
            steps=150,
            checkpoint_steps=30,
            keep=100,
            launcher=made.launcher,
            hooks=[Together(tmp_path), Linger(cuts, 100)],
        )
    result = finished(story, 150)
    assert cuts.exists()
    assert not result.restarts
    conserved(tmp_path / "run")
    check_replay(tmp_path / "run", result.digest)


@pytest.mark.parametrize("returns", [True, False])
def test_a_lost_node_takes_its_cells_along_and_all_return_to_the_checkpoint(tmp_path: Path, returns: bool) -> None:
    """Its worker goes on at another node: one that joins, or one that is left."""
    gate = tmp_path / "gate"

    with leaving_nothing(), nodes() as made:
        lost = False

        def watch(status: Status) -> None:
            nonlocal lost
            if not lost and status.updates >= 60:
                lost = True
                made.cut("worker:1")
                if returns:
                    made.start("worker:1")
            if any(role.name == "worker:1" and role.restarts and role.step >= 70 for role in status.roles):
                gate.touch()

        story = run(
            tmp_path / "run",
            TASK,
            "gosgd",
            hyper=ANY | {"p": 0.8},
            workers=WORKERS,
            steps=150,
            checkpoint_steps=20,
            keep=100,
            launcher=made.launcher,
            watch=watch,
            hooks=[Together(tmp_path), Linger(gate, 100)],
            **({} if returns else {"patience": 3.0}),
        )
    result = finished(story, 150)
    assert story.told("returning to the checkpoint")
    assert returns or story.told("worker:1 moves to")
    conserved(tmp_path / "run")
    check_replay(tmp_path / "run", result.digest)


@dataclass
class Leaves(Hook):
    """Worker 1 leaves the run after step 40, and writes down how many messages it has sent."""

    note: Path

    def after_step(self, session: Session) -> None:
        if session.worker.rank == 1 and session.worker.t == 40:
            self.note.write_text(str(session.worker.state.sent))
            session.leave("it has seen enough")


def test_a_worker_that_leaves_first_gives_away_what_it_has_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a slot of a worker that is gone a message would be out of reach for other nodes. Its connections
    break again and again before it leaves."""
    plain = LinkedMessages.end_step

    def cut(self: LinkedMessages, step: int) -> None:
        if self._rank == 1 and step >= 20:
            for peer in self._links:
                if peer.link is not None:
                    peer.link.channel.close()
        plain(self, step)

    monkeypatch.setattr(LinkedMessages, "end_step", cut)
    file = tmp_path / "tossing.py"
    file.write_text(TOSSING, encoding="utf-8")
    for name in ("received-0", "halved-1", "sent-0", "taken-1", "counted-0"):
        (tmp_path / name).touch()  # nobody is killed
    with leaving_nothing(), nodes() as made:
        story = run(
            tmp_path / "run",
            TASK,
            f"{file}:Tossing",
            workers=WORKERS,
            steps=120,
            launcher=made.launcher,
            hooks=[Together(tmp_path), Leaves(tmp_path / "sent"), Linger(tmp_path / "never", 40, 0.02)],
        )
    finished(story, 120)
    sent = int((tmp_path / "sent").read_text())
    assert states(checkpoints(tmp_path / "run")[-1])[2].came == sent > 0  # worker 2 hears of worker 1 alone
