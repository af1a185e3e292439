"""Commands that only read texts load no library that takes long."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.runs.run_directory import RunDirectory

CODE = """
import atexit, sys
heavy = ("torch", "numpy", "pydantic", "rich.table", "rich.console")
atexit.register(lambda: print("loaded:", *[name for name in heavy if name in sys.modules], file=sys.stderr))
sys.argv = ["paceline", *sys.argv[1:]]
from paceline.__main__ import main
main()
"""


def loaded(*words: str, cwd: Path | None = None, **environment: str) -> tuple[str, str]:
    """What a command prints, and the heavy libraries that it has loaded."""
    done = subprocess.run(
        [sys.executable, "-c", CODE, *words],
        capture_output=True,
        text=True,
        env=os.environ | environment,
        cwd=cwd,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr.rpartition("loaded:")[2].strip()


@pytest.mark.parametrize("words", ["--help", "--version", "train --help", "simulate --help", "list", "list hooks"])
def test_texts_load_nothing(words: str) -> None:
    told, libraries = loaded(*words.split())
    assert told
    assert libraries == ""


def test_runs_loads_what_prints_tables(tmp_path: Path) -> None:
    RunDirectory.create(None, "toy-sync", tmp_path / "runs").write_plan({"task": "toy", "scheme": "sync"})
    told, libraries = loaded("runs", cwd=tmp_path)
    assert "toy-sync-001" in told
    assert libraries == "rich.table rich.console"
    assert loaded("runs", "--json", cwd=tmp_path)[0].startswith("{")


@pytest.mark.parametrize(
    ("line", "offered"),
    [("paceline tra", ["train", "trace"]), ("paceline train --che", ["--checkpoint-every", "--checkpoint-seconds"])],
)
def test_shell_completion_loads_nothing(line: str, offered: list[str]) -> None:
    number = str(len(line.split()) - 1)
    told, libraries = loaded(_PACELINE_COMPLETE="complete_bash", COMP_WORDS=line, COMP_CWORD=number)
    assert told.split() == offered
    assert libraries == ""
