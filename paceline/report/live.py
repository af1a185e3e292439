"""The display of a running training: a live table on a terminal, lines anywhere else.

No threads are started here: the process that shows this forks others, and a fork copies no threads.
"""

from __future__ import annotations

import math
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from rich.console import Console, Group, JustifyMethod, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from paceline.processes.supervisor.status import RoleState, RoleStatus, Status, UpdateRate, duration, time_left
from paceline.processes.supervisor.waits import named

WAITS = 3  # lines about waiting workers, at most
WORTH_TELLING = 5.0  # smallest age of a checkpoint, in seconds, that is shown
NOTHING = "–"  # for NaN
AFTER_LOOP = "training has ended; your script goes on after the loop"

TROUBLE = (RoleState.RESTARTING, RoleState.GONE)
STYLES = {
    RoleState.STARTING: "cyan",
    RoleState.TRAINING: "green",
    RoleState.WAITING: "yellow",
    RoleState.COMPILING: "magenta",
    RoleState.EVALUATING: "cyan",
    RoleState.AFTER: "blue",
    RoleState.FOLLOWING: "cyan",
    RoleState.ENDING: "blue",
    RoleState.RESTARTING: "bold magenta",
    RoleState.DONE: "dim green",
    RoleState.GONE: "bold red",
}
# escape sequences, and control characters other than tab and newline: they would garble the display
CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class Display:
    """Shows a run while it is entered. The caller's loop calls `update`; nothing is drawn in between."""

    def __init__(
        self,
        console: Console,
        *,
        plain: bool | None = None,
        every: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console
        self._plain = (not console.is_terminal or console.is_dumb_terminal) if plain is None else plain
        self._every, self._clock = every, clock
        self._pace = UpdateRate()
        self._status: Status | None = None
        self._told: Status | None = None  # the last status that was printed as a line
        self._told_at = clock()
        self._bar = ""  # the progress bar of a script
        self._waits = 0  # lines about waiting workers that have been shown: they stay, so that the rest does not move
        self._owner = os.getpid()
        self._live = Live(
            get_renderable=self._frame,
            console=console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,  # a forked process would inherit the replaced stdout and draw the table too
            redirect_stderr=False,
        )

    def __enter__(self) -> Display:
        self._told_at, self._owner = self._clock(), os.getpid()
        if not self._plain:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if os.getpid() != self._owner:
            return  # a forked process does not own the terminal
        if not self._plain:
            self._live.stop()
        elif self._status is not None and self._status is not self._told:
            self._tell(self._status)

    def update(self, status: Status) -> None:
        """Draw the new status, or print a line if it is time for one."""
        before, self._status = self._status, status
        self._pace.note(self._clock(), status.updates)
        if not self._plain:
            if self._live.is_started:
                self._live.refresh()
            return
        if _after_loop(status) and not (before and _after_loop(before)):
            self._print(f"{status.seconds:.1f} s  {AFTER_LOOP}")
        for text in _troubles(before, status):
            self._print(f"{status.seconds:.1f} s  {text}")
        if self._clock() - self._told_at >= self._every:
            self._tell(status)

    def tell(self, kind: str, text: str) -> None:
        """Show a message of the launcher, by its kind."""
        match kind:
            case "say" | "out" | "err":
                self.say(text)
            case "bar":
                self.bar(text)
            case _:
                self.warn(text)

    def say(self, text: str) -> None:
        """A line above the display."""
        self._print(text)

    def bar(self, text: str) -> None:
        """The progress bar that a script draws, under the table. Lines have no place for it until it is finished."""
        self._bar = CONTROL.sub("", text)

    def warn(self, text: str) -> None:
        """A warning above the display."""
        self._print(text, label="warning: ")

    def _print(self, text: str, label: str = "") -> None:
        line = Text.assemble((label, "" if self._plain else "bold yellow"), CONTROL.sub("", text))
        self._console.print(line, soft_wrap=True, highlight=False)

    def _tell(self, status: Status) -> None:
        self._print(_line(status, self._left(status)))
        self._told, self._told_at = status, self._clock()

    def _left(self, status: Status) -> float:
        return time_left(status, self._pace, self._clock())

    def _frame(self) -> RenderableType:
        if self._status is None:
            return Text()
        self._waits = max(self._waits, len(waits(self._status)))
        return frame(self._status, self._left(self._status), self._bar, *self._console.size, self._waits)


def frame(status: Status, left: float, bar: str, width: int, height: int, lines: int = 0) -> RenderableType:
    """All of the live display. `left`: seconds, NaN if unknown; `bar`: the progress bar of a script; `lines`: kept for
    what workers wait for."""
    parts = _head(status, left)
    waiting = waits(status)
    below = [_cut(text, "yellow") for text in waiting] + [Text()] * (lines - len(waiting))
    below += [_cut(bar)] if bar.strip() else []
    room = height - len(parts) - len(below) - 3  # an empty line, the headings, and one that stays free
    return Group(*parts, Text(), *_table(status.roles, width, max(room, 2)), *below)


def _head(status: Status, left: float) -> list[RenderableType]:
    """The lines above the table. They never wrap, so that the height is known."""
    times = ", ".join([duration(status.seconds, ".1f"), *_time_left(status, left)])
    lines: list[RenderableType] = [_apart(_cut(status.title, "bold"), times)]
    if status.goal is None:
        lines.append(_cut("  ·  ".join([*_work(status), f"update {status.updates:,}"])))
    else:
        bar = ProgressBar(total=max(status.goal, 1), completed=min(status.updates, status.goal))
        updates = f"update {status.updates:,}/{status.goal:,}"
        lines.append(_apart(bar, "  ".join([*_work(status), updates, f"{_percent(status):>4}"])))
    lines.append(_cut("  ·  ".join([*_rates(status), *_checkpoint(status)])))
    if status.metrics:
        lines.append(_cut("evaluated: " + "  ".join(_metrics(status))))
    if _after_loop(status):
        lines.append(_cut(AFTER_LOOP, "blue"))
    return lines


def _after_loop(status: Status) -> bool:
    """Whether all training has ended and a script does what follows its loop."""
    states = {role.state for role in status.roles if role.name.startswith(("chief", "worker"))}
    return RoleState.AFTER in states and states <= {RoleState.AFTER, RoleState.DONE}


def waits(status: Status) -> list[str]:
    """What workers wait for, if for long: a line for each reason."""
    who: dict[str, list[str]] = {}
    for role in status.roles:
        if role.waits_for:
            who.setdefault(role.waits_for, []).append(role.name)
    lines = [f"{named(names)} waiting for {reason}" for reason, names in who.items()]
    more = [f"… and {sum(map(len, list(who.values())[WAITS - 1 :]))} more waiting"] if len(lines) > WAITS else []
    return lines[: WAITS - len(more)] + more


def _apart(left: RenderableType, right: str) -> Table:
    """Two texts at the two ends of a line; the left one is cut if there is no room."""
    line = Table.grid(padding=(0, 2, 0, 0), expand=True)
    line.add_column(ratio=1, no_wrap=True)
    line.add_column(justify="right", no_wrap=True)
    line.add_row(left, right)
    return line


class LiveColumn(NamedTuple):
    heading: str
    width: int  # enough for usual numbers, so that columns do not move while they grow
    cell: Callable[[RoleStatus], str | Text]


# in order of importance: a narrow terminal shows the first ones
COLUMNS = (
    LiveColumn("role", 9, lambda role: Text(role.name, "bold")),
    LiveColumn("state", 10, lambda role: Text(role.state, STYLES[role.state])),
    LiveColumn("step", 10, lambda role: number(role.step if role.step >= 0 else math.nan, ",.0f")),
    LiveColumn("samples/s", 9, lambda role: number(role.samples_per_second, ",.0f")),
    LiveColumn("loss", 9, lambda role: number(role.loss, ".4g")),
    LiveColumn("staleness", 9, lambda role: number(role.staleness, ".1f")),
    LiveColumn("restarts", 8, lambda role: Text(f"{role.restarts:,}", "yellow" if role.restarts else "dim")),
    LiveColumn("pid", 7, lambda role: number(role.pid or math.nan, ".0f")),
)


def _table(roles: Sequence[RoleStatus], width: int, room: int) -> list[RenderableType]:
    """A row per role in at most `room` lines, including a line about omitted roles."""
    shown = list(roles) if len(roles) <= room else _foremost(roles, room - 1)
    names = max((len(role.name) for role in roles), default=0)
    widths = [max(column.width, min(names, 16) if column.heading == "role" else 0) for column in COLUMNS]
    gap = 2 if sum(widths) + 2 * len(widths) <= width else 1
    fitting = [n for n in range(len(widths)) if sum(widths[: n + 1]) + gap * n <= width] or [0]
    table = Table(box=None, padding=(0, gap, 0, 0), pad_edge=False, header_style="dim")
    for n in fitting:
        side: JustifyMethod = "left" if COLUMNS[n].heading in ("role", "state") else "right"
        table.add_column(COLUMNS[n].heading, justify=side, no_wrap=True, width=widths[n])
    for role in shown:
        table.add_row(*(COLUMNS[n].cell(role) for n in fitting))
    if len(shown) == len(roles):
        return [table]
    names_shown = {role.name for role in shown}
    others = Counter(role.state for role in roles if role.name not in names_shown)
    states = ", ".join(f"{count} {state}" for state, count in others.most_common())
    return [table, _cut(f"… and {len(roles) - len(shown)} more: {states}", "dim")]


def _foremost(roles: Sequence[RoleStatus], room: int) -> list[RoleStatus]:
    """The first role, those in trouble, and as many others as fit, in order."""
    by_need = sorted(range(len(roles)), key=lambda n: (n > 0, roles[n].state not in TROUBLE, n))
    return [roles[n] for n in sorted(by_need[:room])]


def _line(status: Status, left: float) -> str:
    """The status in one line, for logs."""
    count = f"update {status.updates:,}" + (f"/{status.goal:,}  {_percent(status)}" if status.goal is not None else "")
    parts = [
        f"{status.seconds:.1f} s",
        *_work(status),
        count,
        *_rates(status),
        *_checkpoint(status),
        *_time_left(status, left),
    ]
    if status.metrics:
        parts.append("evaluated: " + "  ".join(_metrics(status)))
    return "  ".join([*parts, *waits(status)])


def _troubles(before: Status | None, now: Status) -> list[str]:
    """Failures of roles since the last status, including a restart that began and ended in between."""
    known = {role.name: role for role in before.roles} if before else {}
    lines = []
    for role in now.roles:
        old = known.get(role.name)
        times = f"{role.restarts} restart{'' if role.restarts == 1 else 's'}"
        if role.state in TROUBLE and (old is None or old.state != role.state):
            lines.append(f"{role.name} is {role.state} ({times})")
        elif old and role.restarts > old.restarts and not {old.state, role.state} & set(TROUBLE):
            lines.append(f"{role.name} was restarted ({times})")
    return lines


def _work(status: Status) -> list[str]:
    """How much has been trained on, in units that all schemes share."""
    epochs = [] if math.isnan(status.epochs) else [f"epoch {status.epochs:,.2f}"]
    return [*epochs, f"{status.samples:,} samples"] if status.samples else epochs


def _rates(status: Status) -> list[str]:
    """The speed, and means over the roles that train; unknown values are omitted."""
    trainers = [role for role in status.roles if role.name != "evaluator" and role.state != RoleState.GONE]
    values = (
        ("{:,.0f} samples/s", status.samples_per_second),
        ("loss {:.3g}", _mean([role.loss for role in trainers])),
        ("staleness {:.1f}", _mean([role.staleness for role in trainers])),
    )
    return [form.format(value) for form, value in values if not math.isnan(value)]


def _checkpoint(status: Status) -> list[str]:
    """The age of the newest checkpoint, if it is old and updates since then could be lost."""
    if not status.checkpoint_age >= WORTH_TELLING or status.updates <= status.checkpoint:
        return []
    return [f"checkpoint {duration(status.checkpoint_age, '.0f')} old"]


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan


def _metrics(status: Status) -> list[str]:
    return [f"{name} {value:{'.2%' if name == 'accuracy' else '.4g'}}" for name, value in status.metrics.items()]


def _percent(status: Status) -> str:
    """Rounded down: 100% means done."""
    return f"{min(100, 100 * status.updates // status.goal) if status.goal else 100}%"


def _time_left(status: Status, left: float) -> list[str]:
    if math.isnan(left) or (status.goal is not None and status.updates >= status.goal):
        return []
    return [f"about {duration(math.ceil(left), 'd')} left"]


def _cut(text: str, style: str = "") -> Text:
    return Text(CONTROL.sub("", text), style, no_wrap=True, overflow="ellipsis")


def number(value: float, form: str) -> str:
    return NOTHING if math.isnan(value) else format(value, form)
