"""Draws docs/pace.svg, the picture of the README: accuracy over virtual time under four schemes, one worker slow.

Every curve is a run of the simulator on scikit-learn's digits; the same seed draws the same picture.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import paceline

SPEEDS = (1.0, 1.0, 1.0, 0.2)  # the last worker is a straggler
SECONDS = 200.0
RUNS: dict[str, tuple[str, dict[str, Any], str]] = {
    "sync: wait for all": ("sync", {"lr": 0.2}, "#D55E00"),
    "sync aggregate=3: the first three of four": ("sync", {"lr": 0.2, "aggregate": 3}, "#CC79A7"),
    "aeasgd: elastic averaging": ("aeasgd", {}, "#009E73"),
    "async: nobody waits": ("async", {"lr": 0.05}, "#0072B2"),
}
WIDTH, HEIGHT, LEFT, TOP, BOTTOM, RIGHT = 760, 330, 60, 20, 50, 20


def curve(scheme: str, hyper: dict[str, Any]) -> list[tuple[float, float]]:
    """Points of (virtual seconds, accuracy)."""
    result = paceline.simulate(
        "digits-mlp", scheme, workers=4, steps=800, speeds=SPEEDS, compute="exponential:1.0", every=1, **hyper
    )
    points = [(point.seconds, point.metrics["accuracy"]) for point in result.history]
    return [(seconds, accuracy) for seconds, accuracy in points if seconds <= SECONDS]


def across(seconds: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * seconds / SECONDS


def down(accuracy: float) -> float:
    return TOP + (HEIGHT - TOP - BOTTOM) * (1 - accuracy)


def text(x: float, y: float, words: str, anchor: str = "start", colour: str = "#444") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}" fill="{colour}">{words}</text>'


def main() -> None:
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="13">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for percent in (0, 25, 50, 75, 100):
        y = down(percent / 100)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(text(LEFT - 8, y + 4, f"{percent} %", "end"))
    ticks = range(0, int(SECONDS) + 1, 25)
    parts += [text(across(tick), HEIGHT - BOTTOM + 20, str(tick), "middle") for tick in ticks]
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(
        text(middle, HEIGHT - 10, "virtual seconds (a gradient takes 1 on average, 5 on the slow worker)", "middle")
    )
    for number, (title, (scheme, hyper, colour)) in enumerate(RUNS.items()):
        points = " ".join(f"{across(s):.1f},{down(a):.1f}" for s, a in curve(scheme, hyper))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        y = down(0.33) + 22 * number
        parts.append(f'<line x1="420" x2="445" y1="{y - 4:.0f}" y2="{y - 4:.0f}" stroke="{colour}" stroke-width="3"/>')
        parts.append(text(452, y, title))
    parts.append("</svg>")
    target = Path(__file__).resolve().parents[1] / "docs" / "pace.svg"
    target.write_text("\n".join(parts) + "\n", encoding="utf-8")
    print(f"wrote {target.name}")


if __name__ == "__main__":
    main()
