"""The processes of one node's roles: starts, hears and reaps them, for the supervisor of the run or an agent."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from resource import struct_rusage
from typing import Any, NamedTuple

from paceline import signals
from paceline.config.plan import Plan
from paceline.processes.memory.board import Board
from paceline.processes.roles import evaluator
from paceline.processes.roles.control_channel import Control, Listener
from paceline.processes.roles.main import RoleContext, main
from paceline.processes.roles.roles import Role, ranks
from paceline.processes.supervisor.exec_role import become, packed
from paceline.processes.supervisor.fork import forked

Message = dict[str, Any]


@dataclass
class Child:
    """One role and the process that runs it now."""

    part: Role
    pid: int = 0  # 0: no process, or one on another node
    listener: Listener | None = None
    done: bool = False
    stopped_at: float = 0.0  # when it was seen stopped by a signal; 0: it is not
    progress_at_start: int = 0  # of the process that runs it now
    # what the launcher of the run decides with
    restarts: int = 0
    in_a_row: int = 0  # deaths without progress between them
    progress: dict[bool, int] = field(default_factory=dict)  # at its last death outside, inside a call
    starts_at: float = 0.0  # when an evaluator is restarted, if not at once
    failure: str = ""  # the error that an evaluator has sent


class Ended(NamedTuple):
    """A process that has ended."""

    child: Child
    code: int  # as `os.waitstatus_to_exitcode` gives it
    peak_rss: int  # KiB


Heard = Callable[[Child, Message], None]


class Children:
    """The running processes of this node. `selector` wakes at their messages, at their end, and at any signal."""

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self.running: list[Child] = []
        self._woken: socket.socket | None = None
        self._packed: int | None = None  # what roles in fresh interpreters get of the caller's objects

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Inside, any signal (also SIGCHLD) ends a `select`. Afterwards the selector is closed."""
        self._woken, wake = socket.socketpair()
        self._woken.setblocking(False)
        wake.setblocking(False)
        self.selector.register(self._woken, selectors.EVENT_READ)
        before = signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        try:
            with signals.handling({signal.SIGCHLD: lambda *_: None}):
                yield
        finally:
            signal.set_wakeup_fd(before)
            self.selector.close()
            self._woken.close()
            wake.close()
            if self._packed is not None and self._packed >= 0:
                os.close(self._packed)
            self._packed = None

    def select(self, timeout: float) -> None:
        """Wait for a message, the end of a process, or a signal."""
        self.selector.select(timeout)
        assert self._woken is not None
        with contextlib.suppress(BlockingIOError):
            while self._woken.recv(4096):
                pass

    def start(self, child: Child, context: RoleContext, leave: Callable[[], None]) -> None:
        """Fork a process for a role. `leave` closes there what belongs to this process alone."""
        part, plan, board = child.part, context.plan, context.board
        if plan.start == "exec" and self._packed is None:
            self._packed = packed(context)
        objects = self._packed

        def play(control: Control) -> int:
            for other in self.running:
                if other.listener is not None:
                    other.listener.connection.close()
            self.selector.close()
            leave()
            return main(part, context, control) if objects is None else become(part, context, control, objects)

        child.progress_at_start = progress_of(part, plan, board)
        child.pid, connection = forked(str(part), Path(plan.directory) / "logs" / f"{part.file}.log", play)
        child.listener = Listener(connection)
        self.selector.register(connection, selectors.EVENT_READ)
        self.running.append(child)
        if part.kind == "server":
            board.server_pid[part.index] = child.pid
        elif part.kind == "evaluator":
            board.evaluator_words[evaluator.PID] = child.pid
        for rank in ranks(part, plan):
            board.pid[rank] = child.pid

    def attend(self, heard: Heard) -> Iterator[Ended]:
        """Call `heard` with each message that has arrived, then give the processes that have ended: each has been
        removed from `running`, and its last messages have been heard."""
        for child in list(self.running):
            for message in child.listener.messages() if child.listener is not None else ():
                heard(child, message)
        for child in list(self.running):
            pid, status, usage = os.wait4(child.pid, os.WNOHANG) if child.pid else (0, 0, None)
            if pid and usage is not None:
                yield self._ended(child, status, usage, heard)

    def kill(self, child: Child) -> None:
        os.kill(child.pid, signal.SIGKILL)
        child.stopped_at = 0.0

    def kill_all(self, heard: Heard) -> list[Ended]:
        """Kill every process and wait for its end."""
        for child in self.running:
            os.kill(child.pid, signal.SIGKILL)
        return [self._ended(child, *os.wait4(child.pid, 0)[1:], heard) for child in list(self.running)]

    def _ended(self, child: Child, status: int, usage: struct_rusage, heard: Heard) -> Ended:
        assert child.listener is not None
        messages = child.listener.messages()
        self.selector.unregister(child.listener.connection)
        child.listener.connection.close()
        child.listener, child.pid, child.stopped_at = None, 0, 0.0
        self.running.remove(child)
        for message in messages:
            heard(child, message)
        return Ended(child, os.waitstatus_to_exitcode(status), usage.ru_maxrss)


def progress_of(part: Role, plan: Plan, board: Board) -> int:
    """A number that rises with each gradient of a worker, call of a server, evaluation of an evaluator."""
    if part.kind == "server":
        return int(board.performed[part.index])
    if part.kind == "evaluator":
        return int(board.evaluator_words[evaluator.STEP])
    return sum(board.gradients[rank] for rank in ranks(part, plan))
