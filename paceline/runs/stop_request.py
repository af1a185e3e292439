"""Asks the launcher of a run to end it in order, with a last checkpoint: the first Ctrl-C, from another process.

A second signal would end the run at once. So none is sent to a run that is ending already, and only one to a launcher,
also if several processes ask: `stop.request` in the run directory names the launcher, and is locked meanwhile.
"""

from __future__ import annotations

import fcntl
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from paceline.errors import UsageError
from paceline.runs.run_directory import RunDirectory

REQUEST = "stop.request"


def stop(run: RunDirectory) -> str:
    """Send the signal; gives a sentence on what was done. UsageError: there is nothing to signal here."""
    if not run.is_locked():
        raise UsageError(f"{run.name} is not running")
    told = run.status() or {}
    if told.get("stopping"):
        return f"{run.name} is ending already: {told['stopping']}"
    try:
        pid = int(launcher_of(run))
        process = os.pidfd_open(pid)
    except (OSError, ValueError):
        raise _elsewhere(run) from None
    try:
        # the process that the descriptor is of, and no later one with its number; on a shared file system the number
        # may be that of a process on another machine
        if not _has_open(pid, run.path / "lock"):
            raise _elsewhere(run)
        with _asked_once(run, pid) as first:
            if not first:
                return f"{run.name} has been asked to end already"
            signal.pidfd_send_signal(process, signal.SIGINT)
    except (ProcessLookupError, PermissionError):
        raise _elsewhere(run) from None
    finally:
        os.close(process)
    return f"{run.name} was asked to end with a checkpoint"


@contextmanager
def _asked_once(run: RunDirectory, pid: int) -> Iterator[bool]:
    """Whether this process is the first one to ask the launcher; others wait while inside. An error inside, such as
    that the launcher is gone, leaves it as one that was not asked."""
    launcher = f"{pid} {_started(pid)}\n".encode()
    try:
        file = os.open(run.path / REQUEST, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:  # a full disk, or a directory that cannot be written to
        yield True
        return
    try:
        with suppress(OSError):  # some network file systems have no locks
            fcntl.flock(file, fcntl.LOCK_EX)
        first = os.pread(file, len(launcher) + 1, 0) != launcher
        yield first
        if first:
            os.ftruncate(file, 0)
            os.pwrite(file, launcher, 0)
    finally:
        os.close(file)


def _started(pid: int) -> str:
    """When a process was started: with its number it is one of a kind."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def launcher_of(run: RunDirectory) -> str:
    """The process that holds, or has held, the lock; empty if that is not known."""
    try:
        return (run.path / "lock").read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _has_open(pid: int, path: Path) -> bool:
    """Whether a process of this machine, of this user, has a file open."""
    wanted = path.stat()
    with suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                found = descriptor.stat()
                if (found.st_dev, found.st_ino) == (wanted.st_dev, wanted.st_ino):
                    return True
    return False


def _elsewhere(run: RunDirectory) -> UsageError:
    return UsageError(
        f"the launcher of {run.name} is no process of yours on this machine: end the run where it was started, with "
        "Ctrl-C or SIGTERM"
    )
