"""What README and docs claim is run: their Python, their commands, their scheme."""

from __future__ import annotations

import pkgutil
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.errors import UsageError

ROOT = Path(__file__).resolve().parents[2]


# what needs a file of the reader's, another program, a run that is there already, or a cluster
ELSEWHERE = ("my_file", "|", "-001", "--on ", "-hosts")


def blocks(page: str, language: str) -> list[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)  # one after the other
    return [block for kind, block in found if kind == language]


def commands() -> list[str]:
    lines = (line for block in blocks("README.md", "") for line in block.splitlines())
    words = (line.removeprefix("$ ").partition(" #")[0].strip() for line in lines)
    return [line for line in words if line.startswith("paceline ") and not any(mark in line for mark in ELSEWHERE)]


@pytest.mark.parametrize("command", commands())
def test_commands_of_the_readme_run(command: str, tmp_path: Path) -> None:
    words = shlex.split(command)[1:]
    if words[0] == "simulate":  # the same command, fewer updates
        words += ["--steps", "40"]
    ran = subprocess.run(
        [sys.executable, "-m", "paceline", *words],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr


def test_the_example_of_the_readme_runs() -> None:
    (example,) = [block for block in blocks("README.md", "python") if "print(" in block]
    assert len(example.strip().splitlines()) <= 10
    ran = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr
    assert len(ran.stdout.splitlines()) == 4


def test_the_scheme_of_add_a_scheme_runs(tmp_path: Path) -> None:
    (tmp_path / "lazy.py").write_text(blocks("docs/add-a-scheme.md", "python")[0], encoding="utf-8")
    command = ["simulate", "toy", "-s", "lazy.py:Lazy", "threshold=10", "--steps", "20"]
    ran = subprocess.run(
        [sys.executable, "-m", "paceline", *command], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert "lazy on toy" in ran.stdout


def test_the_scheme_that_adapts_runs_resumes_and_replays(tmp_path: Path) -> None:
    """The window of the example is a cell: a run that is resumed continues with it, and a replay repeats it."""
    (block,) = [block for block in blocks("docs/add-a-scheme.md", "python") if "class Shrinking" in block]
    (tmp_path / "shrinking.py").write_text(block, encoding="utf-8")
    given = ["digits-mlp", "-s", "shrinking.py:Shrinking", "lr=0.05", "--workers", "2"]
    for command, said in (
        (["simulate", *given, "--steps", "60"], "shrinking on digits-mlp"),
        (["train", *given, "--steps", "30", "--dir", "run", "--plain"], "shrinking on digits-mlp"),
        (["train", "--resume", "run", "--steps", "60", "--plain"], "shrinking on digits-mlp"),
        (["replay", "run"], "match"),
    ):
        words = [sys.executable, "-m", "paceline", *command]
        ran = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, check=False)
        assert ran.returncode == 0, ran.stderr
        assert said in ran.stdout


PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
MADE = {"best_loss.py", "lazy.py", "my_digits.py", "my_model.py", "shells.py"}  # files that a page has its reader write
FILES = {path.name for path in ROOT.rglob("*.py") if ".venv" not in path.parts}
HOMES = [
    ROOT,
    *(ROOT / part for part in ("paceline", "paceline/processes", "paceline/network", "paceline/runs", "tests")),
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_and_names_in_pages_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for path in re.findall(r"`((?:[a-z_]+/)*[a-z_0-9]+\.py)`", text):
        found = any((home / path).is_file() for home in HOMES) if "/" in path else path in FILES
        assert found or Path(path).name in MADE, f"{page.name} names {path}"
    for name in re.findall(r"`(paceline(?:\.[A-Za-z_]+)+)", text):
        try:
            pkgutil.resolve_name(name)  # raises if it leads nowhere
        except UsageError as error:  # a package whose framework is not installed: its text has the list of its names
            if "pip install" not in str(error):
                raise
            home, _, last = name.rpartition(".")
            package = ROOT.joinpath(*name.split("."), "__init__.py")
            if not package.is_file():
                listed = ROOT.joinpath(*home.split("."), "__init__.py").read_text(encoding="utf-8").split("__all__")[1]
                assert f'"{last}"' in listed, f"{page.name} names {name}"


def test_generated_pages_are_true() -> None:
    script = ROOT / "docs" / "generate.py"
    ran = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_the_deadlock_of_the_docs_is_what_is_printed() -> None:
    (shown,) = [block for block in blocks("docs/simulator.md", "") if block.startswith("$ paceline")]
    command, _, printed = shown.partition("\n")
    words = shlex.split(command)[2:]
    ran = subprocess.run([sys.executable, "-m", "paceline", *words], capture_output=True, text=True, check=False)
    assert ran.stderr == printed
