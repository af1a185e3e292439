"""What a process inside a worker does: it computes the gradient of a slice when the worker's first process asks."""

from __future__ import annotations

import signal
import socket
import traceback
from collections.abc import Callable

import torch

from paceline.errors import UsageError
from paceline.inside.sharded_model import ShardedModel
from paceline.inside.sliced_task import SlicedTask
from paceline.processes.inside import slice_messages
from paceline.processes.inside.shared_slices import SharedSlices
from paceline.processes.memory.segment import Segment
from paceline.signals import ASKED


def serve(connection: socket.socket, number: int, memory: int, store: int, make: Callable[[], SlicedTask]) -> int:
    """Compute slices until the first process closes its end; gives the exit code. An error is sent to it."""
    for one in ASKED:  # the launcher decides; terminals, shells and mpirun send these to every process
        signal.signal(one, signal.SIG_IGN)
    try:
        task = make()
        sharded = ShardedModel(task, number, store) if task.inside.kind == "fsdp" else None
        _answer(connection, number, memory, task, sharded)
    except Exception as error:
        traceback.print_exc()
        text = f"{type(error).__name__}: {error}" if not isinstance(error, UsageError) else str(error)
        slice_messages.send(connection, {"error": text, "usage": isinstance(error, UsageError)})
        return 1
    return 0


def _answer(
    connection: socket.socket, number: int, memory: int, task: SlicedTask, sharded: ShardedModel | None
) -> None:
    shared: SharedSlices | None = None
    with torch.no_grad():
        while (heard := slice_messages.receive(connection)) is not None:
            message, part = heard
            if shared is None:
                shared = SharedSlices(Segment(memory, message["memory"]))
            assert part is not None
            row, buffers = shared.row(number), {name: one.clone() for name, one in shared.buffers.items()}
            if sharded is not None:
                loss = sharded.gradient(shared.x, part, row, buffers or None)
            else:
                loss, _ = task.slice_gradient(shared.x, part, row, buffers or None)
            slice_messages.send(connection, {"loss": loss})
