"""The cells of a comparison: one run each, with a file of its own that holds its outcome."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from paceline.errors import DataError
from paceline.experiments.activity import ActivityExcerpt
from paceline.fields import finite
from paceline.runs.atomic_files import read_json, write_json

DONE, DIVERGED, FAILED = "done", "diverged", "failed"
FOLDER = "cells"


@dataclass(frozen=True)
class RunCell:
    """One run, as plain data. Two cells with equal fields have equal outcomes: the hash of the fields names the file.

    `identity`: what else determines the outcome: the task's values at its start, the text of its file.
    """

    label: str
    scheme: str
    workers: int
    hyper: dict[str, Any]
    seed: int
    real: bool
    samples: int | None
    seconds: float | None
    target: tuple[str, float] | None
    points: int
    task: str
    task_options: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)  # batch, feed, compute, …
    identity: dict[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """The name of its file, without a suffix."""
        plain = json.dumps(finite(asdict(self)), sort_keys=True, default=str)
        words = "-".join(f"{key}={value}" for key, value in self.hyper.items())
        name = f"{self.label}-{words}-seed{self.seed}" if words else f"{self.label}-seed{self.seed}"
        safe = "".join(letter if letter.isalnum() or letter in "-_.=" else "_" for letter in name)
        return f"{safe[:80]}-{hashlib.sha256(plain.encode()).hexdigest()[:12]}"

    @property
    def title(self) -> str:
        """What the progress shows."""
        words = " ".join(f"{key}={value}" for key, value in self.hyper.items())
        return f"{self.label}{f' {words}' if words else ''} seed {self.seed}"

    def file(self, directory: Path) -> Path:
        return directory / FOLDER / f"{self.key}.json"


@dataclass(frozen=True)
class Moment:
    """One evaluation of a run."""

    update: int
    samples: int
    seconds: float
    metrics: dict[str, float]


@dataclass(frozen=True)
class CellOutcome:
    """What became of a cell."""

    status: str  # done, diverged, failed
    moments: list[Moment]
    reason: str = ""  # why it diverged, failed, or ended early
    updates: int = 0
    gradients: int = 0
    samples: int = 0
    seconds: float = 0.0
    bytes_sent: int | None = None  # of all workers
    staleness: dict[int, int] = field(default_factory=dict)
    hyper: dict[str, Any] = field(default_factory=dict)  # all hyper-parameters, also those not given
    notes: list[str] = field(default_factory=list)  # warnings of the run
    run: str = ""  # the directory of a real run, within the comparison's
    activity: ActivityExcerpt | None = None

    @property
    def final(self) -> dict[str, float]:
        return self.moments[-1].metrics if self.moments else {}

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, asdict(self))

    @classmethod
    def read(cls, path: Path) -> CellOutcome | None:
        """The outcome in a file; None if there is none, or if it is damaged."""
        if not path.is_file():
            return None
        try:
            return cls.from_dict(read_json(path))
        except (DataError, KeyError, TypeError, ValueError):
            return None

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> CellOutcome:
        nan = float("nan")
        moments = [
            Moment(
                int(one["update"]),
                int(one["samples"]),
                float(one["seconds"]),
                {name: nan if value is None else float(value) for name, value in one["metrics"].items()},
            )
            for one in data["moments"]
        ]
        stale = {int(tau): int(count) for tau, count in data["staleness"].items()}
        activity = ActivityExcerpt.from_dict(data["activity"]) if data.get("activity") else None
        return cls(**{**data, "moments": moments, "staleness": stale, "activity": activity})
