"""Figures of curves over seeds: all arms in one panel, and a panel for each arm."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatterSciNotation, LogLocator, MaxNLocator, NullFormatter

from paceline.experiments.length import rising
from paceline.experiments.styles import FAINT, LineStyle
from paceline.experiments.summary import Band, Findings

ERROR = "error (1 − accuracy)"
CROWDED = 6  # arms in one panel: the bands of more would hide the lines


def axis_names(found: Findings) -> dict[str, str]:
    return {"updates": "updates of the centre", "samples": "samples", "seconds": found.unit}


def shown_name(metric: str) -> str:
    """A metric of which more is better is drawn as what is left to gain."""
    return ERROR if metric == "accuracy" else metric


def drawn(band: Band | None, metric: str) -> Band | None:
    """The band as it is drawn: of accuracy the error."""
    if band is None or not rising(metric):
        return band
    return Band(band.x, 1 - band.mean, 1 - band.high, 1 - band.low)


def against_all(found: Findings, metric: str, looks: dict[str, LineStyle]) -> Figure:
    """A metric against updates, samples and time, all arms in each panel."""
    figure = Figure(figsize=(12.4, 4.6), layout="constrained")
    panels = figure.subplots(1, 3, sharey=True)
    names = axis_names(found)
    bands: list[Band] = []
    uneven = _uneven([run.updates for one in found.arms for run in one.finished])
    for panel, axis in zip(panels, names, strict=True):
        logarithmic = axis == "updates" and uneven
        for one in found.arms:
            band = drawn(one.band(metric, axis, logarithmic=logarithmic), metric)
            if band is None:
                continue
            bands.append(band)
            look = looks[one.label]
            if len(found.arms) <= CROWDED:
                panel.fill_between(band.x, band.low, band.high, color=look.colour, alpha=0.13, linewidth=0)
            panel.plot(band.x, band.mean, label=one.label, **look.of_line(len(band.x)))
        _dress(panel, names[axis])
        if logarithmic:
            panel.set_xscale("log")
            panel.autoscale(axis="x")
            panel.xaxis.set_major_locator(LogLocator(base=10, subs=(1.0, 3.0)))
            panel.xaxis.set_major_formatter(shortened)
            panel.xaxis.set_minor_formatter(NullFormatter())
    panels[0].set_ylabel(shown_name(metric))
    _scaled(panels[0], bands)
    handles, labels = panels[0].get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 6), handlelength=4)
    return figure


def one_by_one(found: Findings, metric: str, axis: str, looks: dict[str, LineStyle]) -> Figure:
    """A panel for each arm, with the curves of the others in grey."""
    bands = {one.label: drawn(one.band(metric, axis), metric) for one in found.arms}
    known = {label: band for label, band in bands.items() if band is not None}
    columns = min(5, max(len(known), 1))
    rows = max(1, math.ceil(len(known) / columns))
    figure = Figure(figsize=(12.4, 0.6 + 2.3 * rows), layout="constrained")
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for panel in panels.flat[len(known) :]:
        panel.set_axis_off()
    for panel, (label, band) in zip(panels.flat, known.items(), strict=False):
        for other, grey in known.items():
            if other != label:
                panel.plot(grey.x, grey.mean, color=FAINT, linewidth=0.7, alpha=0.55)
        look = looks[label]
        panel.fill_between(band.x, band.low, band.high, color=look.colour, alpha=0.25, linewidth=0)
        panel.plot(band.x, band.mean, **look.of_line(len(band.x)))
        panel.set_title(label)
        _dress(panel, "")
    _scaled(panels.flat[0], list(known.values()))
    figure.supxlabel(axis_names(found)[axis], fontsize=9.5)
    figure.supylabel(shown_name(metric), fontsize=9.5)
    return figure


def _dress(panel: Any, name: str) -> None:
    panel.set_xlabel(name)
    panel.grid(alpha=0.25, linewidth=0.6)
    panel.set_xlim(left=0)
    panel.xaxis.set_major_locator(MaxNLocator(4))
    panel.xaxis.set_major_formatter(shortened)


def shortened(value: float, _: Any = None) -> str:
    """200k in place of 200000."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"


def _uneven(ends: list[int]) -> bool:
    """Some curves would be too short to see."""
    return bool(ends) and max(ends) > 8 * max(min(ends), 1)


def _scaled(panel: Any, bands: list[Band]) -> None:
    """A logarithmic axis where all values allow it, and limits by the means: an interval may be wide, or below 0."""
    if not bands:
        return
    values = np.concatenate([band.mean for band in bands])
    low, high = float(values.min()), float(values.max())
    if low > 0 and high / low > 4:
        panel.set_yscale("log")
        panel.set_ylim(low / 1.25, high * 1.25)
        panel.yaxis.set_major_locator(LogLocator(base=10, subs=(1.0, 2.0, 5.0)))
        panel.yaxis.set_major_formatter(_plain)
        panel.yaxis.set_minor_formatter(NullFormatter())
    elif high > low:
        panel.set_ylim(low - 0.06 * (high - low), high + 0.06 * (high - low))


def _plain(value: float, _: Any = None) -> str:
    return f"{value:g}" if 1e-4 <= abs(value) < 1e5 else LogFormatterSciNotation()(value)
