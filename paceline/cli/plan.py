"""The command `paceline plan`."""

from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from paceline.cli.commands import PlanOptions
from paceline.cli.console import messages, screen
from paceline.cli.options import print_json
from paceline.config import build
from paceline.config.planning import PlanningSettings
from paceline.planning import report
from paceline.planning.plan import plan


def plan_command(asked: PlanOptions, settings: dict[str, Any]) -> None:
    hyper, task_options = build.split(asked.words, plan, PlanningSettings)
    found = plan(asked.task, asked.schemes, task_options=task_options, **settings, **hyper)
    if asked.as_json:
        print_json(found.as_dict())
        return
    screen.print(Text("samples per second, by workers (· less than half of the ideal)"))
    screen.print(_table(report.throughput_rows(found)))
    screen.print(_table(report.end_rows(found)))
    screen.print(Text(f"{report.end_caption(found)}\n"))
    if found.checked:
        screen.print(Text("the forecast beside real runs here, in samples per second"))
        screen.print(_table(report.check_rows(found)))
    for text in [*found.words, *found.notes]:
        screen.print(Text(text))
        screen.print()
    messages.print(Text(f"report: {found.page}"), soft_wrap=True)


def _table(content: report.Table) -> Table:
    """In 80 columns."""
    heads, rows = content
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for number, name in enumerate(heads):
        table.add_column(name, justify="right" if number else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    return table
