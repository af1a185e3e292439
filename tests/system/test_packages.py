"""`python -m build` gives an sdist and a wheel; the wheel works in an environment of its own, outside the checkout."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Sequence
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
from beds.commands import need

from paceline.config import discovery

ROOT = Path(__file__).resolve().parents[2]


def call(command: Sequence[str | Path], folder: Path) -> str:
    """Standard output of a command that must succeed."""
    ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, f"{command}:\n{ran.stdout}{ran.stderr}"
    return ran.stdout


def tracked() -> list[str]:
    """The project's files: those of git that are there, and new ones that it does not ignore."""
    names = call(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], ROOT).split("\0")
    return [name for name in names if name and (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with both packages. They are built from a copy, as setuptools writes beside the sources."""
    pytest.importorskip("build", reason="build, of the extra 'dev', is not installed")
    need({"git": "git"}, "the project's files")
    source, packages = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("packages")
    for name in tracked():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir"]
    call([*build, packages, source], source)  # the sdist, and the wheel from the sdist, not from the sources
    call([*build, packages / "direct", "--wheel", source], source)
    return packages


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def only(folder: Path, pattern: str) -> Path:
    (path,) = folder.glob(pattern)
    return path


def test_every_file_of_the_package_is_in_the_wheel(built: Path) -> None:
    packed = contents(only(built, "*.whl"))
    wanted = {name for name in tracked() if name.startswith("paceline/")}
    assert {name for name in packed if ".dist-info/" not in name} == wanted
    assert {"paceline/py.typed", "paceline/datasets/tinyshakespeare.txt.xz"} <= wanted
    for name in wanted:
        assert packed[name] == (ROOT / name).read_bytes(), name


def test_the_sdist_makes_the_wheel_that_the_sources_make(built: Path) -> None:
    assert contents(only(built, "*.whl")) == contents(only(built / "direct", "*.whl"))
    with tarfile.open(only(built, "*.tar.gz")) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "README.md", "pyproject.toml"} <= names
    assert not [name for name in names if name.startswith(("tests", "benchmarks", ".venv"))]


def test_the_metadata_are_those_of_the_project(built: Path) -> None:
    packed = contents(only(built, "*.whl"))
    (metadata,) = (content for name, content in packed.items() if name.endswith("/METADATA"))
    told: Message = Parser().parsestr(metadata.decode())
    assert (told["Name"], told["Requires-Python"], told["License-Expression"]) == ("paceline", ">=3.11", "Apache-2.0")
    assert "Operating System :: POSIX :: Linux" in told.get_all("Classifier", [])
    assert told.get_payload() == (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_wheel_works_in_an_environment_of_its_own(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    home = tmp_path / "environment"
    venv.create(home, symlinks=True)
    python, wheel = home / "bin" / "python", only(built, "*.whl")
    # pip first, while no other paceline is to be seen that it could replace
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel]
    call(pip, tmp_path)
    (site,) = home.glob("lib/python*/site-packages")
    others = [path for path in sys.path if path.endswith("site-packages")]  # torch and the like; no .pth of theirs
    (site / "others.pth").write_text("\n".join(others) + "\n", encoding="utf-8")

    paceline = home / "bin" / "paceline"
    where = call([python, "-c", "import paceline; print(paceline.__file__, paceline.__version__)"], tmp_path)
    path, version = where.split()
    assert Path(path).is_relative_to(site)
    assert version in wheel.name
    assert call([paceline, "--version"], tmp_path) == f"paceline {version}\n"
    listed = call([paceline, "list", "schemes"], tmp_path)
    assert not [name for name in discovery.schemes() if name not in listed]
    trained = json.loads(
        call([paceline, "train", "digits-mlp", "-s", "downpour", "--workers", "2", "--steps", "20", "--json"], tmp_path)
    )
    assert (trained["updates"], trained["workers"]) == (20, 2)
    # the text comes with the package, and a script finds the package too
    (tmp_path / "script.py").write_text(SCRIPT, encoding="utf-8")
    call([paceline, "run", "script.py", "--workers", "2"], tmp_path)
    assert (tmp_path / "updates").read_text(encoding="utf-8") == "10"


SCRIPT = """
from pathlib import Path
import torch, paceline
from paceline.datasets import load

model = torch.nn.Embedding(len(load("shakespeare").characters), 2)
with paceline.attach(model, "sync", lr=0.1, steps=10) as pace:
    while not pace.done:
        pace.step(model.weight.square().sum(), size=1)
if pace.chief:
    Path("updates").write_text(str(pace.updates))
"""
