"""`--on torchrun` with the real one. Data: scikit-learn's digits."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from launching import SECRET, command_lines, followed, gone, interrupt, launched
from processes import until
from shells import SECONDS, TRAIN, linger, shells, trained, updates_of


def test_a_rank_that_dies_is_begun_again_with_all_others(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, _ = followed("torchrun", tmp_path / "run", "die:worker:0")
    assert code == 0, capfd.readouterr().err
    assert {path.name for path in (tmp_path / "run").glob("*.1.json")} == {
        f"{task}.1.json" for task in ("chief", "worker:0", "server:0")
    }
    assert '{"called": ["server:0", "worker:0"]}' in capfd.readouterr().out


def test_an_interruption_reaches_the_chief(tmp_path: Path) -> None:
    with launched("torchrun", tmp_path / "run", "stay") as run:
        tasks = run.everybody()
        assert SECRET.hex() not in command_lines()
        interrupt(run)
        assert run.ended() == 130
        gone(tasks)
    assert (tmp_path / "run" / "ended").read_text() == "by a signal"


def test_a_launcher_that_is_killed_leaves_nothing(tmp_path: Path) -> None:
    with launched("torchrun", tmp_path / "run", "stay") as run:
        tasks = run.everybody()
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
    """Without --on: torchrun as one types it, without a directory that all see; the agent's store is where they meet."""
    words = (*TRAIN, "--placement", "chief,worker,ps")
    with shells(tmp_path) as made:
        made.program("torchrun", "torchrun", "--standalone", "--nproc-per-node=3", "--no-python", "paceline", *words)
        made.all_ended()
    (folder,) = (tmp_path / "runs").iterdir()
    assert trained(folder)["workers"] == 2
