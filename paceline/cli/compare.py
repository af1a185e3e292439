"""The command `paceline compare`."""

from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from paceline.cli.commands import CompareOptions
from paceline.cli.console import messages, screen
from paceline.cli.options import print_json
from paceline.config import build
from paceline.config.comparison import ComparisonSettings
from paceline.experiments.compare import compare
from paceline.experiments.comparison import Comparison
from paceline.experiments.prose import lines
from paceline.experiments.rows import metric_heading, rows_of


def compare_command(asked: CompareOptions, settings: dict[str, Any]) -> None:
    hyper, task_options = build.split(asked.words, compare, ComparisonSettings)
    done = compare(asked.task, asked.schemes, task_options=task_options, **settings, **hyper)
    if asked.as_json:
        print_json(done.as_dict())
        return
    screen.print(_table(done))
    for text in lines(done.findings):
        screen.print(Text(text))
        screen.print()
    messages.print(Text(f"report: {done.page}"), soft_wrap=True)


def _table(done: Comparison) -> Table:
    """In 80 columns: the units are below the table."""
    found = done.findings
    goal = "" if found.goal is None else f"to target: {found.unit} to {found.goal}. "
    caption = f"seconds: {found.unit}. {goal}sent: by each worker. stale: mean staleness."
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0), caption=caption, caption_justify="left")
    for name in ("scheme", "lr", metric_heading(found.metric), "seconds", "to target", "sent", "stale"):
        table.add_column(name, justify="left" if name == "scheme" else "right", overflow="fold")
    for row in rows_of(found):
        table.add_row(*map(Text, row))
    return table
