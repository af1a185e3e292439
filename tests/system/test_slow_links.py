"""Schemes for slow links, over one: two hosts, 50 Mbit/s and 20 ms between them; and between nodes of one machine. A
worker is killed, the run ends by itself, and its record repeats every bit. benchmarks/slow_links.py measures the same
runs.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from beds.hosts import Host, several, until
from far_runs import LIMIT, Story
from nodes import nodes
from processes import finished, leaving_nothing, run

from paceline.runs.replay.accounting import audit
from paceline.runs.run_directory import RunDirectory, RunState

TASK = "char-lm"
TASKS = {"h1": "chief", "h2": "worker:0"}
RUNS = {
    "allreduce": "allreduce rule=adamw lr=0.002",
    "compressed": "allreduce rule=adamw lr=0.002 --compress topk:0.01",
    "local-sgd": "local-sgd rule=adamw window=4 lr=0.002",
    "diloco": "diloco window=5 lr=0.002",
    "streaming-diloco": "streaming-diloco window=4 fragments=2 overlap=1 lr=0.002",
    "sparseloco": "sparseloco window=4 lr=0.002",
}

_HOOK = """
from dataclasses import dataclass
from pathlib import Path
from paceline.hook import Hook, Session

@dataclass
class UntilTold(Hook):
    folder: str

    def after_step(self, session: Session) -> None:
        if not session.worker.rank:
            Path(self.folder, "progress.new").write_text(str(session.updates))
            Path(self.folder, "progress.new").replace(Path(self.folder, "progress"))  # never half written
            if Path(self.folder, "enough").exists():
                session.stop("enough")
"""


@pytest.fixture
def hosts() -> Iterator[dict[str, Host]]:
    with several(2) as found, found["h2"].slow(delay=20), found["h2"].limited("50mbit"):
        yield found


@pytest.mark.parametrize("words", RUNS.values(), ids=RUNS)
def test_a_worker_is_killed_and_the_record_repeats_the_run(words: str, tmp_path: Path, hosts: dict[str, Host]) -> None:
    (tmp_path / "told.py").write_text(_HOOK)
    command = [sys.executable, "-P", "-m", "paceline", "train", TASK, "--scheme", *words.split(), "--plain"]
    command += ["--hook", f"{tmp_path}/told.py:UntilTold:folder={tmp_path}", "--steps", "1000000"]
    command += ["--dir", str(tmp_path / "run")]
    with ExitStack() as started:
        tasks = {}
        for name, task in TASKS.items():
            environment = os.environ | {
                "PACELINE_TASK": task,
                "PACELINE_CLUSTER": "chief=1,worker=1",
                "PACELINE_MEET": str(tmp_path / "hub"),
                "PACELINE_SECRET": "5e" * 32,
            }
            log = started.enter_context((tmp_path / f"output-{name}").open("w"))
            running = hosts[name].start(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
            tasks[name] = started.enter_context(running)
        story = Story(tmp_path, hosts, tasks["h1"], tmp_path / "output-h1")
        story.until_it_trains(2)
        story.kill("worker:1")
        (tmp_path / "enough").touch()
        for name, running in tasks.items():
            assert running.wait(LIMIT) == 0, story.told()
            until(lambda name=name: not hosts[name].processes(), 10, f"nothing is left on {name}")
    found = RunDirectory(story.folder)
    assert found.state is RunState.DONE
    assert (found.result() or {})["restarts"] == 1
    assert list(audit(story.folder)) == []


@pytest.mark.parametrize("words", RUNS.values(), ids=RUNS)
def test_nodes_of_one_machine_lose_their_workers_too(words: str, tmp_path: Path) -> None:
    scheme, *pairs = words.removesuffix(" --compress topk:0.01").split()
    settings: dict[str, Any] = {"workers": 2, "steps": 60, "compress": "topk:0.01" if "--compress" in words else None}
    kills = ("worker:1", "chief")
    with leaving_nothing(), nodes() as made:
        hyper = dict(pair.split("=") for pair in pairs)
        story = run(
            tmp_path / "run", "digits-mlp", scheme, hyper=hyper, kills=kills, launcher=made.launcher, **settings
        )
    assert finished(story, 60).restarts == len(kills)
    assert list(audit(tmp_path / "run")) == []
