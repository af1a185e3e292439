"""`--on torchrun` with the real one. Data: scikit-learn's digits."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

from launching import SECRET, command_lines, gone, launched
from processes import until
from shells import SECONDS, TRAIN, linger, shells, trained, updates_of


def test_a_launcher_that_is_killed_leaves_nothing(tmp_path: Path) -> None:
    with launched("torchrun", tmp_path / "run", "stay") as run:
        tasks = run.everybody()
        assert SECRET.hex() not in command_lines()
        run.process.kill()
        gone(tasks)


# training


def test_three_ranks_train_and_a_killed_one_is_begun_again(tmp_path: Path) -> None:
    """torchrun begins all of them again; they go on from the newest checkpoint."""
    gate, waits = linger(tmp_path)
    words = (*TRAIN, "--workers", "2", "--checkpoint-every", "20", "--dir", str(tmp_path / "run"), *waits)
    with shells(tmp_path) as made:
        made("torchrun", *words, "--on", "torchrun")
        until(lambda: updates_of(tmp_path / "run") >= 40, SECONDS, f"it trains: {made.said()}")
        rank = made.rank("RANK=1")
        os.kill(rank, signal.SIGKILL)
        until(lambda: made.rank("RANK=1") not in (0, rank), SECONDS, f"there is another: {made.said()}")
        gate.touch()
        made.all_ended()
    assert trained(tmp_path / "run")["workers"] == 2


def test_an_interruption_ends_with_a_last_checkpoint(tmp_path: Path) -> None:
    _, waits = linger(tmp_path)
    with shells(tmp_path) as made:
        words = (*TRAIN, "--workers", "2", "--checkpoint-every", "20", "--dir", str(tmp_path / "run"), *waits)
        run = made("torchrun", *words, "--on", "torchrun")
        until(lambda: updates_of(tmp_path / "run") >= 200, SECONDS, f"it trains: {made.said()}")
        run.process.send_signal(signal.SIGINT)
        assert run.ended() == 130
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["stopped"] == "interrupted"
    assert result["updates"] == updates_of(tmp_path / "run")


def test_processes_that_a_person_starts(tmp_path: Path) -> None:
    """Without --on: torchrun as one types it. No directory that all see: the agent's store is where they meet."""
    words = (*TRAIN, "--placement", "chief,worker,ps")
    with shells(tmp_path) as made:
        made.program("torchrun", "torchrun", "--standalone", "--nproc-per-node=3", "--no-python", "paceline", *words)
        made.all_ended()
    (folder,) = (tmp_path / "runs").iterdir()
    assert trained(folder)["workers"] == 2
