"""What a script prints, as lines and progress bars."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterable
from typing import Any

import pytest

from paceline.processes.roles import script_output
from paceline.processes.roles.script_output import LONGEST, Rows, ScriptStream, forwarded

UP = "\x1b[A"


def lines(writes: Iterable[str]) -> list[str]:
    """The lines that are settled on the way; what is left is not among them."""
    rows = Rows()
    return [line for text in writes for line in rows.write(text)]


@pytest.mark.parametrize(
    ("writes", "settled"),
    [
        (["one\ntwo\nthree"], ["one", "two"]),
        (["o", "ne", "\n", "\n", "two\r\n"], ["one", "", "two"]),
        (["\r 0%", "\r 50%", "\r100%", "\n", "after\n"], ["100%", "after"]),
        # bars of two epochs: the first is settled when the second is drawn again
        (["\r 50%", "\r100%", "\n", "\r 0%", "\r 10%"], ["100%"]),
        (["\r 50%", "\r100%", "\n", "\r 0%"], []),
        # a bar within a bar: the cursor returns to the outer one
        (["\router 0", *["\n", "\rinner 0", UP, "\n", "\rinner 9", UP] * 3, "\router 1"], []),
        (["\router 1", "\n", "\rinner 9", UP, "\n", "\n", "done\n"], ["outer 1", "inner 9", "done"]),
        (["\r 50%", "\r     \r", "plain\n"], ["plain"]),  # tqdm(leave=False)
        (["x" * (LONGEST + 1)], ["x" * (LONGEST + 1)]),
    ],
)
def test_lines_are_told_once_they_cannot_change(writes: list[str], settled: list[str]) -> None:
    assert lines(writes) == settled


def test_what_is_left_at_the_end() -> None:
    rows = Rows()
    assert rows.write("whole\n\rbar") == ["whole"]
    assert (rows.current, rows.rest(), rows.rest()) == ("bar", ["bar"], [])


@pytest.fixture
def sent() -> list[dict[str, Any]]:
    return []


def test_prints_go_to_the_log_and_to_the_launcher(sent: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    out, err = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    with forwarded(sent.append):
        print("a line")
        print("no end", end="", file=sys.stderr)
        sys.stdout.writelines(["b\n"])
        assert sys.stdout.isatty() is False
    assert (sys.stdout, sys.stderr) == (out, err)
    assert (out.getvalue(), err.getvalue()) == ("a line\nb\n", "no end")
    assert [one["print"] for one in sent if one["print"][0] != "bar"] == [
        ["out", "a line"],
        ["out", "b"],
        ["err", "no end"],
    ]


def test_a_finished_bar_stands_before_the_lines_that_follow_it(
    sent: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with forwarded(sent.append):
        for text in ("\r  0%", "\r 50%"):
            sys.stderr.write(text)
        print("on the way")  # the bar is not finished
        sys.stderr.write("\r100%")
        sys.stderr.write("\n")
        print("saved")
    lines = [one["print"] for one in sent if one["print"][0] != "bar"]
    assert lines == [["out", "on the way"], ["err", "100%"], ["out", "saved"]]


def test_a_progress_bar_is_not_sent_each_time_and_is_gone_at_the_end(
    sent: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(script_output.time, "monotonic", lambda: now)
    stream = ScriptStream(io.StringIO(), "err", sent.append)
    for percent in range(100):
        now += 0.05
        stream.write(f"\r{percent}%")
    bars = [text for kind, text in (one["print"] for one in sent) if kind == "bar"]
    assert 20 <= len(bars) <= 30
    stream.close()
    assert [one["print"] for one in sent[-2:]] == [["err", "99%"], ["bar", ""]]


def test_another_process_writes_to_the_log_only(sent: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    log = io.StringIO()
    stream = ScriptStream(log, "out", sent.append)
    monkeypatch.setattr(os, "getpid", lambda: -1)  # as in a process that a DataLoader has forked
    stream.write("from a DataLoader\n")
    assert (log.getvalue(), sent) == ("from a DataLoader\n", [])
