"""What a run gives back, the same in every world."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass, field
from typing import Any

import torch

from paceline.fields import finite
from paceline.state import Vector

REAL = (
    "servers",
    "wall_seconds",
    "samples_per_second",
    "time_to_first_step",
    "restarts",
    "rolled_back_updates",
    "lost_updates",
    "peak_rss_mb",
    "directory",
    "fingerprint",
)
SHORT = 16  # a vector of at most so many numbers is shown whole


@dataclass(frozen=True)
class Staleness:
    """How old the gradients were that entered the centre, counted in versions of it by the server.

    `outstanding` is how far the versions that workers still held at the end lay behind, added up.
    """

    mean: float = 0.0
    max: int = 0
    histogram: dict[int, int] = field(default_factory=dict)
    outstanding: int = 0


@dataclass(frozen=True)
class Point:
    """One evaluation on the way."""

    update: int
    seconds: float
    metrics: dict[str, float]


@dataclass(frozen=True)
class Result:
    """A finished run. `vector` is the model; `digest` is the hash of its bytes and of nothing else."""

    scheme: str
    task: str
    workers: int
    updates: int
    gradients: int
    samples: int
    virtual_seconds: float | None  # None where time was real
    staleness: Staleness
    metrics: dict[str, float]
    vector: Vector = field(repr=False)
    dropped: int = 0
    seed: int = 0
    batch: int = 0
    hyper: dict[str, Any] = field(default_factory=dict, repr=False)
    history: list[Point] = field(default_factory=list, repr=False)
    warnings: list[str] = field(default_factory=list, repr=False)
    notice: str | None = field(default=None, repr=False)
    stopped: str | None = None  # what a hook ended the run for, before its last step
    servers: int = 0
    micro: int | None = None  # of exact runs: parts of a batch, each a worker of the scheme
    fates: dict[str, int] | None = None  # of simulations with faults: how many gradients were used, lost, …
    # of real runs only
    wall_seconds: float | None = None  # of training, from the first step to the stop
    samples_per_second: float | None = None
    time_to_first_step: float | None = None  # from the launch
    restarts: int | None = None  # of all launches
    rolled_back_updates: int | None = None  # made, and made void by a return to a checkpoint; of all launches
    lost_updates: int | None = None  # made after what was saved last: a run that failed had reached so many more
    peak_rss_mb: float | None = None  # of the largest process
    directory: str | None = None
    fingerprint: str | None = None  # the hash of what determined the result: see `fingerprint`

    @property
    def loss(self) -> float:
        """The loss of the final vector on the test data."""
        return self.metrics.get("loss", math.nan)

    @property
    def digest(self) -> str:
        return digest(self.vector)

    @property
    def final(self) -> list[float] | None:
        """The vector itself, when it is short."""
        return self.vector.tolist() if self.vector.numel() <= SHORT else None

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON; numbers that JSON cannot write (NaN, infinity) become None."""
        stale = self.staleness
        plain = {
            "scheme": self.scheme,
            "task": self.task,
            "workers": self.workers,
            "updates": self.updates,
            "gradients": self.gradients,
            "dropped": self.dropped,
            "samples": self.samples,
            "virtual_seconds": self.virtual_seconds,
            "staleness": {
                "mean": stale.mean,
                "max": stale.max,
                "histogram": {str(k): n for k, n in stale.histogram.items()},
            },
            "metrics": self.metrics,
            "loss": self.loss,
            "digest": self.digest,
            "final": self.final,
            "seed": self.seed,
            "batch": self.batch,
            "hyper": self.hyper,
            "history": [{"update": p.update, "seconds": p.seconds, **p.metrics} for p in self.history],
            "warnings": self.warnings,
            "notice": self.notice,
            "stopped": self.stopped,
        }
        if self.micro is not None:
            plain["micro"] = self.micro
        if self.fates is not None:
            plain |= {"servers": self.servers, "rolled_back_updates": self.rolled_back_updates, "fates": self.fates}
        if self.wall_seconds is not None:
            plain |= {name: getattr(self, name) for name in REAL}
        clean: dict[str, Any] = finite(plain)
        return clean

    @classmethod
    def from_dict(cls, data: dict[str, Any], vector: Vector) -> Result:
        """What `as_dict` gave, and the vector that it leaves out when it is long."""
        stale = data["staleness"]
        history = [
            Point(one["update"], one["seconds"], {k: v for k, v in one.items() if k not in ("update", "seconds")})
            for one in data["history"]
        ]
        derived = ("staleness", "history", "loss", "digest", "final", "error")
        kept = {name: value for name, value in data.items() if name not in derived}
        histogram = {int(k): n for k, n in stale["histogram"].items()}
        staleness = Staleness(stale["mean"], stale["max"], histogram)
        return cls(**kept, staleness=staleness, history=history, vector=vector)

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(self.as_dict(), allow_nan=False)


def digest(vector: Vector) -> str:
    """SHA-256 of the vector's bytes."""
    plain = vector.detach().cpu().contiguous().view(torch.uint8)  # numpy does not know every kind of number
    return hashlib.sha256(plain.numpy().tobytes()).hexdigest()
