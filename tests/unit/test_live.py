"""What people see while processes train, on terminals of several sizes and in logs."""

from __future__ import annotations

import dataclasses
import io
import math
import re
import threading
from typing import Any

import pytest
import torch
from rich.console import Console

from paceline.processes.memory.board import DONE, ENDING, STARTING, TRAINING, WAITING
from paceline.processes.supervisor import progress
from paceline.processes.supervisor.status import RoleState, RoleStatus, Status, UpdateRate, duration
from paceline.report import tables
from paceline.report.live import STYLES, TROUBLE, Display
from paceline.result import Result, Staleness

NAN = math.nan
SEQUENCE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")


class Clock:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Screen:
    """A display on a terminal (or a file) in memory."""

    def __init__(self, width: int = 80, height: int = 24, *, terminal: bool = True, **options: Any) -> None:
        self.file, self.clock = io.StringIO(), Clock()
        self.console = Console(
            file=self.file, force_terminal=terminal, width=width, height=height, _environ={"TERM": "xterm-256color"}
        )
        self.display = Display(self.console, clock=self.clock, **options)

    def lines(self) -> list[str]:
        """What was written since the last look, without colours and cursor movements."""
        text = SEQUENCE.sub("", self.file.getvalue()).replace("\r", "\n")
        self.file.seek(0)
        self.file.truncate()
        return [line.rstrip() for line in text.splitlines() if line.strip()]


def role(name: str = "chief", state: str = "training", **values: Any) -> RoleStatus:
    given = {"pid": 4242, "step": 1200, "samples_per_second": 11250.0, "loss": 0.123, "staleness": 0.9, "restarts": 0}
    return RoleStatus(name, RoleState(state), **(given | values))


def status(*roles: RoleStatus, **values: Any) -> Status:
    given: dict[str, Any] = {
        "title": "async on mnist",
        "updates": 1200,
        "goal": 5000,
        "seconds": 12.3,
        "samples_per_second": 45000.0,
        "metrics": {},
    }
    return Status(roles=roles or (role(),), **(given | values))


def team(size: int, **states: str) -> tuple[RoleStatus, ...]:
    names = ["chief", *(f"worker:{rank}" for rank in range(1, size))]
    return tuple(role(name, states.get(name.replace(":", ""), "training")) for name in names)


def test_every_state_of_a_role_has_a_style_and_every_word_on_the_board_a_state() -> None:
    assert set(STYLES) == set(RoleState)
    assert set(progress.STATES) == {STARTING, TRAINING, WAITING, ENDING, DONE}


@pytest.mark.parametrize("state", RoleState)
@pytest.mark.parametrize("terminal", [True, False])
def test_every_state_of_a_role_is_shown(state: RoleState, terminal: bool) -> None:
    screen = Screen(terminal=terminal, every=0.0)
    with screen.display as display:
        display.update(status(role(), role("worker:1")))
        display.update(status(role(), role("worker:1", state)))
    shown = any(state in line for line in screen.lines())
    assert shown == (terminal or state in TROUBLE)  # lines of a log name those in trouble only


def test_a_script_after_its_loop_and_its_progress_bar() -> None:
    done = role("server:0", "done")
    for terminal in (True, False):
        screen = Screen(terminal=terminal)
        with screen.display as display:
            display.update(status(role(), role("worker:1", "after loop"), done))
            assert not any("your script goes on" in line for line in screen.lines())
            display.tell("out", "a line of the script")
            display.tell("bar", "train: \x1b[31m40%|████      | 4/10" + "x" * 100)
            display.update(status(role("chief", "after loop"), role("worker:1", "after loop"), done))
            display.update(status(role("chief", "after loop"), role("worker:1", "done"), done))
            lines = screen.lines()
        assert "a line of the script" in lines
        told = [line for line in lines if "training has ended; your script goes on after the loop" in line]
        bars = [line for line in lines if line.startswith("train: 40%|████      | 4/10x")]
        assert (len(told) > 1, bool(bars)) == (terminal, terminal)
        assert told
        assert all(len(bar) <= 80 for bar in bars)


