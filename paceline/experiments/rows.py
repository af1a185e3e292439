"""The table of a comparison as texts: what the terminal, the page and a CSV file show."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from paceline.experiments.length import rising
from paceline.experiments.statistics import Estimate, estimate
from paceline.experiments.summary import ArmSummary, Findings
from paceline.result import size_text

HEADINGS = ("scheme", "lr", "metric", "time", "to target", "sent", "staleness")


def headings(found: Findings) -> tuple[str, ...]:
    """The columns as people read them."""
    goal = "to target" if found.goal is None else f"to {found.goal}"
    return ("scheme", "lr", metric_heading(found.metric), found.unit, goal, "sent per worker", "mean staleness")


def metric_heading(metric: str) -> str:
    """The name of a metric, with the unit of its values in the table."""
    return f"{metric} %" if rising(metric) else metric


def rows_of(found: Findings) -> Iterator[tuple[str, ...]]:
    """A row for each arm: the best first, those without an end last."""
    for one in [*found.ranked, *(arm for arm in found.arms if not arm.whole)]:
        end = one.trouble or metric_text(found.metric, one.final(found.metric)).removesuffix(" %")
        yield (
            one.label,
            rate_text(one),
            end,
            spread_text(estimate(one.seconds)),
            goal_text(found.times_to_goal(one)),
            size_text(estimate(one.bytes_per_worker).mean) if one.bytes_per_worker else "",
            "" if math.isnan(one.mean_staleness) else f"{one.mean_staleness:.2f}",
        )


def rate_text(one: ArmSummary) -> str:
    """The learning rate of the runs."""
    hyper = next((run.hyper for run in one.outcomes if run.hyper), dict(one.arm.hyper))
    value = hyper.get("lr", "")
    return f"{value:g}" if isinstance(value, int | float) else str(value)


def metric_text(metric: str, value: Estimate) -> str:
    """A mean with its interval: 95.1 ± 0.3 %."""
    if rising(metric):
        half = "" if math.isnan(value.half) else f" ± {100 * value.half:.2f}"
        return f"{100 * value.mean:.2f}{half} %"
    return spread_text(value)


def spread_text(value: Estimate) -> str:
    """A mean with its interval, with as many digits as the interval leaves certain."""
    if not value.count or math.isnan(value.mean):
        return ""
    if math.isnan(value.half):
        return f"{value.mean:,.4g}"
    if value.half == 0:
        return f"{value.mean:,.4g} ± 0"
    digits = max(0, 1 - math.floor(math.log10(value.half)))
    return f"{value.mean:,.{digits}f} ± {value.half:,.{digits}f}" if digits < 8 else f"{value.mean:,.4g}"


def goal_text(times: Sequence[float | None]) -> str:
    """The time to a target over seeds, or how many seeds have reached it."""
    reached = [one for one in times if one is not None]
    if len(reached) == len(times):
        return spread_text(estimate(reached)) if times else ""
    return f"{len(reached)} of {len(times)} seeds" if reached else "not reached"
