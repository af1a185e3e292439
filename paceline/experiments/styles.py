"""How figures look: colours that the colour-blind can tell apart, with a dash and a marker for each arm as well."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

# Okabe and Ito's, without yellow, which is hard to see on white, and black, which is that of text
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8a8a8a")
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)), (0, (3, 1, 1, 1, 1, 1)))
MARKERS = "osD^vPX<>ph*"
INK = "#1f2328"  # of text and axes; a page replaces it by its own colour
FAINT = "#9aa0a6"

SETTINGS: dict[str, Any] = {
    "svg.hashsalt": "paceline",  # equal figures are equal files
    "svg.fonttype": "path",
    "font.size": 9.5,
    "axes.titlesize": 10.5,
    "axes.labelsize": 9.5,
    "legend.fontsize": 9,
    "text.color": INK,
    "axes.facecolor": "none",  # the page shows through, light or dark
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.8,
    "legend.frameon": False,
}


@dataclass(frozen=True)
class LineStyle:
    """Of one arm, the same in all figures."""

    colour: str
    dash: Any
    marker: str

    def of_line(self, points: int) -> dict[str, Any]:
        return {
            "color": self.colour,
            "linestyle": self.dash,
            "marker": self.marker,
            "markevery": max(1, points // 6),
            "markersize": 5,
            "linewidth": 1.6,
        }


def styles(labels: Sequence[str]) -> dict[str, LineStyle]:
    """A style for each label: colours repeat after seven, with another dash; markers after twelve."""
    return {
        label: LineStyle(
            COLOURS[k % len(COLOURS)],
            DASHES[(k % 2 + 2 * (k // len(COLOURS))) % len(DASHES)],
            MARKERS[k % len(MARKERS)],
        )
        for k, label in enumerate(labels)
    }


def settings() -> Any:
    """A context with the settings of all figures; those of the user's own matplotlib do not change them."""
    defaults: Any = {**mpl.rcParamsDefault, "backend": mpl.rcParams["backend"]}
    return mpl.rc_context(defaults | SETTINGS)


def png(figure: Figure) -> bytes:
    content = io.BytesIO()
    with settings():
        figure.savefig(content, format="png", dpi=130, facecolor="white", metadata={"Software": None})
    return content.getvalue()


def svg(figure: Figure, *, background: str = "white") -> str:
    content = io.BytesIO()
    with settings():
        figure.savefig(content, format="svg", facecolor=background, metadata={"Date": None, "Creator": None})
    return content.getvalue().decode()


def inline(text: str, prefix: str, title: str) -> str:
    """An SVG file as part of a page: with the page's colour for text, and names that no other figure has."""
    text = text[text.index("<svg") :]
    text = re.sub(r'\bid="', f'id="{prefix}-', text)
    text = re.sub(r'(xlink:href="#|url\(#)', rf"\1{prefix}-", text)
    text = text.replace(INK, "currentColor")
    text = re.sub(r'<svg ([^>]*?)width="[^"]*" height="[^"]*"', r"<svg \1", text, count=1)
    text = re.sub(r'height="[\d.]+pt" ', "", text, count=1)
    text = re.sub(r' width="[\d.]+pt"', "", text, count=1)
    return text.replace("<svg ", f'<svg role="img" aria-label="{title}" ', 1)
