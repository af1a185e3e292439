"""Writes the report of a comparison: figures, tables and the page."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from matplotlib.figure import Figure

from paceline.experiments import activity_figure, curve_figures, end_figures, styles
from paceline.experiments.comparison import Comparison
from paceline.experiments.csv_files import write_tables
from paceline.experiments.length import rising
from paceline.experiments.page import Picture, page
from paceline.experiments.summary import Findings
from paceline.runs.atomic_files import write_bytes

PAGE = "report.html"
BAND = "Lines are means over seeds, bands their 95 % confidence intervals."
NO_BAND = "Lines are means over seeds. Intervals of this many schemes would hide them; curves.csv has every seed."
GAPS = "in the middle of the run. In the gaps are the scheme's own code and hooks, or another process had the core."


def written(directory: Path, found: Findings) -> Comparison:
    """Write all files; gives what `compare` returns."""
    folder = directory / "figures"
    folder.mkdir(parents=True, exist_ok=True)
    pictures, names = [], []
    with styles.settings():
        for number, (name, heading, figure, caption, small) in enumerate(figures(found)):
            for suffix, content in (("png", styles.png(figure)), ("svg", styles.svg(figure).encode())):
                write_bytes(folder / f"{name}.{suffix}", content, durable=False)
                names.append(str(folder / f"{name}.{suffix}"))
            text = styles.inline(styles.svg(figure, background="none"), f"f{number}", heading)
            pictures.append(Picture(heading, text, caption, small=small))
    tables = write_tables(directory, found)
    write_bytes(directory / PAGE, page(found, pictures, tables).encode(), durable=False)
    paths = [str(directory / name) for name in tables]
    return Comparison(str(directory), str(directory / PAGE), names, paths, found)


def figures(found: Findings) -> Iterator[tuple[str, str, Figure, str, bool]]:
    """Name of the file, heading, figure, caption, and whether it is small."""
    looks = styles.styles([one.label for one in found.arms])
    main = found.metric
    others = [name for name in found.metrics if name != main and name in ("loss", "accuracy")]
    if found.ranked:
        yield (
            "ends",
            "Ends",
            end_figures.ends(found, looks),
            "The best scheme on top. Bars are 95 % confidence intervals over seeds; without a bar the interval is "
            "smaller than the mark, or there is one seed.",
            False,
        )
    for metric in dict.fromkeys([main, *others]):
        name = "error" if rising(metric) else metric
        yield (
            f"{name}-curves",
            f"{name.capitalize()} against updates, samples and time",
            curve_figures.against_all(found, metric, looks),
            BAND if len(found.arms) <= curve_figures.CROWDED else NO_BAND,
            False,
        )
    if len(found.arms) > 2:
        name = "error" if rising(main) else main
        yield (
            f"{name}-by-scheme",
            f"{name.capitalize()} against time, one scheme at a time",
            curve_figures.one_by_one(found, main, "seconds", looks),
            f"{BAND} The other schemes in grey.",
            False,
        )
    if found.main_tests:
        yield (
            "pairs",
            "Which differences are significant",
            end_figures.pairs(found),
            f"By {found.ranked_by}: Welch's test, p corrected by Holm's method, 5 %.",
            True,
        )
    doing = activity_figure.activity(found)
    if doing is not None:
        yield (
            "who-waits",
            "Who computes and who waits",
            doing,
            "A row for each worker, of the first seed; at most eight workers. The same span of time for every scheme: "
            f"{GAPS if found.real else 'at the beginning of the run.'} The percentages are of this span.",
            False,
        )
    stale = end_figures.staleness(found, looks)
    if stale is not None:
        yield (
            "staleness",
            "Staleness beside theory",
            stale,
            "If every worker pulls, computes and pushes in turn, the mean is the number of workers − 1. The law is "
            "geometric for exponential compute times; for windows of gradients and other laws it is that of a renewal "
            "model of independent workers. Synchronous schemes have staleness 0 and are not drawn.",
            False,
        )
    swept = end_figures.sweep(found, looks)
    if swept is not None:
        yield (
            "sweep",
            "The sweep",
            swept,
            "Each value was tried once, with a seed that the comparison does not use.",
            True,
        )
