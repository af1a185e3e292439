"""How the roles of a run share the cores of one machine.

A server works for a moment and sleeps; a worker computes. Where there are fewer cores than roles, a server that is
woken should get a core at once, and keep it although it has just woken a worker. Neither setting needs a privilege; a
kernel that does not know it ignores it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import struct

_SYS_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
_SERVER_SLICE = 100_000  # ns, the shortest that the kernel takes: a process with a short slice runs first


# the kernel's struct sched_attr: size, policy, flags, nice, priority, runtime, deadline, period
_ATTRIBUTES = struct.Struct("IIQiIQQQ")


def compute() -> None:
    """This process computes: when it is woken, it does not preempt the process that runs."""
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def serve() -> None:
    """This process works for short moments: it asks for a short time slice, so the kernel runs it soon."""
    number = _SYS_SCHED_SETATTR.get(platform.machine())
    if number is None:
        return
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    attributes = _ATTRIBUTES.pack(_ATTRIBUTES.size, os.SCHED_OTHER, 0, nice, 0, _SERVER_SLICE, 0, 0)
    ctypes.CDLL(None).syscall(number, 0, attributes, 0)
