"""What `paceline list` shows is what importing every member would show."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

import paceline.schemes
from paceline.config import discovery, listing, registered
from paceline.config.listing import listed

GOOD = '''"""A file."""

from dataclasses import dataclass

from paceline.scheme import Scheme


@dataclass(frozen=True)
class Mine(Scheme, name="my-own"):
    """One of my own.

    Nobody, nowhere.
    """
'''


@pytest.mark.parametrize("family", listing.FAMILIES)
def test_texts_tell_what_importing_would(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = {one.name: one.value.family if family == "schemes" else "" for one in discovery.FAMILIES[family]().values()}
    imported = [(one.name, one.summary, kind[one.name]) for one in discovery.FAMILIES[family]().values()]
    monkeypatch.setattr(discovery, "FAMILIES", {})  # nothing is imported
    assert listed(family) == imported


def test_every_family_is_listed() -> None:
    assert tuple(discovery.FAMILIES) == listing.FAMILIES


def test_a_further_folder(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(GOOD)
    assert ("my-own", "One of my own.", "others") in listed("schemes", (tmp_path,))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("1 / 0\n", "ZeroDivisionError: division by zero"),
        ("import nowhere_at_all\n", "No module named 'nowhere_at_all'"),
        ("from paceline.nowhere import nothing\n", "No module named 'paceline.nowhere'"),
        ("def\n", "invalid syntax"),
        (GOOD + "    @on_server\n    async def push(self, s): pass\n", "name 'on_server' is not defined"),
        (GOOD + "    async def step(self, w):\n        x = 1\n        x += await w.gradient(x)\n", "await"),
        ("from nowhere import Mine\nclass Own(Mine):\n    pass\n", "No module named 'nowhere'"),
    ],
    ids=range(7),
)
def test_a_broken_file_is_listed_with_its_reason(
    text: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "half_done.py").write_text(text)
    monkeypatch.setattr(paceline.schemes, "__path__", [*paceline.schemes.__path__, str(tmp_path)])
    told = {one.name: one.summary for one in listed("schemes", (tmp_path,))}
    assert reason in told["half-done"]
    assert "sync" in told


def test_entry_points_are_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [EntryPoint("other", "paceline.schemes.sync:SyncSGD", "paceline.schemes")]

    def found(group: str) -> list[EntryPoint]:
        return [entry for entry in entries if entry.group == group]

    monkeypatch.setattr(registered, "entries", found)
    monkeypatch.setattr(registered, "groups", lambda: {entry.group for entry in entries})
    assert "other" in {one.name for one in listed("schemes")}
    assert "other" not in {one.name for one in listed("hooks")}
