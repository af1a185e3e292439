"""`--on torchrun` with the real one."""

from __future__ import annotations

from pathlib import Path

import pytest
from launching import SECRET, command_lines, followed, gone, interrupt, launched


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
