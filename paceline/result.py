"""The result of a run: the same class for simulated and for real runs."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from paceline.fields import finite
from paceline.state import Vector

SHORT = 16  # the longest vector that a result shows whole
_REAL = {"of": "real runs"}  # of fields that only a run of real processes has


@dataclass(frozen=True)
class Staleness:
    """How old gradients were when they entered the centre, counted by the server in versions of the centre.

    `outstanding`: the sum of how far behind the versions are that workers still hold at the end.
    """

    mean: float = 0.0
    max: int = 0
    histogram: dict[int, int] = field(default_factory=dict)
    outstanding: int = 0


@dataclass(frozen=True)
class Point:
    """One evaluation during a run."""

    update: int
    seconds: float
    metrics: dict[str, float]

    def as_dict(self) -> dict[str, Any]:
        """A line of the history."""
        return {"update": self.update, "seconds": self.seconds, **self.metrics}

    @classmethod
    def from_dict(cls, line: Mapping[str, Any]) -> Point:
        metrics = dict(line)
        return cls(metrics.pop("update"), metrics.pop("seconds"), metrics)


@dataclass(frozen=True)
class Result:
    """A finished run. `vector` is the model; `digest` is the hash of its bytes and of nothing else.

    The keys of `as_dict` are in the order of the fields.
    """

    scheme: str
    task: str
    workers: int
    updates: int
    gradients: int
    dropped: int = field(default=0, kw_only=True)
    samples: int
    epochs: float | None = field(default=None, kw_only=True)  # samples / training samples; None: they have no length
    virtual_seconds: float | None  # None where time was real
    staleness: Staleness
    metrics: dict[str, float]
    vector: Vector = field(repr=False)
    seed: int = 0
    batch: int = 0
    hyper: dict[str, Any] = field(default_factory=dict, repr=False)
    history: list[Point] = field(default_factory=list, repr=False)
    warnings: list[str] = field(default_factory=list, repr=False)
    notice: str | None = field(default=None, repr=False)
    stopped: str | None = None  # why a hook stopped the run before its last step
    micro: int | None = None  # of exact runs: parts of a batch, each a worker of the scheme
    servers: int = 0
    wall_seconds: float | None = field(default=None, metadata=_REAL)  # of training, from the first step to the stop
    samples_per_second: float | None = field(default=None, metadata=_REAL)
    time_to_first_step: float | None = field(default=None, metadata=_REAL)  # since the launch
    restarts: int | None = field(default=None, metadata=_REAL)  # of all launches
    rolled_back_updates: int | None = None  # updates that returns to a checkpoint undid; of all launches
    lost_updates: int | None = field(default=None, metadata=_REAL)  # updates of a failed run after its last checkpoint
    peak_rss_mb: float | None = field(default=None, metadata=_REAL)  # of the largest process
    directory: str | None = field(default=None, metadata=_REAL)
    fingerprint: str | None = field(default=None, metadata=_REAL)  # hash of what determined the result
    fates: dict[str, int] | None = None  # of simulations with faults: number of gradients used, dropped, lost, …

    @property
    def loss(self) -> float:
        """The loss of the final parameters on the test data."""
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
        real, faulty = self.wall_seconds is not None, self.fates is not None
        shown = {"micro": self.micro is not None, "fates": faulty}
        shown |= dict.fromkeys(("servers", "rolled_back_updates"), real or faulty)
        plain: dict[str, Any] = {}
        for name in (one.name for one in fields(self) if shown.get(one.name, real or not one.metadata)):
            match name:
                case "staleness":
                    histogram = {str(k): n for k, n in self.staleness.histogram.items()}
                    plain[name] = {"mean": self.staleness.mean, "max": self.staleness.max, "histogram": histogram}
                case "history":
                    plain[name] = [point.as_dict() for point in self.history]
                case "vector":
                    plain |= {"loss": self.loss, "digest": self.digest, "final": self.final}
                case _:
                    plain[name] = getattr(self, name)
        clean: dict[str, Any] = finite(plain)
        return clean

    @classmethod
    def from_dict(cls, data: dict[str, Any], vector: Vector) -> Result:
        """The result that `as_dict` was called on, given the vector, which `as_dict` omits when it is long."""
        told = {name: data[name] for name in (one.name for one in fields(cls)) if name in data}
        stale = data["staleness"]
        histogram = {int(k): n for k, n in stale["histogram"].items()}
        told["staleness"] = Staleness(stale["mean"], stale["max"], histogram)
        told["history"] = [Point.from_dict(line) for line in data["history"]]
        return cls(**told, vector=vector)

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(self.as_dict(), allow_nan=False)


def epochs_of(samples: int, epoch_size: int | None) -> float | None:
    """The passes over the training data that this number of samples makes."""
    return samples / epoch_size if epoch_size else None


def digest(vector: Vector) -> str:
    """SHA-256 of the vector's bytes."""
    plain = vector.detach().cpu().contiguous().view(torch.uint8)  # numpy lacks some dtypes
    return hashlib.sha256(plain.numpy().tobytes()).hexdigest()
