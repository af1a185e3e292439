"""Signals before and while a command works; and that nothing heavy is loaded before they are heard."""

from __future__ import annotations

import ast
import importlib
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

import paceline
from paceline import signals


def test_the_first_module_of_a_command_loads_no_library() -> None:
    code = "import sys, paceline.__main__; print([m for m in ('torch', 'numpy', 'typer', 'rich') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_every_public_name_is_loaded_from_where_type_checkers_see_it() -> None:
    tree = ast.parse(Path(paceline.__file__).read_text())
    seen = {
        alias.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("paceline") and node.col_offset
        for alias in node.names
    }
    assert seen == paceline._HOMES
    assert sorted(paceline._HOMES) == sorted(paceline.__all__)
    for name, home in seen.items():
        assert getattr(paceline, name) is getattr(importlib.import_module(str(home)), name)
    assert set(paceline.__all__) <= set(dir(paceline))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="trian"):
        _ = paceline.trian  # type: ignore[attr-defined]


@pytest.mark.parametrize("number", signals.ASKED)
def test_a_counter_counts_inside_and_gives_back_what_was_there(number: signal.Signals) -> None:
    before = [signal.getsignal(one) for one in signals.ASKED]
    counter = signals.Counter()
    with signals.counted(counter):
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)
        assert counter.count == 2
        assert counter.hung_up == (number == signal.SIGHUP)
    assert [signal.getsignal(one) for one in signals.ASKED] == before


WORK = """
import os, signal
from paceline import signals
{before}
signals.raise_while_working()
try:
    os.kill(os.getpid(), signal.{name})
    print("lives")
except signals.Interrupted as asked:
    print("asked", asked.code, flush=True)
    os.kill(os.getpid(), signal.{name})
    print("lives after the second one")
"""


def work(name: str, before: str = "") -> subprocess.CompletedProcess[str]:
    code = WORK.format(name=name, before=before)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP"])
def test_the_first_signal_raises_and_the_second_leaves_at_once(name: str) -> None:
    done = work(name)
    assert (done.returncode, done.stdout, done.stderr) == (130, "asked 130\n", "interrupted\n")


def test_nohup_stays_in_force() -> None:
    done = work("SIGHUP", "signal.signal(signal.SIGHUP, signal.SIG_IGN)")
    assert (done.returncode, done.stdout) == (0, "lives\n")


def test_ctrl_c_while_libraries_load_is_raised_afterwards() -> None:
    loaded = []

    def load() -> None:
        with signals.deferred():
            with suppress(BaseException):  # as libraries do
                os.kill(os.getpid(), signal.SIGINT)
            loaded.append(True)

    with pytest.raises(KeyboardInterrupt):
        load()
    assert loaded == [True]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
