"""One file more is one scheme more: on the command line, in the documentation, in the contract tests.

Tried on a copy of the package, in processes of their own, from another directory.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import paceline

ROOT = Path(paceline.__file__).resolve().parent.parent

SCHEME = '''"""{title}: written by a test."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.scheme import Rate, Scheme, State, Vector, on_server
from paceline.worker import Worker


@dataclass(frozen=True)
class {title}(Scheme, name="{name}"):
    """{title}: asynchronous SGD that walks part of the way.

    Nobody at all, A Scheme of Their Own, 1999.

    worker:  x, v <- pull();  g <- gradient(x);  push(g, v)
    server:  push: x <- x - stride * lr * g;  v <- v + 1
    """

    lr: Rate = 0.1
    stride: Rate = 0.5
    asynchronous = True
    family = "asynchronous"
    good_for = "short legs"
    volume = "2"
    limit = "stride * lr * h below the limit of async"

    @on_server
    def pull(self, s: State) -> tuple[Vector, int]:
        return s.x, s.v

    @on_server
    def push(self, s: State, g: Vector, v: int) -> None:
        s.admit(v)
        s.x -= self.stride * self.lr * g
        s.v += 1

    async def step(self, w: Worker) -> None:
        w.x, w.v = await self.pull()
        g = await w.grad(w.x)
        await self.push(g, w.v)
'''


@dataclass(frozen=True)
class World:
    """A copy of the repository with a scheme more, and how to run things in it."""

    name: str
    copy: Path
    path: str
    elsewhere: Path
    file: str

    def python(self, *words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        wide = {"PYTHONPATH": self.path, "COLUMNS": "400", "NO_COLOR": "1"}
        done = subprocess.run(
            [sys.executable, *words],
            cwd=cwd or self.elsewhere,
            env={**os.environ, **wide},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done


def copied(to: Path) -> Path:
    for folder in ("paceline", "docs", "examples", "tests"):
        shutil.copytree(ROOT / folder, to / folder)  # with __pycache__: else every process would compile all of it
    shutil.copy(ROOT / "pyproject.toml", to)
    return to


@pytest.fixture(scope="module", params=["file", pytest.param("entry-point", marks=pytest.mark.long)])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("added")
    copy, elsewhere, site = copied(folder / "repository"), folder / "elsewhere", folder / "site"
    elsewhere.mkdir()
    site.mkdir()
    if request.param == "file":
        (copy / "paceline/schemes/part_way.py").write_text(SCHEME.format(title="PartWay", name="part-way"))
        return World("part-way", copy, str(copy), elsewhere, "paceline/schemes/part_way.py")
    (site / "outside_paceline.py").write_text(SCHEME.format(title="Outside", name="outside"))
    info = site / "outside-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: outside\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[paceline.schemes]\noutside = outside_paceline:Outside\n")
    file = str(site / "outside_paceline.py")
    return World("outside", copy, os.pathsep.join([str(copy), str(site)]), elsewhere, file)


def test_it_is_listed_and_shown(world: World) -> None:
    listed = world.python("-m", "paceline", "list", "schemes").stdout
    assert re.search(rf"\b{world.name}\b.*asynchronous SGD that walks part of the way", listed)
    assert "downpour" in listed
    shown = world.python("-m", "paceline", "show", world.name).stdout
    for text in (
        "A Scheme of Their Own, 1999",
        "x <- x - stride * lr * g",
        "stride",
        "0.5",
        "short legs",
        Path(world.file).name,
    ):
        assert text in shown


def test_it_runs(world: World) -> None:
    command = ["-m", "paceline", "simulate", "toy", "--scheme", world.name, "--workers", "3", "--steps", "12"]
    done = world.python(*command, "stride=0.25", "lr=0.2", "--json")
    plain = json.loads(done.stdout)
    assert (plain["scheme"], plain["updates"], plain["workers"]) == (world.name, 12, 3)
    assert plain["hyper"] == {"lr": 0.2, "stride": 0.25}


def test_it_is_documented(world: World) -> None:
    pages = world.copy / "docs"
    assert f"`{world.name}`" not in (pages / "schemes.md").read_text(encoding="utf-8")
    world.python(str(pages / "generate.py"))
    (row,) = [
        line
        for line in (pages / "schemes.md").read_text(encoding="utf-8").splitlines()
        if line.startswith(f"| `{world.name}` |")
    ]
    assert "Nobody at all, A Scheme of Their Own, 1999." in row
    assert "stride" in row
    assert world.file in row


@pytest.mark.long
def test_it_is_held_to_the_contracts(world: World) -> None:
    """Once by running them; that they are there for a scheme of another package is enough for the second."""
    contracts = world.copy / "tests/contracts"
    others = [str(path) for path in sorted(contracts.glob("test_every_*.py"))]
    collect = [] if world.name == "part-way" else ["--collect-only"]
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", *collect, "-k", world.name, *others]
    done = world.python(*words, cwd=world.copy)
    count = re.search(r"(\d+)(?:/\d+ tests collected| passed)", done.stdout)
    assert count is not None, done.stdout
    assert int(count[1]) >= 40
    assert "failed" not in done.stdout