@pytest.mark.parametrize("width", [80, 120])
def test_a_row_per_role_under_the_bar(width: int) -> None:
    screen = Screen(width)
    server = role("server:0", "waiting", step=-1, samples_per_second=NAN, loss=NAN, staleness=NAN, pid=0)
    with screen.display as display:
        display.update(status(role(), server, metrics={"loss": 0.25, "accuracy": 0.9123}))
        title, bar, rates, metrics, headings, chief, servers = screen.lines()
    assert title.startswith("async on mnist")
    assert title.endswith("12.3 s")
    assert len(title) == len(bar) == width
    assert bar.startswith("━")
    assert bar.endswith("1,200/5,000   24%")
    assert rates == "45,000 samples/s  ·  loss 0.123  ·  staleness 0.9"
    assert metrics == "evaluated: loss 0.25  accuracy 91.23%"
    assert headings.split() == ["role", "state", "step", "samples/s", "loss", "staleness", "restarts", "pid"]
    assert chief.split() == ["chief", "training", "1,200", "11,250", "0.123", "0.9", "0", "4242"]
    assert servers.split() == ["server:0", "waiting", "–", "–", "–", "–", "0", "–"]
    assert len(headings) == len(chief) == len(servers) <= width


def test_long_numbers_fit_eighty_columns() -> None:
    screen = Screen(80)
    busy = role("worker:127", "restarting", pid=4194304, step=12345678, samples_per_second=1234567.0, loss=1.2345e-05)
    with screen.display as display:
        display.update(status(busy, title="a title " * 20, seconds=86000.0, samples_per_second=1.5e8))
        lines = screen.lines()
    assert max(map(len, lines)) <= 80
    assert lines[0].endswith("…  23 h 53 min")
    assert " ".join(lines[-1].split()) == "worker:127 restarting 12,345,678 1,234,567 1.234e-05 0.9 0 4194304"


def test_a_narrow_terminal_loses_columns_not_digits() -> None:
    screen = Screen(50)
    with screen.display as display:
        display.update(status())
        *_, headings, chief = screen.lines()
    assert headings.split() == ["role", "state", "step", "samples/s"]
    assert chief.split() == ["chief", "training", "1,200", "11,250"]


def test_colours_tell_states() -> None:
    screen = Screen()
    with screen.display as display:
        display.update(status(role(), role("worker:1", "gone")))
    assert "\x1b[32mtraining" in screen.file.getvalue()
    assert "\x1b[1;31mgone" in screen.file.getvalue()


@pytest.mark.parametrize("height", [12, 16, 24])
def test_more_roles_than_lines(height: int) -> None:
    screen = Screen(80, height)
    with screen.display as display:
        display.update(status(*team(40, worker30="restarting", worker35="gone")))
        lines = screen.lines()
    assert len(lines) + 2 == height  # one empty line, one left free
    names = [line.split()[0] for line in lines[4:-1]]
    first = ["chief", *(f"worker:{rank}" for rank in range(1, len(names) - 2))]
    assert names == [*first, "worker:30", "worker:35"]
    left_out = 40 - len(names)
    assert lines[-1] == f"… and {left_out} more: {left_out} training"


def test_twenty_roles_on_a_high_terminal_are_all_shown() -> None:
    screen = Screen(120, 40)
    with screen.display as display:
        display.update(status(*team(20)))
        assert sum("training" in line for line in screen.lines()) == 20


def test_nothing_known_yet() -> None:
    screen = Screen()
    with screen.display as display:
        display.update(status(role(loss=NAN), updates=0, goal=None, samples_per_second=NAN, seconds=0.0))
        text = "\n".join(screen.lines())
    assert "update 0" in text
    assert "nan" not in text
    assert "left" not in text


def test_no_thread_is_started() -> None:
    before = threading.active_count()
    screen = Screen()
    with screen.display as display:
        display.update(status())
        display.say("hello")
        assert threading.active_count() == before
    assert threading.active_count() == before


def test_an_interrupt_leaves_the_terminal_clean() -> None:
    screen = Screen()
    drawn = 0

    def interrupted() -> None:
        nonlocal drawn
        with screen.display as display:
            display.update(status())
            drawn = len(screen.lines()) + 1  # one is empty
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    end = screen.file.getvalue()
    assert "\x1b[?25h" in end  # the cursor is back
    assert end.rstrip().endswith("\x1b[1A\x1b[2K" * drawn)  # and the table wiped


def test_a_forked_process_does_not_touch_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen()
    with screen.display as display:
        display.update(status())
        screen.lines()
        monkeypatch.setattr("os.getpid", lambda: -1)
    assert screen.file.getvalue() == ""
    monkeypatch.undo()
    screen.display.__exit__(None, None, None)
    assert "\x1b[?25h" in screen.file.getvalue()


@pytest.mark.parametrize("terminal", [True, False])
def test_messages_are_taken_literally(terminal: bool) -> None:
    screen = Screen(terminal=terminal)
    with screen.display as display:
        display.say("worker[1] [bold]said\x1b[31m red\r\x07")
        display.warn("lr [0.5] " + "is high " * 20)
        lines = "".join(screen.lines())
    assert "worker[1] [bold]said red" in lines
    assert "warning: lr [0.5] is high" in lines


