"""What the system refuses a process for want of room, in words: which limit it is, and how to raise it."""

from __future__ import annotations

import errno

_LIMITS = {
    errno.EMFILE: "open files: raise the limit with `ulimit -n`, or train with fewer roles",
    errno.ENFILE: "open files: all processes of this machine together have reached its limit (fs.file-max)",
    errno.ENOMEM: "memory: raise the limit with `ulimit -v`, or train with fewer roles or a smaller model",
    errno.EAGAIN: "processes or threads: raise the limit with `ulimit -u`, or train with fewer roles",
    errno.ENOSPC: "room: a disk, or the memory for shared files (/dev/shm), is full",
    errno.EDQUOT: "room: this user's share of the disk is used up",
    errno.EFBIG: "room in one file: raise the limit with `ulimit -f`",
}


def explained(error: BaseException) -> str | None:
    """The limit that an error comes from, as a sentence; None for an error of another kind."""
    if isinstance(error, MemoryError):
        return f"the system gave no more {_LIMITS[errno.ENOMEM]}"
    if isinstance(error, OSError) and error.errno in _LIMITS:
        return f"the system gave no more {_LIMITS[error.errno]} ({error.strerror})"
    if isinstance(error, RuntimeError) and "can't start new thread" in str(error):
        return f"the system gave no more {_LIMITS[errno.EAGAIN]} ({error})"
    return None
