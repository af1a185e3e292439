"""Every launcher passes the checks of paceline/testing/launchers.py. Engines are stood in for by fake_engines.py."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import fake_engines
import pytest

from paceline.config import discovery
from paceline.launcher import Launcher
from paceline.testing.launchers import CHECKS


@pytest.fixture
def made(launcher: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Launcher]:
    programs = tmp_path / "programs"
    programs.mkdir()
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    known = set(sys.modules)
    engine = getattr(fake_engines, launcher.replace("-", "_"), None)
    if engine is not None:
        engine(programs, monkeypatch)
    yield discovery.launcher(launcher)
    for name in set(sys.modules) - known:  # modules that stand in for an engine's own
        if str(programs) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_it_keeps_the_contract(check: Callable[[Launcher, Path], None], made: Launcher, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    check(made, folder)
