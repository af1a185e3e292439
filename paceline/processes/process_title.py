"""The name of a process in the lists of processes."""

from __future__ import annotations

import ctypes
from pathlib import Path

_PR_SET_NAME = 15


def entitle(command: str, name: str) -> None:
    """Be `command` (`paceline role worker:1`) in the lists of processes: overwrite the command line where the kernel
    reads it. `name`: the short one of the kernel, of 15 characters."""
    title = command.encode()
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode()[:15])
    try:
        fields = Path("/proc/self/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        start, end = int(fields[45]), int(fields[46])
    except (OSError, ValueError, IndexError):
        return
    if start and end - start > 1:
        ctypes.memmove(start, title[: end - start - 1].ljust(end - start, b"\0"), end - start)
