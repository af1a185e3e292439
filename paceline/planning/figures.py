"""Figures of a plan: throughput, efficiency, time and cost against the number of workers, and the variations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator

from paceline.experiments.styles import FAINT, LineStyle, styles
from paceline.planning.plan_cells import ENOUGH, Forecast
from paceline.planning.spelling import count_text, seconds_text

TICKS = (1e-3, 1e-2, 0.1, 1, 10, 60, 600, 3600, 6 * 3600, 86400, 5 * 86400, 30 * 86400)  # seconds that people know


def figures(found: Forecast) -> Iterator[tuple[str, str, Figure, str]]:
    """Name of the file, heading, figure, caption."""
    looks = styles(found.schemes)
    yield (
        "throughput",
        "Throughput and efficiency",
        throughput_figure(found, looks),
        "Ideal: every worker computes gradients all the time. Below the dotted line half of that is lost.",
    )
    if any(one.seconds is not None for one in found.cells):
        goal = f"to {found.needed.goal}" if found.needed is not None else f"for {found.samples:,.0f} samples"
        bound = " Hollow marks are lower bounds: there the samples were not simulated." if found.needed else ""
        yield (
            "time",
            f"Time {'and cost ' if found.price else ''}{goal}",
            time_figure(found, looks),
            f"Both axes are logarithmic.{bound}",
        )
    if found.variations and (best := found.recommended) is not None:
        yield (
            "assumptions",
            "Which assumptions matter",
            variation_figure(found),
            f"Throughput of {best.scheme} on {best.workers} workers if one assumption changes.",
        )


def throughput_figure(found: Forecast, looks: dict[str, LineStyle]) -> Figure:
    figure = Figure(figsize=(12.4, 4.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    ideal = [found.ideal * size for size in found.sizes]
    left.plot(found.sizes, ideal, color=FAINT, linewidth=1.2, label="ideal")
    for label in found.schemes:
        own = [found.cell(label, size) for size in found.sizes]
        look = looks[label].of_line(len(own)) | {"markevery": 1}
        left.plot(found.sizes, [one.rate for one in own], label=label, **look)
        right.plot(found.sizes, [one.efficiency * 100 for one in own], **look)
    right.axhline(ENOUGH * 100, color=FAINT, linewidth=1.0, linestyle=":")
    left.set_ylabel("samples per second")
    left.set_yscale("log")
    left.yaxis.set_major_formatter(FuncFormatter(lambda value, _: count_text(value)))
    left.yaxis.set_minor_formatter(NullFormatter())
    right.set_ylabel("% of the ideal")
    right.set_ylim(0, max(105.0, *(one.efficiency * 102 for one in found.cells)))
    for panel in (left, right):
        _workers_axis(panel, found)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=7, handlelength=4)
    return figure


def time_figure(found: Forecast, looks: dict[str, LineStyle]) -> Figure:
    figure = Figure(figsize=(12.4 if found.price else 7.4, 4.6), layout="constrained")
    panels = figure.subplots(1, 2 if found.price else 1, squeeze=False)[0]
    for label in found.schemes:
        own = [one for size in found.sizes if (one := found.cell(label, size)).seconds is not None]
        for panel, name in zip(panels, ("seconds", "cost"), strict=False):
            line = {"color": looks[label].colour, "linestyle": looks[label].dash, "linewidth": 1.6}
            panel.plot([one.workers for one in own], [getattr(one, name) for one in own], label=label, **line)
            for one in own:
                filled = looks[label].colour if one.known == "simulated" else "white"
                panel.plot(
                    one.workers,
                    getattr(one, name),
                    marker=looks[label].marker,
                    markersize=5.5,
                    color=looks[label].colour,
                    markerfacecolor=filled,
                )
    panels[0].set_yscale("log")
    panels[0].set_ylabel("time")
    panels[0].yaxis.set_major_locator(FixedLocator(TICKS))
    panels[0].yaxis.set_major_formatter(FuncFormatter(lambda value, _: seconds_text(value)))
    panels[0].yaxis.set_minor_formatter(NullFormatter())
    if found.price:
        panels[1].set_yscale("log")
        panels[1].set_ylabel("cost")
        panels[1].yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        panels[1].yaxis.set_minor_formatter(NullFormatter())
    for panel in panels:
        _workers_axis(panel, found)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, handlelength=4)
    return figure


def variation_figure(found: Forecast) -> Figure:
    seen = sorted(found.variations, key=lambda one: abs(one.change - 1))
    figure = Figure(figsize=(9.2, 0.9 + 0.34 * len(seen)), layout="constrained")
    panel = figure.subplots()
    changes = [(one.change - 1) * 100 for one in seen]
    panel.barh(
        range(len(seen)), changes, color=["#D55E00" if value < 0 else "#0072B2" for value in changes], height=0.62
    )
    panel.set_yticks(range(len(seen)), [one.name for one in seen])
    span = max(5.0, *map(abs, changes))
    for place, (one, value) in enumerate(zip(seen, changes, strict=True)):
        told = f"{value:+.0f} %" + (f", {one.best} first" if one.flips else "")
        right = value >= 0
        away = span * (0.02 if right else -0.02)
        panel.text(value + away, place, told, va="center", ha="left" if right else "right", fontsize=8.5)
    panel.axvline(0, color=FAINT, linewidth=0.9)
    low, high = min(0.0, *changes), max(0.0, *changes)
    panel.set_xlim(low - span * 0.45, high + span * 0.45)
    panel.set_xlabel("change of the throughput in %")
    return figure


def _workers_axis(panel: Any, found: Forecast) -> None:
    panel.set_xscale("log", base=2)
    panel.set_xticks(list(found.sizes), [str(size) for size in found.sizes])
    panel.xaxis.set_minor_locator(NullLocator())
    panel.set_xlabel("workers")
    panel.grid(alpha=0.25, linewidth=0.6)
