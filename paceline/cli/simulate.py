"""The command `paceline simulate`."""

from typing import Any

from rich.markup import escape

from paceline.api.simulate import simulate
from paceline.cli.commands import SimulateOptions
from paceline.cli.console import messages, say, screen, warn
from paceline.cli.options import print_json
from paceline.config import build
from paceline.config.simulation import Simulation
from paceline.report import tables
from paceline.report.simulation_progress import progress


def simulate_command(asked: SimulateOptions, settings: dict[str, Any]) -> None:
    hyper, task_options = build.split(asked.words, simulate, Simulation)
    scheme = asked.scheme or "sync"
    settings |= {"task_options": task_options, "warn": warn, "say": say}
    with progress(messages, f"{scheme} on {asked.task}") as watch:
        result = simulate(asked.task, scheme, watch=watch, **settings, **hyper)
    if result.notice:
        warn(result.notice, "notice")
    if result.stopped:
        messages.print(f"stopped: {escape(result.stopped)}")
    if asked.as_json:
        print_json(result.as_dict())
        return
    for point in result.history:
        shown = "  ".join(f"{name} {value:.4g}" for name, value in point.metrics.items())
        screen.print(f"update {point.update:>7,}  {point.seconds:>10,.5g} s  {shown}")
    screen.print(tables.closing(result))
