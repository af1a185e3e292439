"""How the roles of a run share the cores of one machine.

A server works for a moment and sleeps; a worker computes. Where there are fewer cores than roles, the kernel should let
a woken server onto a core at once, and must not throw it off because it has just woken a worker. No privilege is
needed for either; a kernel that does not know one of them leaves it as it is.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform

_SYS_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
_SERVER_SLICE = 100_000  # ns, the shortest that the kernel takes: who asks for little runs first


class _Attributes(ctypes.Structure):
    """The kernel's struct sched_attr."""

    _fields_ = (
        ("size", ctypes.c_uint32),
        ("policy", ctypes.c_uint32),
        ("flags", ctypes.c_uint64),
        ("nice", ctypes.c_int32),
        ("priority", ctypes.c_uint32),
        ("runtime", ctypes.c_uint64),
        ("deadline", ctypes.c_uint64),
        ("period", ctypes.c_uint64),
    )


def compute() -> None:
    """This process computes: when it is woken, whoever runs may finish first."""
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def serve() -> None:
    """This process works in short moments: it asks for short turns, and so gets them soon."""
    number = _SYS_SCHED_SETATTR.get(platform.machine())
    if number is None:
        return
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    attributes = _Attributes(ctypes.sizeof(_Attributes), os.SCHED_OTHER, 0, nice, 0, _SERVER_SLICE, 0, 0)
    ctypes.CDLL(None).syscall(number, 0, ctypes.byref(attributes), 0)
