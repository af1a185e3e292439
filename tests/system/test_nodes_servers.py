"""Servers on other nodes: what is fetched from them, and what is said when one is lost at the end of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from nodes import nodes
from processes import finished, leaving_nothing, run

from paceline.hooks.summary_saver import SummarySaver
from paceline.processes.calls.client import CallClient
from paceline.processes.calls.mailbox import WorkerRequest
from paceline.processes.roles.checkpointing import Checkpointing
from paceline.processes.supervisor.status import Status

TASK = "digits-mlp"


def test_a_run_whose_server_is_lost_while_it_ends_says_that_it_is_short_of_its_goal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next command trains the rest."""
    ending, keep_servers = tmp_path / "ending", Checkpointing.keep_servers

    def kept_late(checkpoints: Checkpointing) -> None:
        ending.touch()
        generation = checkpoints._board.get("generation")
        while checkpoints._board.get("generation") == generation:
            checkpoints._memory.wakeup.wait(lambda: False, 0.02)
        keep_servers(checkpoints)

    with leaving_nothing(), nodes() as made:
        lost: list[int] = []

        def look(status: Status) -> None:
            if ending.exists() and not lost:
                lost.append(status.updates)
                made.cut("server:0")

        settings: dict[str, Any] = {"steps": 100, "workers": 2, "patience": 2.0, "launcher": made.launcher}
        with monkeypatch.context() as patched:
            patched.setattr(Checkpointing, "keep_servers", kept_late)
            story = run(tmp_path / "run", TASK, "async", watch=look, **settings)
    assert lost
    assert str(story.error).startswith("server:0 was lost while the run ended: the run is back at update 0 of 100")
    assert story.directory.result()["error"] == str(story.error)
    finished(run(tmp_path / "run", TASK, "async", steps=100, workers=2, resume=True), 100, over=2)


def test_summaries_do_not_fetch_the_model_from_servers_of_other_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, ask = tmp_path / "asked", CallClient.ask

    def noted(client: CallClient, kind: int, *args: Any) -> Any:
        with asked.open("a") as file:
            file.write(f"{WorkerRequest(kind).name}\n")
        return ask(client, kind, *args)

    monkeypatch.setattr(CallClient, "ask", noted)
    with leaving_nothing(), nodes() as made:
        hooks, settings = [SummarySaver(every=1)], {"steps": 40, "workers": 2, "launcher": made.launcher}
        finished(run(tmp_path / "run", TASK, "sync", hooks=hooks, **settings), 40)
    kinds = asked.read_text().split()
    assert kinds.count("COUNT") >= 30
    assert kinds.count("SHOW") == 1  # for the evaluation at the end
