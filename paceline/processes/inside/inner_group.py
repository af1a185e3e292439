"""The processes inside a worker, seen from its first one, which is the worker's role: it starts them, gives them
slices of its batches, and adds up what they compute. They die with it; when one of them dies, the worker dies too, and
is restarted like any killed worker."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping
from typing import NoReturn

from torch import Tensor

from paceline.errors import RunError, UsageError
from paceline.inside.batch_slices import slices
from paceline.inside.kind import Inside
from paceline.inside.sharded_model import ShardedModel
from paceline.inside.sliced_task import SlicedTask
from paceline.processes import process_title
from paceline.processes.inside import inner_process, slice_messages
from paceline.processes.inside.shared_slices import SharedSlices
from paceline.processes.memory.segment import anonymous
from paceline.processes.parent_death import die_with_parent
from paceline.state import Vector
from paceline.task import Batch

EXPLAINED = 5.0  # seconds for a process to say why it has left an operation of all


class InnerGroup:
    """The processes of a worker beside its first one. They are forked before the worker has computed anything."""

    def __init__(
        self,
        inside: Inside,
        owner: str,
        make: Callable[[], SlicedTask],
        say: Callable[[str], None],
        leave: Callable[[], None],
    ) -> None:
        """`make` makes the task in each process; `leave` closes there what belongs to the first process alone."""
        self.inside, self._owner, self._say = inside, owner, say
        self.memory, self.store = anonymous("paceline-inside"), anonymous("paceline-inside-store")
        self._members: list[tuple[int, socket.socket]] = []
        for number in range(1, inside.processes):
            self._members.append(self._forked(number, make, leave))

    def _forked(
        self, number: int, make: Callable[[], SlicedTask], leave: Callable[[], None]
    ) -> tuple[int, socket.socket]:
        ours, theirs = socket.socketpair()
        parent = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", DeprecationWarning
            )  # libraries' idle threads take care of a fork themselves
            pid = os.fork()
        if pid:
            theirs.close()
            return pid, ours
        code = 1
        try:
            die_with_parent(signal.SIGKILL, parent)
            process_title.entitle(f"paceline inside {self._owner} {number}", f"pl {self._owner} {number}")
            for connection in (ours, *(one for _, one in self._members)):
                connection.close()
            leave()
            code = inner_process.serve(theirs, number, self.memory, self.store, make)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def send(self, messages: list[tuple[dict[str, int], Batch]]) -> None:
        """Give each process its slice."""
        for number, (message, part) in enumerate(messages, 1):
            try:
                slice_messages.send(self._members[number - 1][1], message, part)
            except (BrokenPipeError, ConnectionResetError):
                self._explain(number)

    def losses(self) -> list[float]:
        """Wait until all have computed their slices."""
        return [self._loss(number) for number in range(1, self.inside.processes)]

    def _loss(self, number: int) -> float:
        heard = slice_messages.receive(self._members[number - 1][1])
        if heard is None:
            self._lost(number)
        message, _ = heard
        if "error" in message:
            raise (UsageError if message["usage"] else RunError)(
                f"process {number} inside {self._owner}: {message['error']}"
            )
        return float(message["loss"])

    def _explain(self, number: int) -> NoReturn:
        """A process has closed its end: it may have sent an error before."""
        self._loss(number)
        self._lost(number)

    def explain(self) -> None:
        """An operation of all processes has failed here. If one of them has sent an error, or has died, that is why."""
        connections = {one: number for number, (_, one) in enumerate(self._members, 1)}
        ready, _, _ = select.select(list(connections), [], [], EXPLAINED)
        for one in ready:
            self._explain(connections[one])

    def _lost(self, number: int) -> NoReturn:
        """A process has died: die as well. The launcher restarts a killed worker, with all its processes."""
        pid = self._members[number - 1][0]
        with contextlib.suppress(ChildProcessError):
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            how = f"was killed by signal {-status}" if status < 0 else f"ended with code {status}"
            text = f"process {number} inside {self._owner} (pid {pid}) {how}: the whole worker ends"
            print(text, file=sys.stderr, flush=True)
            self._say(text)
        os.kill(os.getpid(), signal.SIGKILL)
        raise SystemExit(1)  # not reached: SIGKILL cannot be refused

    def close(self) -> None:
        """End the processes."""
        for pid, connection in self._members:
            connection.close()
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
        self._members.clear()
        for descriptor in (self.memory, self.store):
            with contextlib.suppress(OSError):
                os.close(descriptor)

    @property
    def pids(self) -> list[int]:
        return [pid for pid, _ in self._members]


class LedTask(SlicedTask):
    """The sliced task of a worker whose slices are computed by its processes. The first slice is this process's."""

    def __init__(self, task: SlicedTask, group: InnerGroup) -> None:
        vars(self).update(vars(task))
        self._group = group
        self._shared: SharedSlices | None = None
        self._size = 0
        self._sharded = ShardedModel(task, 0, group.store) if group.inside.kind == "fsdp" else None

    def grad(
        self, x: Vector, batch: Batch, out: Vector | None = None, buffers: Mapping[str, Tensor] | None = None
    ) -> tuple[float, Vector]:
        out = self._out if out is None else out
        parts, group = slices(batch, self.inside.processes), self._group
        held = self.buffers() if buffers is None else buffers
        if self._shared is None:
            self._shared, self._size = SharedSlices.laid_out(group.memory, self.inside, x, held)
        shared = self._shared
        shared.x.copy_(x)
        for name, one in held.items():
            shared.buffers[name].copy_(one)
        group.send([({"memory": self._size}, part) for part in parts[1:]])
        if self._sharded is None:
            loss, _ = self.slice_gradient(x, parts[0], out, buffers)
        else:
            loss = self._together(self._sharded, x, parts[0], shared.row(0), buffers)
        losses = [loss, *group.losses()]
        if self._sharded is None:
            for number in range(1, self.inside.processes):
                out.add_(shared.row(number))
        else:
            out.copy_(shared.row(0))
        self.finish(out)
        return sum(losses), out

    def _together(
        self, sharded: ShardedModel, x: Vector, part: Batch, out: Vector, buffers: Mapping[str, Tensor] | None
    ) -> float:
        try:
            return sharded.gradient(x, part, out, buffers)
        except RuntimeError:
            self._group.explain()
            raise
