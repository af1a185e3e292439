"""The result of a run: the same class for simulated and for real runs."""

from __future__ import annotations

import hashlib
import io
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from html import escape
from importlib import import_module
from typing import Any, Literal

import torch

from paceline.errors import UnknownName, UsageError
from paceline.fields import finite
from paceline.state import Vector

INSTALL = "install it with: pip install 'paceline[notebook]'"
SHORT = 16  # the longest vector that a result shows whole
TRACING = "trace"  # the category of the time that traces take
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
class Profile:
    """What every role has spent its time on, with `profile=True`.

    `roles`: of each role the seconds of each category; `traces`: files of torch.profiler in the run directory;
    `notes`: what is missing, and why.
    """

    roles: dict[str, dict[str, float]]
    traces: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def columns(self) -> list[str]:
        """The categories that any role has spent time on, in order. Tracing itself is not among them."""
        known = dict.fromkeys(name for times in self.roles.values() for name in times)
        return [name for name in known if name != TRACING and any(self.roles[role][name] for role in self.roles)]

    def rows(self) -> Iterator[tuple[str, ...]]:
        """What a table shows: role, seconds, and the share of each category."""
        for role, times in self.roles.items():
            total = sum(seconds for name, seconds in times.items() if name != TRACING)
            yield (
                role,
                f"{total:.{1 if total < 10_000 else 0}f}",
                *(share(times[name], total) for name in self.columns()),
            )

    def __str__(self) -> str:
        lines = [("role", "seconds", *self.columns()), *self.rows()]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        table = [[cell.rjust(width) for cell, width in zip(line, widths, strict=True)] for line in lines]
        texts = [" ".join([line[0].ljust(widths[0]), *cells]) for line, (_, *cells) in zip(lines, table, strict=True)]
        return "\n".join(text.rstrip() for text in [*texts, *self.remarks()])

    def remarks(self) -> list[str]:
        """What a table does not show."""
        traced = sum(times.get(TRACING, 0.0) for times in self.roles.values())
        return [f"not counted: {traced:.1f} s for traces"] * (traced >= 0.05) + self.notes

    def _repr_html_(self) -> str:
        names = ("role", "seconds", *self.columns())
        head = "".join(f"<th>{escape(name)}</th>" for name in names)
        rows = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in self.rows())
        told = "".join(f"<div>{escape(text)}</div>" for text in self.remarks())
        return f"<table><caption>profile</caption><tr>{head}</tr>{rows}</table>{told}"


def share(part: float, whole: float) -> str:
    """A share in at most four characters: 12%, 0.3%."""
    percent = 100 * part / whole if whole else 0.0
    if percent >= 9.95:
        return f"{percent:.0f}%"
    return f"{percent:.1f}%" if percent >= 0.05 else ("0%" if part else "")


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


class Evaluations(list[Point]):
    """The evaluations of a run, oldest first."""

    def names(self) -> list[str]:
        """The names of all values, in the order in which they appear."""
        return list(dict.fromkeys(name for point in self for name in point.metrics))

    def frame(self) -> Any:
        """A pandas DataFrame: a row for each point, with the columns update, seconds and one for each value."""
        try:
            from pandas import DataFrame
        except ImportError:
            raise UsageError(f"history.frame() needs pandas; {INSTALL}") from None
        return DataFrame([point.as_dict() for point in self], columns=["update", "seconds", *self.names()])

    def _repr_html_(self) -> str:
        """A table, which notebooks show."""
        names = ["update", "seconds", *self.names()]
        rows = "".join(
            f"<tr>{''.join(f'<td>{value:,.6g}</td>' if value is not None else '<td></td>' for value in line)}</tr>"
            for line in ([point.as_dict().get(name) for name in names] for point in self)
        )
        return f"<table><tr>{''.join(f'<th>{escape(name)}</th>' for name in names)}</tr>{rows}</table>"


def _figure() -> Any:
    """A class of matplotlib's figures that notebooks show. They are made without pyplot, which would keep them all."""
    try:
        kind = import_module("matplotlib.figure").Figure
    except ImportError:
        raise UsageError(f"result.plot() needs matplotlib; {INSTALL}") from None

    def png(figure: Any) -> bytes:
        content = io.BytesIO()
        figure.savefig(content, format="png")
        return content.getvalue()

    return type(kind.__name__, (kind,), {"_repr_png_": png})


