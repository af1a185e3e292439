"""`paceline.inner_rank`: a worker with its own loop becomes several processes, for DDP or FSDP inside."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from datetime import timedelta

import torch
import torch.distributed as dist

from paceline.errors import UsageError
from paceline.inside import gloo_group
from paceline.inside.kind import MOST
from paceline.processes import process_title
from paceline.processes.inside import watched
from paceline.processes.memory.segment import anonymous
from paceline.processes.parent_death import die_with_parent
from paceline.signals import ASKED

WAITING = timedelta(days=1)  # of one operation: the others wait in one while rank 0 waits for other workers
TOLD = "PACELINE_INNER_RANK"  # rank, processes, descriptor, parent, threads: for the processes that are started here


def inner_rank(processes: int) -> int:
    """Make this worker several processes that run this script; gives the rank of this one among them.

        rank = paceline.inner_rank(2)       # torch.distributed is ready: a group of this worker's 2 processes

    Rank 0 is the worker: it alone calls `paceline.attach`, and gives the others what they need for a gradient by
    operations of torch.distributed; the others end the script when rank 0 tells them. They die with rank 0. If one of
    them is killed, the worker dies too, and is restarted like any killed worker. The group is Gloo over loopback; never
    tried on GPUs. See docs/inside.md.
    """
    if not 2 <= processes <= MOST:
        raise UsageError(f"inner_rank: a worker has from 2 to {MOST} processes, not {processes}")
    if dist.is_initialized():
        raise UsageError("inner_rank: this process is in a group of torch.distributed already; call inner_rank first")
    told = os.environ.pop(TOLD, "")
    if told:
        rank, asked, store, parent, threads = map(int, told.split())
        if asked != processes:
            raise UsageError(f"inner_rank: rank 0 asked for {asked} processes, rank {rank} for {processes}")
        die_with_parent(signal.SIGKILL, parent)
        for one in ASKED:  # the launcher decides; terminals and shells send these to every process
            signal.signal(one, signal.SIG_IGN)
        process_title.entitle(f"paceline inside {parent} {rank}", f"pl inside {rank}")
        torch.set_num_threads(threads)
        gloo_group.meet(rank, processes, store, WAITING)
        return rank
    store, met = anonymous("paceline-inner-rank"), threading.Event()
    for rank in range(1, processes):
        words = (rank, processes, store, os.getpid(), torch.get_num_threads())
        started = subprocess.Popen(
            [sys.executable, *sys.argv], env=os.environ | {TOLD: " ".join(map(str, words))}, pass_fds=[store]
        )
        watched.watch(started, rank, met)
    gloo_group.meet(0, processes, store, WAITING)
    met.set()
    return 0
