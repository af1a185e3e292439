"""Processes that a script has started inside its worker: the worker dies with one that is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

SETTLE = 2.0  # seconds

_watches: list[threading.Thread] = []


def watch(process: subprocess.Popen[bytes], rank: int, met: threading.Event) -> None:
    """Die with a process that is killed, or that ends before `met`: then rank 0 would wait for it."""
    thread = threading.Thread(target=_watch, args=(process, rank, met), name=f"inner rank {rank}", daemon=True)
    _watches.append(thread)
    thread.start()


def settle() -> None:
    """The script has raised an error: perhaps because a process was killed, whose connections are closed a moment
    before this process can know of it. Give it the time to die of that instead."""
    until = time.monotonic() + SETTLE
    for thread in _watches:
        thread.join(max(0.0, until - time.monotonic()))


def _watch(process: subprocess.Popen[bytes], rank: int, met: threading.Event) -> None:
    """A process that ends by an error closes its connections, which raises an error in rank 0's next operation."""
    code = process.wait()
    if code < 0 or (code and not met.is_set()):
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        print(f"inner rank {rank} {how}: the worker ends", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