def test_messages_stand_above_the_table() -> None:
    screen = Screen()
    with screen.display as display:
        display.update(status())
        screen.lines()
        display.say("hello")
        assert screen.lines()[0] == "hello"


def run_plainly(screen: Screen, seconds: float, rate: int, **values: Any) -> None:
    """Updates of the display, eight a second, while the run makes `rate` updates a second."""
    begin = screen.clock.now
    for tick in range(round(seconds * 8) + 1):
        screen.clock.now = begin + tick / 8
        screen.display.update(status(updates=tick * rate // 8, seconds=tick / 8, **values))


def test_plain_lines() -> None:
    screen = Screen(terminal=False, width=40)
    with screen.display:
        run_plainly(screen, 12.0, 400)
        assert screen.lines() == [
            "5.0 s  update 2,000/5,000  40%  45,000 samples/s  loss 0.123  staleness 0.9  about 8 s left",
            "10.0 s  update 4,000/5,000  80%  45,000 samples/s  loss 0.123  staleness 0.9  about 3 s left",
        ]
    assert screen.lines() == [
        "12.0 s  update 4,800/5,000  96%  45,000 samples/s  loss 0.123  staleness 0.9  about 1 s left"
    ]


def test_the_last_line_is_not_repeated() -> None:
    screen = Screen(terminal=False)
    with screen.display:
        run_plainly(screen, 5.0, 1000, metrics={"accuracy": 0.5, "loss": NAN})
    (line,) = screen.lines()
    assert line.startswith("5.0 s  update 5,000/5,000  100%  45,000 samples/s  loss 0.123  staleness 0.9")
    assert line.endswith("evaluated: accuracy 50.00%  loss nan")
    assert line.isascii()  # whatever the encoding of the log


def test_means_are_of_those_who_train() -> None:
    screen = Screen(terminal=False, every=0.0)
    silent = role("server:0", loss=NAN, staleness=NAN)
    others = (
        role("worker:1", loss=3.0, staleness=3.0),
        role("worker:2", "gone", loss=99.0),
        role("evaluator", loss=99.0),
    )
    with screen.display as display:
        display.update(status(role(loss=1.0, staleness=1.0), silent, *others, goal=None))
    line = screen.lines()[-1]
    assert line == "12.3 s  update 1,200  45,000 samples/s  loss 2  staleness 2.0"


def test_plain_output_has_no_control_characters() -> None:
    for terminal in (True, False):
        screen = Screen(terminal=terminal, plain=True)
        with screen.display as display:
            run_plainly(screen, 6.0, 100)
            display.update(status(role(state="gone")))
            display.say("a\x1b[1mb")
            display.warn("c")
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", screen.file.getvalue())


def test_trouble_is_told_at_once() -> None:
    screen = Screen(terminal=False)
    with screen.display as display:
        steady = role("worker:2")
        course = (("training", 0), ("restarting", 1), ("restarting", 1), ("training", 1), ("training", 2), ("gone", 2))
        for state, restarts in course:
            display.update(status(role("worker:1", state, restarts=restarts), steady))
        assert screen.lines() == [
            "12.3 s  worker:1 is restarting (1 restart)",
            "12.3 s  worker:1 was restarted (2 restarts)",
            "12.3 s  worker:1 is gone (2 restarts)",
        ]


def test_a_dumb_terminal_gets_lines() -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, _environ={"TERM": "dumb"})
    with Display(console, every=0.0) as display:
        display.update(status())
    assert "update 1,200/5,000" in file.getvalue()


def test_time_left_follows_the_last_seconds() -> None:
    pace = UpdateRate()
    for second in range(100):  # slow
        pace.note(second, second)
    assert pace.seconds_to(1099, 99.0) == pytest.approx(1000)
    for second in range(100, 121):  # ten times as fast
        pace.note(second, 99 + 10 * (second - 99))
    assert pace.seconds_to(1309, 120.0) == pytest.approx(100)
    assert pace.seconds_to(1309, 123.0) == pytest.approx(97)  # counts down between updates
    assert math.isnan(pace.seconds_to(1309, 140.0))  # nothing happens any more
    assert pace.seconds_to(309, 140.0) == 0.0


def test_time_left_of_rare_updates_and_after_a_slow_start() -> None:
    pace = UpdateRate()
    pace.note(0.0, 0)
    for tick in range(60, 300):  # nothing for a minute, then one update in 30 s
        pace.note(tick, (tick - 30) // 30)
    assert pace.seconds_to(108, 299.0) == pytest.approx(100 * 30 - 29)


def test_time_left_forgets_what_was_rolled_back() -> None:
    pace = UpdateRate()
    for second in range(10):
        pace.note(second, 100 + second)
    pace.note(10.0, 50)
    assert math.isnan(pace.seconds_to(200, 10.0))
    pace.note(11.0, 60)
    pace.note(12.0, 70)
    assert pace.seconds_to(100, 12.0) == pytest.approx(3)


def test_durations() -> None:
    assert [duration(s, ".1f") for s in (0, 12.34, 125, 3900, 360000)] == [
        "0.0 s",
        "12.3 s",
        "2 min 05 s",
        "1 h 05 min",
        "100 h 00 min",
    ]


def closing(result: Result, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    with console.capture() as capture:
        console.print(tables.closing(result))
    return capture.get()


def test_the_closing_table_of_real_and_of_simulated_runs() -> None:
    simulated = Result("async", "toy", 2, 10, 12, 120, 6.5, Staleness(), {"loss": 0.5}, torch.zeros(2))
    text = closing(simulated)
    assert "virtual time" in text
    assert not re.search("wall|servers|restarts|rolled|memory|directory|None", text)
    real = dataclasses.replace(
        simulated,
        virtual_seconds=None,
        servers=2,
        wall_seconds=12.345,
        samples_per_second=45000.4,
        time_to_first_step=1.5,
        restarts=0,
        rolled_back_updates=3,
        peak_rss_mb=812.3,
        directory="/tmp/runs/[1]/" + "long" * 20,
    )
    text = closing(real)
    rows = dict(re.findall(r"│ (.*?) +│ +(.*?) +│", text))
    assert (
        rows
        | {
            "servers": "2",
            "wall time": "12.35 s",
            "samples per second": "45,000",
            "time to first step": "1.50 s",
            "restarts": "0",
            "updates rolled back": "3",
            "memory of the largest process": "812 MB",
        }
        == rows
    )
    assert "virtual" not in text
    assert "/tmp/runs/[1]/" in text
    assert text.count("long") >= 18  # folded, not cut


def test_the_age_of_the_newest_checkpoint_is_told_when_something_could_be_lost() -> None:
    screen = Screen(width=160, plain=True)
    with screen.display:
        for updates, age in ((900, 2.0), (800, 100.0), (900, 100.0), (900, math.nan)):
            screen.clock.now += 6
            screen.display.update(status(updates=updates, checkpoint=800, checkpoint_age=age))
    assert ["checkpoint 1 min 40 s old" in line for line in screen.lines()] == [False, False, True, False]


class TestWaits:
    """Workers that wait for long are told under the table, a line for each reason."""

    REASON = "worker 1 at a mean"

    def test_workers_with_one_reason_share_a_line(self) -> None:
        screen = Screen()
        with screen.display as display:
            waiting = [role(name, "waiting", waits_for=self.REASON) for name in ("chief", "worker:2")]
            display.update(status(*waiting, role("worker:1")))
            assert screen.lines()[-1] == "chief, worker:2 waiting for worker 1 at a mean"

    def test_a_long_reason_is_cut(self) -> None:
        screen = Screen()
        with screen.display as display:
            display.update(status(role("chief", "waiting", waits_for="pull(r=1200): guard s.v >= r" + " and more" * 9)))
            lines = screen.lines()
        assert lines[-1].startswith("chief waiting for pull(r=1200): guard s.v >= r and more")
        assert lines[-1].endswith("…")
        assert max(map(len, lines)) <= 80

    def test_more_reasons_than_lines(self) -> None:
        screen = Screen()
        with screen.display as display:
            roles = [role(f"worker:{n}", "waiting", waits_for=f"worker {n - 1} at a mean") for n in range(1, 7)]
            display.update(status(*roles))
            lines = screen.lines()
        assert lines[-3:] == [
            "worker:1 waiting for worker 0 at a mean",
            "worker:2 waiting for worker 1 at a mean",
            "… and 4 more waiting",
        ]

    def test_its_line_stays_so_that_nothing_moves(self) -> None:
        screen = Screen()
        with screen.display as display:
            heights = []
            for reason in ("", self.REASON, "", self.REASON):
                display.update(status(role(waits_for=reason)))
                heights.append(screen.file.getvalue().count("\n"))
                screen.lines()
        assert heights == [heights[0], heights[0] + 1, heights[0] + 1, heights[0] + 1]

    def test_lines_of_a_log_tell_it_too(self) -> None:
        screen = Screen(terminal=False, every=0.0)
        with screen.display as display:
            display.update(status(role("chief", "waiting", waits_for=self.REASON), role("worker:1")))
        assert screen.lines()[0].endswith("chief waiting for worker 1 at a mean")
