"""A task's command under an engine's process: what it prints, how it ends, and that it never outlives its parent."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from beds.commands import need

from paceline.launchers._child_process import Running, free_port, in_this_python, why

LIMIT = 30.0  # seconds that anything here may take


@contextmanager
def running(code: str, **environment: str) -> Iterator[Running]:
    command = Running([sys.executable, "-c", code], environment)
    try:
        yield command
    finally:
        command.end()


def heard_all(command: Running) -> tuple[list[tuple[str, str]], int]:
    lines: list[tuple[str, str]] = []
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline:
        new, code = command.heard(0.5)
        lines += new
        if code is not None:
            return lines, code
    raise AssertionError(f"it does not end; so far: {lines}")


def test_lines_and_the_exit_code() -> None:
    code = "import os, sys; print(os.environ['A']); print('no end', end=''); print('é', file=sys.stderr); sys.exit(7)"
    with running(code, A="b", PYTHONIOENCODING="utf-8") as command:
        lines, ended = heard_all(command)
    assert [text for stream, text in lines if stream == "out"] == ["b", "no end"]
    assert [text for stream, text in lines if stream == "err"] == ["é"]
    assert ended == 7


def test_a_command_whose_pipes_are_held_by_another_has_ended() -> None:
    need({"sleep": "coreutils"}, "another process")
    code = "import subprocess, sys; p = subprocess.Popen(['sleep', '60']); print(p.pid)"
    with running(code) as command:
        lines, ended = heard_all(command)
        assert ended == 0
        assert Path(f"/proc/{lines[0][1]}").exists()


def test_a_silent_command_is_not_waited_for() -> None:
    with running("import time; time.sleep(60)") as command:
        assert command.heard(0.01) == ([], None)
        command.tell(signal.SIGTERM)
        assert heard_all(command)[1] == -signal.SIGTERM


def test_signals_that_the_parent_blocks_or_ignores_reach_the_command() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    ignored = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        code = "import signal; print('ready', flush=True); signal.pause()"
        for number in (signal.SIGINT, signal.SIGTERM):
            with running(code) as command:
                assert command.heard(LIMIT)[0] == [("out", "ready")]
                command.tell(number)
                assert heard_all(command)[1] in (-number, 1)  # Python turns SIGINT into an exception
    finally:
        signal.signal(signal.SIGTERM, ignored)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def test_a_command_dies_with_its_parent() -> None:
    code = (
        "import sys; from paceline.launchers._child_process import Running; "
        "r = Running([sys.executable, '-c', 'import signal; signal.pause()'], {}); "
        "print(r.process.pid, flush=True); r.heard(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        watched = os.pidfd_open(child)
        parent.kill()
        try:
            assert select.select([watched], [], [], LIMIT)[0], "it lives on"
        finally:
            os.close(watched)


def test_paceline_is_run_by_this_python() -> None:
    assert in_this_python(("paceline", "train", "x")) == [sys.executable, "-P", "-m", "paceline", "train", "x"]
    assert in_this_python(("echo", "paceline")) == ["echo", "paceline"]


def test_how_a_command_ended_in_words() -> None:
    assert why(3) == "ended with exit code 3"
    assert why(-9) == "was killed by SIGKILL"
    assert why(-99) == "was killed by signal 99"


def test_a_free_port() -> None:
    assert 0 < free_port("127.0.0.1") < 65_536
