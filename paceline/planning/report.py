"""Writes the report of a plan: figures, tables and one page that needs no network."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, replace
from html import escape
from pathlib import Path

import paceline
from paceline.experiments import styles
from paceline.experiments.page import STYLE, Picture
from paceline.fields import finite
from paceline.planning.figures import figures
from paceline.planning.plan_cells import Forecast, PlanCell
from paceline.planning.prose import time_text, worth
from paceline.planning.spelling import count_text, network_text
from paceline.runs.atomic_files import write_bytes

PAGE = "report.html"
COLUMNS = [one.name for one in fields(PlanCell)]
Table = tuple[Sequence[str], Sequence[Sequence[str]]]


def written(directory: Path, found: Forecast) -> Forecast:
    """Write all files, and tell the plan where they are."""
    folder = directory / "figures"
    folder.mkdir(parents=True, exist_ok=True)
    pictures, names = [], []
    with styles.settings():
        for number, (name, heading, figure, caption) in enumerate(figures(found)):
            for suffix, content in (("png", styles.png(figure)), ("svg", styles.svg(figure).encode())):
                write_bytes(folder / f"{name}.{suffix}", content, durable=False)
                names.append(str(folder / f"{name}.{suffix}"))
            text = styles.inline(styles.svg(figure, background="none"), f"f{number}", heading)
            pictures.append(Picture(heading, text, caption))
    tables = {
        "forecast.csv": _csv(COLUMNS, [[getattr(one, key) for key in COLUMNS] for one in found.cells]),
        "assumptions.csv": _csv(
            ["assumption", "throughput", "first", "flips"],
            [[one.name, one.change, one.best, one.flips] for one in found.variations],
        ),
        "check.csv": _csv(
            ["scheme", "workers", "forecast", "measured", "error"],
            [[one.scheme, one.workers, one.forecast, one.measured, one.error] for one in found.checked],
        ),
    }
    full = [name for name, text in tables.items() if text.count("\n") > 1]
    for name in full:
        write_bytes(directory / name, tables[name].encode(), durable=False)
    done = replace(
        found,
        directory=str(directory),
        page=str(directory / PAGE),
        figures=names,
        tables=[str(directory / name) for name in full],
    )
    write_bytes(directory / PAGE, "\n".join(_page(done, pictures, full)).encode(), durable=False)
    write_bytes(directory / "plan.json", json.dumps(finite(done.as_dict()), indent=1).encode(), durable=False)
    return done


def throughput_rows(found: Forecast) -> Table:
    """Samples per second: a row for each scheme, a column for each number of workers."""
    rows = []
    for label in found.schemes:
        row = [label]
        for size in found.sizes:
            cell = found.cell(label, size)
            row.append(count_text(cell.rate) + ("" if worth(cell) else "·"))
        rows.append(row)
    rows.append(["ideal", *(count_text(found.ideal * size) for size in found.sizes)])
    return ["scheme", *map(str, found.sizes)], rows


def end_rows(found: Forecast) -> Table:
    """At the largest number of workers: share of the ideal, time, cost, what bounds a scheme; and up to how many
    workers it has half of the ideal."""
    last = found.sizes[-1]
    priced = bool(found.price)
    rows = []
    for limit in found.limits:
        cell = found.cell(limit.scheme, last)
        row = [limit.scheme, f"{cell.efficiency:.0%}", "none" if limit.workers is None else str(limit.workers)]
        row.append(time_text(cell))
        row += ["—" if cell.cost is None else f"{cell.cost:,.2f}"] if priced else []
        row.append(", ".join(limit.obstacles) or "nothing")
        rows.append(row)
    heads = ["scheme", f"at {last}", "half up to", "time"]
    return [*heads, *(["cost"] if priced else []), "bound by"], rows


def end_caption(found: Forecast) -> str:
    goal = f"to {found.needed.goal}" if found.needed is not None else f"for {found.samples:,.0f} samples"
    return (
        f"at {found.sizes[-1]}: share of the ideal; half up to: workers with at least half of the ideal; time {goal} "
        f"and bound by: with {found.sizes[-1]} workers"
    )


def check_rows(found: Forecast) -> Table:
    heads = ["scheme", "workers", "forecast", "measured", "error"]
    return heads, [
        [one.scheme, str(one.workers), f"{one.forecast:,.0f}", f"{one.measured:,.0f}", f"{one.error:+.0%}"]
        for one in found.checked
    ]


def variation_rows(found: Forecast) -> Table:
    heads = ["assumption", "throughput", "first"]
    return heads, [
        [one.name, f"{one.change - 1:+.0%}", one.best + (" (another)" if one.flips else "")] for one in found.variations
    ]


def _page(found: Forecast, pictures: Sequence[Picture], files: Sequence[str]) -> Iterator[str]:
    title = f"How {found.task} scales to {found.sizes[-1]} workers"
    yield '<!doctype html><html lang="en"><head><meta charset="utf-8">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"<title>{escape(title)}</title><style>{STYLE}</style></head><body><main>"
    yield f"<h1>{escape(title)}</h1>"
    network = escape(network_text(found.given.network))
    yield f'<p class="soft">A forecast: measured on one machine, simulated for nodes with {network}</p>'
    yield '<section class="found"><h2 style="margin-top:0.6rem">What it says</h2>'
    yield from (f"<p>{escape(text)}</p>" for text in found.words)
    yield "</section>"
    yield "<h2>Samples per second</h2>"
    yield from _table(throughput_rows(found))
    yield '<p class="soft">· less than half of the ideal</p>'
    yield f"<h2>With {found.sizes[-1]} workers</h2>"
    yield from _table(end_rows(found))
    yield f'<p class="soft">{escape(end_caption(found))}</p>'
    for one in pictures:
        yield f"<h2>{escape(one.heading)}</h2>"
        yield f'<div class="wide"><figure>{one.svg}</figure></div><p class="soft">{escape(one.caption)}</p>'
    if found.variations:
        yield "<h2>Assumptions, one by one</h2>"
        yield from _table(variation_rows(found))
    if found.checked:
        yield "<h2>The forecast beside real runs here</h2>"
        yield from _table(check_rows(found))
    yield from (f'<p class="soft">{escape(note)}</p>' for note in found.notes)
    links = ", ".join(f'<a href="{escape(name)}">{escape(name)}</a>' for name in files)
    yield f"<footer><p>Numbers: {links}. Figures as PNG and SVG: figures/.</p>"
    yield f"<p>paceline {escape(paceline.__version__)}</p></footer></main></body></html>"


def _table(table: Table) -> Iterator[str]:
    heads, rows = table
    yield '<div class="wide"><table><thead><tr>'
    yield from (f"<th>{escape(name)}</th>" for name in heads)
    yield "</tr></thead><tbody>"
    for row in rows:
        yield "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>"
    yield "</tbody></table></div>"


def _csv(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(heads)
    writer.writerows(rows)
    return stream.getvalue()
