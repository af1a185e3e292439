"""The figure of who computes and who waits: a panel for each arm, a row for each worker."""

from __future__ import annotations

import math

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from paceline.experiments.activity import COMPUTES, MESSAGES, OTHER, WAITS, ActivityExcerpt
from paceline.experiments.curve_figures import shortened
from paceline.experiments.styles import FAINT
from paceline.experiments.summary import Findings

COLOURS = {COMPUTES: "#0072B2", WAITS: "#E69F00", MESSAGES: "#009E73", OTHER: FAINT}
WORDS = {COMPUTES: "computes a gradient", WAITS: "waits for others", MESSAGES: "sends and receives", OTHER: "other"}
LONG = 12  # gradients of average length that a panel shows


def activity(found: Findings) -> Figure | None:
    """The same span of time for every arm."""
    known: dict[str, ActivityExcerpt] = {}
    for arm in found.arms:
        shown = next((run.activity for run in arm.finished if run.activity is not None), None)
        if shown is not None:
            known[arm.label] = shown
    if not known:
        return None
    end = min(*(one.end for one in known.values()), LONG * max(one.mean for one in known.values()))
    rows = math.ceil(len(known) / 2)
    workers = max(1 + max(rank for rank, *_ in one.spans) for one in known.values())
    figure = Figure(figsize=(12.4, 0.8 + rows * (0.65 + 0.14 * workers)), layout="constrained")
    panels = figure.subplots(rows, 2 if len(known) > 1 else 1, sharex=True, squeeze=False)
    for panel in panels.flat[len(known) :]:
        panel.set_axis_off()
    used: set[str] = set()
    for panel, (label, one) in zip(panels.flat, known.items(), strict=False):
        for rank, kind, a, b in one.until(end):
            gap = min(0.002 * end, 0.2 * (b - a))  # between two gradients
            panel.broken_barh([(a, b - a - gap)], (rank - 0.4, 0.8), facecolors=COLOURS[kind], linewidth=0)
            used.add(kind)
        shares = one.shares(end)
        told = [f"{kind} {shares[kind]:.0%}" for kind in (COMPUTES, WAITS, MESSAGES) if shares.get(kind, 0) >= 0.005]
        last = panel in panels[-1] or panel is panels.flat[len(known) - 2]  # nothing is below it
        panel.tick_params(axis="x", labelbottom=last)
        panel.xaxis.set_major_formatter(shortened)
        panel.set_title(f"{label}: {', '.join(told)}")
        several = 1 + max(rank for rank, *_ in one.spans)
        panel.set_ylim(several - 0.5, -0.5)
        panel.set_yticks(sorted({0, several - 1}))
        panel.set_xlim(0, end)
    figure.supxlabel(f"{found.unit}{' since a moment in the middle of the run' if found.real else ''}", fontsize=9.5)
    figure.supylabel("worker", fontsize=9.5)
    kinds = [kind for kind in WORDS if kind in used]
    handles = [Rectangle((0, 0), 1, 1, color=COLOURS[kind]) for kind in kinds]
    figure.legend(handles, [WORDS[kind] for kind in kinds], loc="outside upper center", ncols=len(kinds))
    return figure
