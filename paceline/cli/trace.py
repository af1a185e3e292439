"""`paceline trace`: the timeline of a real run as a file for Perfetto."""

from pathlib import Path

from rich.markup import escape
from rich.table import Table

from paceline.cli.commands import TraceOptions
from paceline.cli.console import messages, screen
from paceline.errors import UsageError
from paceline.report import chrome_trace
from paceline.runs.run_directory import RunDirectory
from paceline.runs.run_trace import timeline_of
from paceline.runtime.timeline import Timeline, shares_of

MOST_ROWS = 20
COLUMNS = ("gradient", "wait", "call", "mean", "meeting", "hooks", "checkpoint", "return", "dead")


def trace_command(asked: TraceOptions) -> None:
    run = RunDirectory.open(asked.run)
    if asked.until and asked.until <= asked.since:
        raise UsageError(f"--until {asked.until:g} is not after --since {asked.since:g}")
    out = asked.out or Path(f"{run.name}-trace.json")
    chrome_trace.for_file(out)
    timeline = timeline_of(run, asked.launch, asked.since, asked.until)
    chrome_trace.write(timeline, out)
    _show(timeline, asked.since)
    for note in timeline.notes:
        messages.print(escape(note), style="dim", soft_wrap=True)
    if timeline.left_out and not asked.until:
        text = f"{timeline.left_out:,} entries after {timeline.end:.3f} s were left out: ask for a part with --since"
        messages.print(text, style="yellow", soft_wrap=True)
    screen.print(f"{escape(str(out))}: open it at ui.perfetto.dev or chrome://tracing", soft_wrap=True)


def _show(timeline: Timeline, since: float) -> None:
    """Which part of the time each role spent on what."""
    span = max(timeline.end - since, 1e-9)
    by_role = {
        role: shares_of((one for one in timeline.intervals if one.role == role), span) for role in timeline.roles
    }
    by_role = {role: shares for role, shares in by_role.items() if shares}
    used = [kind for kind in COLUMNS if any(kind in shares for shares in by_role.values())]
    title = f"from {since:.3f} s to {timeline.end:.3f} s: parts of the time"
    table = Table("role", *used, "gradients", "updates", title=title, title_justify="left")
    for role, shares in list(by_role.items())[:MOST_ROWS]:
        gradients = sum(one.role == role and one.kind == "gradient" and not one.detail for one in timeline.intervals)
        updates = sum(one.role == role and one.kind == "update" for one in timeline.instants)
        cells = (f"{shares[kind]:.1%}" if kind in shares else "" for kind in used)
        computed = f"{gradients:,}" if role.startswith("worker") else ""
        table.add_row(role, *cells, computed, f"{updates:,}" if updates else "")
    screen.print(table)
    if len(by_role) > MOST_ROWS:
        screen.print(f"and {len(by_role) - MOST_ROWS} more roles, which are in the file")
