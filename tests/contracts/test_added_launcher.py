"""One file more is one launcher more: the example of docs/add-a-launcher.md, in a copy of the package.

Tried as a file of paceline/launchers/ and, more briefly, as an entry point, in processes of their own.
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest
from test_added_scheme import ROOT, World, copied


def example() -> str:
    page = (ROOT / "docs/add-a-launcher.md").read_text(encoding="utf-8")
    return page.split("```python\n")[1].split("```")[0]


# All commands in one process, as the command line runs them: each process would load torch again.
COMMANDS = """
import contextlib, io, json, sys
from paceline.cli.main import main

told = []
for words in json.loads(sys.argv[1]):
    sys.argv, text, code = ["paceline", *words], io.StringIO(), 0
    with contextlib.redirect_stdout(text):
        try:
            main()
        except SystemExit as end:
            code = end.code or 0
    told.append((code, text.getvalue()))
print(json.dumps(told))
"""
TRAIN = ("train", "toy", "--scheme", "async", "--on", "shells")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("added")
    copy, elsewhere = copied(folder / "repository"), folder / "elsewhere"
    elsewhere.mkdir()
    (copy / "paceline/launchers/shells.py").write_text(example())
    return World("shells", copy, str(copy), elsewhere, "paceline/launchers/shells.py")


@pytest.fixture(scope="module")
def told(world: World, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each command prints. Tasks run the command `paceline`: that of the copy."""
    program = tmp_path_factory.mktemp("program") / "paceline"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m paceline "$@"\n')
    program.chmod(0o755)
    commands = {
        "show": ("show", "shells"),
        "dry run": (*TRAIN, "--engine", "nice=5", "--dry-run"),
        "train": (*TRAIN, "--steps", "20", "--dir", str(world.elsewhere / "run")),
    }
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
        printed = world.python("-c", COMMANDS, json.dumps(list(commands.values()))).stdout
    codes, texts = zip(*json.loads(printed.splitlines()[-1]), strict=True)
    assert codes == (0, 0, 0), printed
    return dict(zip(commands, texts, strict=True))


def test_it_is_shown(told: dict[str, str], world: World) -> None:
    for text in ("Every task is a child process", "nice=", "niceness of every task", world.file):
        assert text in told["show"]


def test_another_package_registers_it(tmp_path: Path) -> None:
    (tmp_path / "outside_shells.py").write_text(example())
    info = tmp_path / "outside-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: outside\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[paceline.launchers]\nshells = outside_shells:Shells\n")
    outside = World("shells", ROOT, os.pathsep.join([str(ROOT), str(tmp_path)]), tmp_path, "outside_shells.py")
    listed = outside.python("-m", "paceline", "list", "launchers").stdout
    assert re.search(r"\bshells\b.*child process", listed)
    assert "slurm" in listed


def test_a_dry_run_prints_what_would_be_started(told: dict[str, str], world: World) -> None:
    assert re.findall(r"PACELINE_TASK=(\S+)", told["dry run"]) == ["chief", "worker:0", "server:0"]
    assert told["dry run"].count("nice -n 5 paceline train toy") == 3
    assert not list(world.elsewhere.glob("runs/*"))


@pytest.mark.usefixtures("told")
def test_it_runs(world: World) -> None:
    result = json.loads((world.elsewhere / "run/result.json").read_text())
    assert (result["updates"], result["workers"], result["servers"]) == (20, 2, 1)


def test_it_is_held_to_the_contract(world: World) -> None:
    contract = str(world.copy / "tests/contracts/test_every_launcher.py")
    done = world.python("-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "shells", contract, cwd=world.copy)
    count = re.search(r"(\d+) passed", done.stdout)
    assert count is not None, done.stdout
    assert int(count[1]) >= 6
    assert "failed" not in done.stdout
