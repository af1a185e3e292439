"""The profile of a run as a table of at most 80 columns, and how its traces are opened."""

from collections.abc import Iterator
from pathlib import Path

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from paceline.result import Profile

HEADINGS = {"checkpoint": "save"}  # a shorter word where the category's name is longer than its numbers


def profile_table(profile: Profile, directory: str | Path | None) -> Iterator[RenderableType]:
    """A row per role; `directory`: the run directory, as people name it."""
    table = Table(title="profile", title_justify="left", box=None, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("role", style="bold", no_wrap=True)
    table.add_column("seconds", justify="right", no_wrap=True)
    for name in profile.columns():
        table.add_column(HEADINGS.get(name, name), justify="right", no_wrap=True)
    for row in profile.rows():
        table.add_row(*row)
    yield table
    yield from (Text(text) for text in profile.remarks())
    if profile.traces:
        first = Path(directory or "") / profile.traces[0]
        more = f" and {len(profile.traces) - 1} more" if len(profile.traces) > 1 else ""
        yield Text(f"trace: {first}{more}")
        yield Text("open a trace at ui.perfetto.dev, or in Chrome at chrome://tracing")
