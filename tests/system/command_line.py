"""`paceline …` called inside the test's own process: a fork of it trains in a few tenths of a second."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.main import main
from paceline.runs import checkpoint

Capture = pytest.CaptureFixture[str]


@dataclass(frozen=True)
class Shown:
    """How a command ended, and what it wrote."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        assert self.code == 0, self.err
        plain: dict[str, Any] = json.loads(self.out)
        return plain


class Commands:
    """The command line in a folder of its own."""

    def __init__(self, capture: Capture) -> None:
        self._capture = capture

    def __call__(self, *words: str) -> Shown:
        self._capture.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(list(words))
        shown = self._capture.readouterr()
        return Shown(int(ended.value.code or 0), shown.out, shown.err)

    def train(self, *words: str, task: str = "digits-mlp") -> dict[str, Any]:
        """Train with --json; gives the result."""
        return self("train", task, *words, "--json").json


@pytest.fixture
def paceline(capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Commands:
    """The command line, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    return Commands(capsys)


def steps_of(run: str | Path) -> list[int]:
    """The updates of which a run has checkpoints."""
    return checkpoint.steps(Path(run) / "checkpoints")


def history_of(result: dict[str, Any], key: str = "loss") -> list[dict[str, Any]]:
    """The points of a result's history that hold a value of this name."""
    return [point for point in result["history"] if key in point]
