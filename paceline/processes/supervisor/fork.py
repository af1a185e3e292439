"""Forks one child process from a supervisor that has loaded torch and computed nothing yet.

A fork starts in milliseconds, a fresh interpreter needs seconds to load torch: so a killed worker is back at once. It
is safe because the supervisor has one thread and has never computed anything.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import signal
import socket
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.processes import process_title, resource_limits
from paceline.processes.parent_death import die_with_parent
from paceline.processes.roles.control_channel import Control
from paceline.signals import ASKED

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def forked(name: str, log: Path, play: Callable[[Control], int]) -> tuple[int, socket.socket]:
    """Start `play` in a child process that dies with this one; gives its pid and the launcher's end of its socket."""
    ours, theirs = socket.socketpair()
    parent = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # libraries' idle threads take care of a fork themselves
        pid = os.fork()
    if pid:
        theirs.close()
        return pid, ours
    code = 1
    try:
        ours.close()
        _die_with(parent)
        _quietly(log)
        process_title.entitle(f"paceline role {name}", f"paceline {name}")
        _keep_memory()
        code = play(Control(theirs))
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException as error:
        reason = resource_limits.explained(error)
        print(f"{name}: {reason}", file=sys.stderr, flush=True) if reason else traceback.print_exc()
    finally:
        os._exit(code)


def _die_with(parent: int) -> None:
    """Die with the supervisor, however it ends, and leave all signals to it."""
    die_with_parent(signal.SIGKILL, parent)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number in ASKED:  # the launcher decides; terminals, shells and mpirun send these to every process
        signal.signal(number, signal.SIG_IGN)


def _quietly(path: Path) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    os.close(null)
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(io.BufferedWriter(log), "utf-8", "backslashreplace", line_buffering=True)
        for log in (_Log(1, "w", closefd=False), _Log(2, "w", closefd=False))
    )


class _Log(io.FileIO):
    """A log whose failed writes (a full disk) are ignored: they must neither end a run nor hide its real error."""

    def write(self, text: Any) -> int:
        with contextlib.suppress(OSError):
            return super().write(text) or 0
        return len(text)


def _keep_memory() -> None:
    """Keep freed vectors in the process: getting fresh pages for a new vector costs more than filling it."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)
        mallopt(_M_TRIM_THRESHOLD, 512 << 20)
