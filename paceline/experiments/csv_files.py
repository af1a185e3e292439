"""The numbers of a comparison as CSV files."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from paceline.experiments.rows import rate_text
from paceline.experiments.statistics import Estimate, estimate
from paceline.experiments.summary import Findings
from paceline.runs.atomic_files import write_bytes


def write_tables(directory: Path, found: Findings) -> list[str]:
    """Write every table; gives the names of the files."""
    tables = {
        "summary.csv": _summary(found),
        "curves.csv": _curves(found),
        "runs.csv": _runs(found),
        "staleness.csv": _staleness(found),
        "tests.csv": _tests(found),
        "who-waits.csv": _activity(found),
    }
    if found.swept:
        tables["sweep.csv"] = _sweep(found)
    for name, rows in tables.items():
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([_cell(one) for one in row] for row in rows)
        write_bytes(directory / name, text.getvalue().encode(), durable=False)
    return list(tables)


def _cell(value: Any) -> Any:
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.8g}"
    return "" if value is None else value


def _both(value: Estimate) -> tuple[float, float]:
    return value.mean, value.half


def _summary(found: Findings) -> Iterator[Sequence[Any]]:
    metrics = found.metrics
    head = [column for name in metrics for column in (name, f"{name}_half_interval")]
    yield (
        *("scheme", "workers", "lr", "seeds", "finished", *head, "seconds", "seconds_half_interval"),
        *("seconds_to_target", "seconds_to_target_half_interval", "bytes_sent_per_worker", "staleness_mean", "trouble"),
    )
    for one in found.arms:
        times = found.times_to_goal(one)
        reached = estimate([t for t in times if t is not None] if None not in times else [])
        values = [number for name in metrics for number in _both(one.final(name))]
        yield (
            *(one.label, one.arm.workers, rate_text(one), len(one.outcomes), len(one.finished), *values),
            *_both(estimate(one.seconds)),
            *_both(reached),
            *(estimate(one.bytes_per_worker).mean, one.mean_staleness, one.trouble),
        )


def _curves(found: Findings) -> Iterator[Sequence[Any]]:
    """Every evaluation of every run."""
    yield ("scheme", "seed", "update", "samples", "seconds", *found.metrics)
    for one in found.arms:
        for seed, outcome in zip(one.seeds, one.outcomes, strict=True):
            for point in outcome.moments:
                values = [point.metrics.get(name) for name in found.metrics]
                yield (one.label, seed, point.update, point.samples, point.seconds, *values)


def _runs(found: Findings) -> Iterator[Sequence[Any]]:
    yield (
        *("scheme", "workers", "seed", "status", "updates", "gradients", "samples", "seconds"),
        *("bytes_sent", *found.metrics, "reason", "hyper"),
    )
    for one in found.arms:
        for seed, run in zip(one.seeds, one.outcomes, strict=True):
            hyper = " ".join(f"{key}={value}" for key, value in run.hyper.items() if value is not None)
            values = [run.final.get(name) for name in found.metrics]
            yield (
                *(one.label, one.arm.workers, seed, run.status, run.updates, run.gradients, run.samples, run.seconds),
                *(run.bytes_sent, *values, run.reason, hyper),
            )


def _staleness(found: Findings) -> Iterator[Sequence[Any]]:
    yield ("scheme", "staleness", "gradients", "share", "expected", "law")
    for one in found.arms:
        total = sum(one.staleness.values())
        expected = {} if one.theory is None else one.theory.probabilities
        law = "" if one.theory is None else one.theory.name
        for tau in sorted({*one.staleness, *expected}):
            count = one.staleness.get(tau, 0)
            yield (one.label, tau, count, count / total if total else None, expected.get(tau), law)


def _activity(found: Findings) -> Iterator[Sequence[Any]]:
    yield ("scheme", "seed", "worker", "does", "from", "to")
    for one in found.arms:
        for seed, outcome in zip(one.seeds, one.outcomes, strict=True):
            for span in outcome.activity.spans if outcome.activity is not None else ():
                yield (one.label, seed, *span)


def _tests(found: Findings) -> Iterable[Sequence[Any]]:
    yield ("quantity", "first", "second", "difference", "p", "p_corrected", "significant")
    families = {found.metric: found.metric_tests, "seconds": found.time_tests, "seconds_to_target": found.goal_tests}
    for name, tests in families.items():
        for one in tests:
            significant = "yes" if one.significant else "no"
            yield (name, one.first, one.second, one.difference, one.p, one.corrected, significant)


def _sweep(found: Findings) -> Iterator[Sequence[Any]]:
    yield ("scheme", *found.swept, *found.metrics, "chosen")
    for one in found.arms:
        for trial in [] if one.tuned is None else one.tuned.trials:
            values = [trial.values.get(key) for key in found.swept]
            metrics = [(trial.metrics or {}).get(name) for name in found.metrics]
            assert one.tuned is not None
            yield (one.label, *values, *metrics, "yes" if trial.values == one.tuned.chosen else "")
