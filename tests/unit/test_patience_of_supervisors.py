"""Whether a process works or hangs, by its CPU time. The processes are real, the clock is the test's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from paceline.processes.supervisor.patience import Activity, is_stopped

SPIN = "print(1, flush=True)\nwhile True: pass"
SLEEP = "import signal; print(1, flush=True); signal.pause()"
PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SPIN!r}])"


@contextmanager
def process(code: str) -> Iterator[int]:
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True) as started:
        try:
            assert started.stdout is not None
            assert started.stdout.readline() == b"1\n"
            yield started.pid
        finally:
            with suppress(ProcessLookupError):
                os.killpg(started.pid, signal.SIGKILL)


def test_a_process_that_waits_is_idle_for_as_long_as_it_is_watched() -> None:
    activity = Activity()
    with process(SLEEP) as pid:
        assert activity.idle_for(pid, 100.0) == 0.0
        assert activity.idle_for(pid, 103.0) == 3.0
        activity.forget(pid)
        assert activity.idle_for(pid, 110.0) == 0.0


def test_a_process_that_computes_is_not() -> None:
    activity = Activity()
    with process(SPIN) as pid:
        activity.idle_for(pid, 0.0)
        while activity.idle_for(pid, 1.0):  # until it has used two per cent of that second
            os.sched_yield()


def test_what_its_children_compute_counts() -> None:
    activity = Activity()
    with process(PARENT) as pid:
        activity.idle_for(pid, 0.0)
        while activity.idle_for(pid, 1.0):
            os.sched_yield()


def test_a_process_that_has_ended_is_idle() -> None:
    with process(SLEEP) as pid:
        pass
    activity = Activity()
    activity.idle_for(pid, 0.0)
    assert activity.idle_for(pid, 5.0) == 5.0
    assert not is_stopped(pid)


def test_a_stopped_process() -> None:
    with process(SLEEP) as pid:
        assert not is_stopped(pid)
        os.kill(pid, signal.SIGSTOP)
        os.waitpid(pid, os.WUNTRACED)
        assert is_stopped(pid)
