"""The processes of one worker as a group of torch.distributed, with Gloo over loopback."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

LONGEST = timedelta(minutes=10)  # of one operation; the death of a process is noticed at once, by its connection
INTERFACE = "GLOO_SOCKET_IFNAME"


def meet(rank: int, processes: int, store: int, longest: timedelta = LONGEST) -> None:
    """Form the default group of torch.distributed. `store`: the descriptor of anonymous memory that all of them have,
    in which they tell each other their addresses: no port is open for that."""
    with loopback():
        met = FileStore(f"/proc/self/fd/{store}", processes)
        dist.init_process_group("gloo", store=met, rank=rank, world_size=processes, timeout=longest)


@contextmanager
def loopback() -> Iterator[None]:
    """The processes of a worker are on one machine: Gloo listens on loopback only. The variable is put back, because
    the worker's means may use Gloo between machines."""
    before = os.environ.get(INTERFACE)
    os.environ[INTERFACE] = "lo"
    try:
        yield
    finally:
        if before is None:
            del os.environ[INTERFACE]
        else:
            os.environ[INTERFACE] = before
