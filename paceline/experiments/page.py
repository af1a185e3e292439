"""The report: one HTML page without scripts, which needs no network."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

import paceline
from paceline.experiments.prose import paragraphs
from paceline.experiments.rows import headings, rows_of
from paceline.experiments.summary import Findings

STYLE = """
:root { color-scheme: light dark; --paper: #ffffff; --ink: #1f2328; --soft: #59636e; --line: #d1d9e0; --card: #f6f8fa; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #16191d; --ink: #e6edf3; --soft: #9da7b1; --line: #3d444d; --card: #1f242a; }
}
body { background: var(--paper); color: var(--ink); font: 16px/1.55 system-ui, sans-serif; margin: 0; }
main { max-width: 1080px; margin: 0 auto; padding: 1.5rem 1.2rem 4rem; }
h1 { font-size: 1.7rem; margin: 0.5rem 0 0.2rem; }
h2 { font-size: 1.2rem; margin: 2.4rem 0 0.5rem; }
p.soft, figcaption, footer { color: var(--soft); font-size: 0.9rem; }
section.found { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 0.3rem 1.2rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 0.92rem; }
th, td { padding: 0.3rem 0.8rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th { font-weight: 600; white-space: normal; vertical-align: bottom; }
th:first-child, td:first-child { text-align: left; }
td:first-child { font-weight: 600; }
figure { margin: 0.5rem 0 0; }
figure svg { display: block; width: 100%; height: auto; min-width: 560px; }
figure.small svg { max-width: 640px; min-width: 0; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 0.15rem 1rem; font-size: 0.92rem; }
dt { color: var(--soft); } dd { margin: 0; }
"""


class Picture:
    """A figure on the page: its heading, the SVG text and a caption."""

    def __init__(self, heading: str, svg: str, caption: str, *, small: bool = False) -> None:
        self.heading, self.svg, self.caption, self.small = heading, svg, caption, small


def page(found: Findings, pictures: Sequence[Picture], files: Sequence[str]) -> str:
    return "\n".join(_lines(found, pictures, files))


def _lines(found: Findings, pictures: Sequence[Picture], files: Sequence[str]) -> Iterator[str]:
    title = f"{len(found.arms)} schemes on {found.task}" if len(found.arms) != 1 else f"One scheme on {found.task}"
    world = "real processes, wall time" if found.real else "simulator, virtual time"
    yield '<!doctype html><html lang="en"><head><meta charset="utf-8">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"<title>{escape(title)}</title><style>{STYLE}</style></head><body><main>"
    yield f"<h1>{escape(title)}</h1>"
    seeds = f"{len(found.seeds)} seeds" if len(found.seeds) != 1 else "1 seed"
    yield f'<p class="soft">{escape(found.length.text(not found.real))} per run · {seeds} · {world}</p>'
    yield '<section class="found"><h2 style="margin-top:0.6rem">What was found</h2>'
    yield from (f"<p>{escape(text)}</p>" for text in paragraphs(found))
    yield "</section>"
    yield "<h2>Table</h2>"
    yield from _table(found)
    for one in pictures:
        kind = ' class="small"' if one.small else ""
        yield f"<h2>{escape(one.heading)}</h2>"
        yield f'<div class="wide"><figure{kind}>{one.svg}</figure></div><p class="soft">{escape(one.caption)}</p>'
    yield "<h2>Settings</h2><dl>"
    yield from (f"<dt>{escape(key)}</dt><dd>{escape(value)}</dd>" for key, value in found.setting.items())
    yield "</dl>"
    yield from (f'<p class="soft">{escape(note)}</p>' for note in [*found.notes, *_warnings(found)])
    links = ", ".join(f'<a href="{escape(name)}">{escape(name)}</a>' for name in files)
    yield f"<footer><p>Numbers: {links}. Figures as PNG and SVG: figures/.</p>"
    yield f"<p>paceline {escape(paceline.__version__)}</p></footer></main></body></html>"


def _table(found: Findings) -> Iterator[str]:
    yield '<div class="wide"><table><thead><tr>'
    yield from (f"<th>{escape(name)}</th>" for name in headings(found))
    yield "</tr></thead><tbody>"
    for row in rows_of(found):
        yield "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>"
    yield "</tbody></table></div>"


def _warnings(found: Findings) -> Iterator[str]:
    """What the runs have warned of, once."""
    for one in found.arms:
        for text in dict.fromkeys(note for run in one.outcomes for note in run.notes):
            yield f"{one.label}: {text}"