@dataclass(frozen=True)
class Result:
    """A finished run. `vector` is the model; `digest` is the hash of its bytes and of nothing else.

    The keys of `as_dict` are in the order of the fields.
    """

    scheme: str
    task: str
    workers: int
    updates: int  # changes of the centre: global steps
    gradients: int  # all that workers have computed
    dropped: int = field(default=0, kw_only=True)  # gradients that came too late and were not used
    samples: int  # of all gradients
    epochs: float | None = field(default=None, kw_only=True)  # samples / training samples; None: they have no length
    virtual_seconds: float | None  # None where time was real
    staleness: Staleness
    metrics: dict[str, float]  # of the final parameters on the test data: `loss`, and what the task gives
    vector: Vector = field(repr=False)  # the final parameters
    seed: int = 0
    batch: int = 0  # samples per gradient
    hyper: dict[str, Any] = field(default_factory=dict, repr=False)  # hyper-parameters of the scheme
    history: Evaluations = field(default_factory=Evaluations, repr=False)  # evaluations during the run, oldest first
    warnings: list[str] = field(default_factory=list, repr=False)  # stability limits that the values cross, …
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
    directory: str | None = field(default=None, metadata=_REAL)  # the run directory
    fingerprint: str | None = field(default=None, metadata=_REAL)  # hash of what determined the result
    batched: bool = False  # of simulations: gradients in flight were computed at once; bits differ by rounding
    device: str = "cpu"  # of simulations: where they computed
    profile: Profile | None = field(default=None, repr=False)  # with profile=True
    compress: str = ""  # the compressor of what workers sent, with its options
    traffic: dict[str, list[int]] | None = None  # bytes of each worker: sent, received, and sent if not compressed
    fates: dict[str, int] | None = None  # of simulations with faults: number of gradients used, dropped, lost, …

    def __post_init__(self) -> None:
        if not isinstance(self.history, Evaluations):  # a plain list is taken too
            object.__setattr__(self, "history", Evaluations(self.history))

    @property
    def loss(self) -> float:
        """The loss of the final parameters on the test data."""
        return self.metrics.get("loss", math.nan)

    @property
    def digest(self) -> str:
        """SHA-256 of the bytes of the final vector: equal digests mean equal bits."""
        return digest(self.vector)

    @property
    def final(self) -> list[float] | None:
        """The vector itself, when it is short."""
        return self.vector.tolist() if self.vector.numel() <= SHORT else None

    def rows(self) -> Iterator[tuple[str, str]]:
        """What a table of the result shows: names and values as text."""
        exact = "" if self.micro is None else f" (exact, micro {self.micro})"
        yield "workers", f"{self.workers}{exact}"
        if self.servers:
            yield "servers", str(self.servers)
        yield "samples", f"{self.samples:,}"
        if self.epochs is not None:
            yield "epochs", f"{self.epochs:,.2f}"
        for name, value in self.metrics.items():
            yield name, f"{value:.2%}" if name == "accuracy" else f"{value:.6g}"
        yield "updates of the centre", f"{self.updates:,}"
        yield "gradients", f"{self.gradients:,}" + (f" ({self.dropped:,} came too late)" if self.dropped else "")
        if self.batched:
            yield "gradients in flight", "computed at once"
        if self.device != "cpu":
            yield "device", self.device
        if self.virtual_seconds is not None:
            yield "virtual time", f"{self.virtual_seconds:,.6g} s"
        real = (
            ("wall time", "{:,.2f} s", self.wall_seconds),
            ("samples per second", "{:,.0f}", self.samples_per_second),
            ("time to first step", "{:,.2f} s", self.time_to_first_step),
            ("restarts", "{:,}", self.restarts),
            ("updates rolled back", "{:,}", self.rolled_back_updates),
            ("updates lost at the end", "{:,}", self.lost_updates or None),
            ("memory of the largest process", "{:,.0f} MB", self.peak_rss_mb),
        )
        yield from ((name, form.format(value)) for name, form, value in real if value is not None)
        if self.compress:
            yield "compressor", self.compress
        if self.traffic is not None and any(self.traffic["sent"]):
            yield "sent by a worker, on average", _sent(self.traffic)
        yield "staleness mean / max", f"{self.staleness.mean:.2f} / {self.staleness.max}"
        if self.final is not None:
            yield "final vector", " ".join(f"{value:.6g}" for value in self.final)
        yield "digest", self.digest[:16] + "…"
        if self.fingerprint is not None:
            yield "fingerprint", self.fingerprint[:16] + "…"
        if self.directory is not None:
            yield "directory", self.directory

    def _repr_html_(self) -> str:
        """A table, which notebooks show."""
        lines = [
            f"<tr><th style='text-align:left'>{escape(name)}</th><td>{escape(text)}</td></tr>"
            for name, text in self.rows()
        ]
        notes = [f"stopped: {self.stopped}"] * bool(self.stopped) + [f"warning: {text}" for text in self.warnings]
        told = "".join(f"<div>{escape(text)}</div>" for text in notes)
        profile = "" if self.profile is None else self.profile._repr_html_()
        title = escape(f"{self.scheme} on {self.task}")
        return f"<table><caption>{title}</caption>{''.join(lines)}</table>{profile}{told}"

    def plot(self, *metrics: str, over: Literal["updates", "seconds"] = "updates") -> Any:
        """A matplotlib figure of the evaluations during the run: all metrics, or those that are named."""
        by_name = {name: [p for p in self.history if p.metrics.get(name) is not None] for name in self.history.names()}
        for name in metrics:
            if name not in by_name:
                raise UnknownName("metric in the history", name, by_name)
        shown = metrics or tuple(by_name)
        if not shown:
            raise UsageError("the run has no evaluations to draw: give every=UPDATES, or an evaluator")
        figure = _figure()(figsize=(6.4, 1.0 + 2.2 * len(shown)), layout="constrained")
        figure.suptitle(f"{self.scheme} on {self.task}, {self.workers} workers")
        panels = figure.subplots(len(shown), sharex=True, squeeze=False)[:, 0]
        for panel, name in zip(panels, shown, strict=True):
            points = sorted((p.update if over == "updates" else p.seconds, p.metrics[name]) for p in by_name[name])
            panel.plot(*zip(*points, strict=True), marker="." if len(points) < 100 else None)
            panel.set_ylabel(name)
            panel.grid(alpha=0.3)
        time = "seconds" if self.virtual_seconds is None else "virtual seconds"
        panels[-1].set_xlabel("updates of the centre" if over == "updates" else time)
        return figure

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON; numbers that JSON cannot write (NaN, infinity) become None."""
        real, faulty = self.wall_seconds is not None, self.fates is not None
        shown = {"micro": self.micro is not None, "fates": faulty, "profile": self.profile is not None}
        shown |= {"compress": bool(self.compress), "traffic": self.traffic is not None}
        shown |= {"batched": self.batched, "device": self.device != "cpu"}
        shown |= dict.fromkeys(("servers", "rolled_back_updates"), real or faulty)
        plain: dict[str, Any] = {}
        for name in (one.name for one in fields(self) if shown.get(one.name, real or not one.metadata)):
            match name:
                case "staleness":
                    histogram = {str(k): n for k, n in self.staleness.histogram.items()}
                    plain[name] = {"mean": self.staleness.mean, "max": self.staleness.max, "histogram": histogram}
                case "history":
                    plain[name] = [point.as_dict() for point in self.history]
                case "profile":
                    plain[name] = asdict(self.profile) if self.profile is not None else None
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
        if told.get("profile") is not None:
            told["profile"] = Profile(**told["profile"])
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


def _sent(traffic: dict[str, list[int]]) -> str:
    """Bytes in words: 1.2 MB, and how much smaller compression has made them."""
    sent, whole = sum(traffic["sent"]), sum(traffic["uncompressed"])
    ratio = f" (1/{whole / sent:.3g} of {size_text(whole / len(traffic['sent']))})" if whole != sent else ""
    return size_text(sent / len(traffic["sent"])) + ratio


def size_text(count: float) -> str:
    """A number of bytes with its unit."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
