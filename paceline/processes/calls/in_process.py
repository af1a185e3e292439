"""Calls inside one process: a script that runs alone is its own server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from paceline.config import build
from paceline.errors import Deadlock, SchemeError
from paceline.ops import Call, mapped
from paceline.processes.calls.client import CallClient, Stopped
from paceline.processes.calls.mailbox import SAVE, SET, Mailbox
from paceline.processes.memory import snapshot
from paceline.processes.memory.board import RUNNING, STOP, STOPPING
from paceline.processes.memory.run_memory import RunMemory
from paceline.runtime.call_scheduler import CallScheduler


class InProcess(CallClient):
    """Calls of the only worker to the call scheduler in its own process. `atomic=False` methods work as elsewhere."""

    def __init__(self, memory: RunMemory) -> None:
        super().__init__(memory, 0, _never)
        self.scheduler = CallScheduler(memory.scheme, memory.server_state(), 1, memory.ledger("ledger.0."))
        self._calls: dict[int, Call[Any]] = {}  # under way, by mailbox
        self._results: dict[int, Any] = {}

    def call(self, call: Call[Any]) -> Any:
        if not call.method.atomic:
            return super().call(call)
        return self.collect(self.post(call))

    def post(self, call: Call[Any], *, ahead: bool = False) -> Mailbox:
        board = self.memory.board
        if board.run[STOP]:
            raise Stopped  # a server takes no more calls either
        if not self._free:
            raise SchemeError("the worker has too many calls under way; await some before it starts another")
        mailbox = self._free.pop()
        home = self.scheduler.state.x.device
        args = tuple(arg.to(home) if isinstance(arg, Tensor) else arg for arg in call.args)
        self._calls[mailbox.index] = call = Call(call.method, args)
        for answer in self.scheduler.submit(0, call, mailbox):
            self._results[answer.ticket.index] = answer.result
        if 0 <= board.get("goal") <= self.scheduler.state.v and board.run[STOP] == RUNNING:
            self.memory.stop(STOPPING)
        return mailbox

    def collect(self, mailbox: Mailbox) -> Any:
        call = self._calls.pop(mailbox.index)
        if mailbox.index not in self._results:
            raise Deadlock(f"the only worker waits for {self.scheduler.explain(call)}")
        self._free.append(mailbox)
        return mapped(lambda tensor: tensor.to(self.device), self._results.pop(mailbox.index))

    def special(self, kind: int, *args: Any) -> None:
        self.ask(kind, *args)

    def ask(self, kind: int, *args: Any) -> Mailbox:
        if kind == SAVE:
            snapshot.keep_shard(self.memory, 0)
        elif kind == SET:
            hyper = dict(zip(args[::2], args[1::2], strict=True))
            self.memory.save_overrides(self.memory.overrides | hyper)
            self.memory.scheme = self.scheduler.scheme = build.scheme_of(self.memory.scheme, hyper)
        return self._mailboxes[0]

    def ready(self, mailbox: Mailbox) -> bool:
        return True

    def forget(self) -> None:
        super().forget()
        self._calls.clear()
        self._results.clear()


def _never(ready: Callable[[], bool], what: str) -> None:
    raise Deadlock(f"the only worker waits for {what}")
