"""Figures of ends: the final metric, the time and the bytes of each arm, the tests of all pairs, and the sweep."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from paceline.experiments.curve_figures import shortened, shown_name
from paceline.experiments.length import rising
from paceline.experiments.rows import goal_text
from paceline.experiments.statistics import Estimate, estimate
from paceline.experiments.styles import FAINT, INK, LineStyle
from paceline.experiments.summary import ArmSummary, Findings

BETTER, WORSE = "#0072B2", "#E69F00"
ON = {BETTER: "white", WORSE: "#1f1f1f"}  # text that can be read there, on a light and on a dark page


def ends(found: Findings, looks: dict[str, LineStyle]) -> Figure:
    """A row for each arm, the best on top: metric, time, time to the target and bytes, with intervals."""
    arms = found.ranked
    columns = list(_columns(found))
    figure = Figure(figsize=(12.4, 1.2 + 0.34 * max(len(arms), 2)), layout="constrained")
    panels = figure.subplots(1, len(columns), sharey=True, squeeze=False)[0]
    for panel, (title, value) in zip(panels, columns, strict=True):
        for row, one in enumerate(arms):
            found_value, look = value(one), looks[one.label]
            if not found_value.count:
                text = goal_text(found.times_to_goal(one))
                panel.text(0.03, row, text, va="center", color=FAINT, transform=panel.get_yaxis_transform())
                continue
            half = 0.0 if math.isnan(found_value.half) else found_value.half
            panel.errorbar(
                found_value.mean,
                row,
                xerr=half,
                fmt=look.marker,
                color=look.colour,
                markersize=6,
                capsize=3,
                linewidth=1.5,
            )
        panel.set_title(title)
        panel.grid(axis="x", alpha=0.25, linewidth=0.6)
        panel.xaxis.set_major_formatter(shortened)
        panel.margins(x=0.12)
        panel.set_xlim(left=min(0.0, panel.get_xlim()[0]))
        panel.locator_params(axis="x", nbins=4)
    panels[0].set_yticks(range(len(arms)), [one.label for one in arms])
    panels[0].set_ylim(len(arms) - 0.5, -0.5)
    return figure


def _columns(found: Findings) -> list[tuple[str, Callable[[ArmSummary], Estimate]]]:
    metric = found.metric

    def final(one: ArmSummary) -> Estimate:
        value = one.final(metric)
        return Estimate(1 - value.mean, value.half, value.count) if rising(metric) else value

    def to_goal(one: ArmSummary) -> Estimate:
        times = found.times_to_goal(one)
        return estimate([t for t in times if t is not None] if None not in times else [])

    def sent(one: ArmSummary) -> Estimate:
        return estimate([value / 1e6 for value in one.bytes_per_worker])

    columns: list[tuple[str, Callable[[ArmSummary], Estimate]]] = [(f"final {shown_name(metric)}", final)]
    if found.length.seconds is None:
        columns.append((f"{found.unit} of a run", lambda one: estimate(one.seconds)))
    if found.goal is not None:
        columns.append((f"{found.unit} to {found.goal}", to_goal))
    if any(one.bytes_per_worker for one in found.ranked):
        columns.append(("MB sent per worker", sent))
    return columns


def pairs(found: Findings) -> Figure:
    """Which arm is significantly better than which, by what they are ranked by."""
    known = {label for test in found.main_tests for label in (test.first, test.second)}
    labels = [one.label for one in found.ranked if one.label in known]
    side = 1.9 + 0.42 * len(labels)
    figure = Figure(figsize=(side + 0.6, side + 0.6), layout="compressed")
    panel = figure.subplots()
    sign = 1 if rising(found.metric) and found.length.target is None else -1
    place = {label: k for k, label in enumerate(labels)}
    for test in found.main_tests:
        better = sign * test.difference > 0
        for row, column, good in ((test.first, test.second, better), (test.second, test.first, not better)):
            x, y = place[column], place[row]
            colour, sign_of = (BETTER, "+") if good else (WORSE, "−")
            if test.significant:
                panel.add_patch(Rectangle((x - 0.46, y - 0.46), 0.92, 0.92, color=colour, linewidth=0))
                panel.text(x, y, sign_of, ha="center", va="center", color=ON[colour], weight="bold", size=12)
            else:
                panel.add_patch(Rectangle((x - 0.46, y - 0.46), 0.92, 0.92, color=FAINT, alpha=0.25, linewidth=0))
                panel.text(x, y, "n.s.", ha="center", va="center", color=INK, size=8)
    panel.set_xticks(range(len(labels)), labels, rotation=50, ha="right", rotation_mode="anchor")
    panel.set_yticks(range(len(labels)), labels)
    panel.set_xlim(-0.5, len(labels) - 0.5)
    panel.set_ylim(len(labels) - 0.5, -0.5)
    panel.set_aspect("equal")
    panel.spines[:].set_visible(False)
    panel.tick_params(length=0)
    panel.set_ylabel("this scheme …")
    panel.set_xlabel("… against that one")
    words = ((BETTER, "+  better"), (WORSE, "−  worse"), ((*to_rgb(FAINT), 0.25), "n.s.  not significant"))
    handles = [Rectangle((0, 0), 1, 1, facecolor=colour, linewidth=0) for colour, _ in words]
    figure.legend(handles, [text for _, text in words], loc="outside upper center", ncols=3)
    return figure


def sweep(found: Findings, looks: dict[str, LineStyle]) -> Figure | None:
    """The metric against the swept value, if one hyper-parameter with numbers was swept."""
    if len(found.swept) != 1:
        return None
    ((key, options),) = found.swept.items()
    try:
        numbers = [float(one) for one in options]
    except ValueError:
        return None
    figure = Figure(figsize=(8.4, 4.2), layout="constrained")
    panel = figure.subplots()
    for one in found.arms:
        trials = [] if one.tuned is None else [t for t in one.tuned.trials if t.metrics is not None]
        points = sorted((float(t.values[key]), _left(found.metric, t.metrics or {})) for t in trials)
        if one.tuned is None or not points:
            continue
        look = looks[one.label]
        panel.plot(*zip(*points, strict=True), label=one.label, **look.of_line(1))
        best = float(one.tuned.chosen[key])
        panel.plot(best, dict(points)[best], "o", markersize=12, markerfacecolor="none", color=look.colour)
    if min(numbers) > 0:
        panel.set_xscale("log")
        panel.set_xticks(sorted(numbers), [f"{one:g}" for one in sorted(numbers)])
        panel.minorticks_off()
    panel.set_xlabel(f"{key} (a circle: chosen; missing: diverged)")
    panel.set_ylabel(f"{shown_name(found.metric)} after the budget")
    panel.grid(alpha=0.25, linewidth=0.6)
    figure.legend(loc="outside right upper", handlelength=4)
    return figure


def _left(metric: str, metrics: dict[str, float]) -> float:
    value = metrics.get(metric, math.nan)
    return 1 - value if rising(metric) else value


def staleness(found: Findings, looks: dict[str, LineStyle]) -> Figure | None:
    """The staleness of gradients under each asynchronous scheme, beside what theory expects."""
    arms = [one for one in found.arms if one.staleness and (len(one.staleness) > 1 or 0 not in one.staleness)]
    if not arms:
        return None
    columns = min(4, len(arms))
    rows = math.ceil(len(arms) / columns)
    figure = Figure(figsize=(12.4 if columns > 2 else 7.0, 0.7 + 2.3 * rows), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False)
    for panel in panels.flat[len(arms) :]:
        panel.set_axis_off()
    for panel, one in zip(panels.flat, arms, strict=False):
        _histogram(panel, one, looks[one.label])
    figure.supxlabel("staleness: updates of the centre between pull and push", fontsize=9.5)
    figure.supylabel("share of gradients", fontsize=9.5)
    return figure


def _histogram(panel: Any, one: ArmSummary, look: LineStyle) -> None:
    total = sum(one.staleness.values())
    shares = {tau: count / total for tau, count in one.staleness.items()}
    last = _last(shares)
    panel.bar(list(shares), list(shares.values()), width=0.9, color=look.colour, alpha=0.75, label="measured")
    theory = one.theory
    if theory is not None and theory.probabilities:
        known = {tau: p for tau, p in theory.probabilities.items() if tau <= last}
        mark = {"marker": "D"} if len(known) == 1 else {"marker": "."}
        panel.plot(list(known), list(known.values()), color=INK, linewidth=1.2, label=theory.name, **mark)
    elif theory is not None:
        panel.axvline(theory.mean, color=INK, linewidth=1.2, linestyle="--", label=theory.name)
    panel.set_title(f"{one.label}: mean {one.mean_staleness:.2f}")
    panel.set_xlim(-0.8, last + 0.8)
    panel.locator_params(axis="x", nbins=6, integer=True)
    panel.locator_params(axis="y", nbins=4)
    panel.grid(axis="y", alpha=0.25, linewidth=0.6)
    panel.legend(loc="upper right", handlelength=1.5)
    panel.set_ylim(top=panel.get_ylim()[1] * 1.3)


def _last(shares: dict[int, float]) -> int:
    """The staleness below which nearly all gradients are."""
    reached = 0.0
    for tau, share in shares.items():
        reached += share
        if reached >= 0.995:
            return max(tau, 3)
    return max(*shares, 3)
