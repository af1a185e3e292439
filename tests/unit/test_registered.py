"""Entry points and modules are read once, and again after a folder has changed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from paceline.config import registered


def package(folder: Path, name: str) -> None:
    info = folder / f"{name}-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[paceline.schemes]\n{name} = {name}:Scheme\n[other]\nx = y:z\n")


def names() -> set[str]:
    return {entry.name for entry in registered.entries("paceline.schemes")}


def test_a_package_that_is_installed_meanwhile_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    assert "late" not in names()
    package(tmp_path, "late")
    assert "late" in names()
    assert "paceline.schemes" in registered.groups()
    assert registered.entries("paceline.nothing") == ()


def test_what_was_read_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    before = names()
    monkeypatch.setattr(registered, "entry_points", lambda: pytest.fail("the packages are read again"))
    assert names() == before


def test_a_module_that_is_added_is_found(tmp_path: Path) -> None:
    (tmp_path / "one.py").touch()
    assert registered.modules([str(tmp_path)]) == ("one",)
    (tmp_path / "two.py").touch()
    assert registered.modules([str(tmp_path)]) == ("one", "two")
    assert registered.modules([str(tmp_path / "gone")]) == ()
