"""`--profile`: the parts of a role, measured. Without it every method gives back what it gets, and nothing is wrapped.

A part is measured where it is made: the methods of that one object are replaced by timed ones.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, ParamSpec, TypeVar

from paceline.hook import Hook
from paceline.hooks.profiler import Profiler
from paceline.ops import Call
from paceline.processes.calls.client import CallClient
from paceline.processes.calls.locked_client import LockedClient
from paceline.processes.memory.run_memory import RunMemory
from paceline.processes.memory.wakeup import Wakeup
from paceline.processes.roles.checkpointing import Checkpointing
from paceline.processes.roles.step_trace import StepTrace
from paceline.processes.roles.stopwatch import Category, Stopwatch
from paceline.processes.roles.waiting import Waiting
from paceline.processes.transport import Means
from paceline.runs.order_log import OrderLogWriter
from paceline.runtime.hook_calls import HookCalls
from paceline.scheme import ServerMethod

P = ParamSpec("P")
R = TypeVar("R")
Part = TypeVar("Part")
Method = ServerMethod[Any, Any]
Turn = AbstractContextManager[Any]


class MeasuredTurn:
    """A lock whose wait is measured."""

    def __init__(self, turn: Turn, enter: Callable[[], Any]) -> None:
        self._turn, self._enter = turn, enter

    def __enter__(self) -> Any:
        return self._enter()

    def __exit__(self, *error: Any) -> bool | None:
        return self._turn.__exit__(*error)


class NotProfiled:
    """A role that is not measured."""

    def start(self) -> None:
        """The role's work begins."""

    def stop(self) -> None:
        """Its work has ended."""

    def timed(self, category: Category, function: Callable[P, R]) -> Callable[P, R]:
        """A function, measured."""
        return function

    def part(self, part: Part, **categories: Category) -> Part:
        """A part of the role with the methods that are named measured."""
        return part

    def methods(self, methods: Iterable[Method]) -> list[Method]:
        """The scheme's server methods, measured."""
        return list(methods)

    def calls(self, calls: CallClient) -> CallClient:
        """A worker's calls, measured: also the server methods that it performs itself."""
        return calls

    def turn(self, turn: Turn) -> Turn:
        """The lock that workers of one process share, with the wait for it measured."""
        return turn

    def script(self, session: Part) -> None:
        """The session is one of a script: all that is outside of it is the script's own loop."""

    def own_hooks(self) -> list[Hook]:
        """Hooks that the worker has besides those that it was given."""
        return []

    def waits(self, waiting: Waiting) -> Waiting:
        names = ("wait_for", "pause", "wait_for_updates", "wait_for_goal")
        return self.part(waiting, **dict.fromkeys(names, Category.WAIT))

    def means(self, means: Means) -> Means:
        names = ("mean", "arrive", "leave", "answer")
        return self.part(means, **dict.fromkeys(names, Category.COPY), wait=Category.WAIT)

    def journal(self, journal: OrderLogWriter | None) -> OrderLogWriter | None:
        return (
            self.part(journal, **dict.fromkeys(("add", "flush", "record", "text"), Category.RECORD))
            if journal
            else None
        )

    def checkpoints(self, checkpoints: Checkpointing) -> Checkpointing:
        return self.part(checkpoints, **dict.fromkeys(("ask", "between_steps"), Category.CHECKPOINT))

    def hooks(self, hooks: HookCalls) -> HookCalls:
        names = ("begin", "before_step", "feed", "after_gradient", "after_step")
        return self.part(hooks, **dict.fromkeys(names, Category.HOOKS))

    def batches(self, supply: Part) -> Part:
        return self.part(supply, **dict.fromkeys(("next", "prepare"), Category.DATA))


NOT_PROFILED = NotProfiled()


class Profiled(NotProfiled):
    """A role that is measured."""

    def __init__(self, stopwatch: Stopwatch, wakeup: Wakeup, tracing: bool) -> None:
        self._stopwatch, self._tracing = stopwatch, tracing
        self._base = Category.OTHER  # what the role spends time on outside of all measured parts
        self._methods: dict[str, Method] = {}
        self.part(wakeup, wait=Category.WAIT, look=Category.COPY, ring=Category.SIGNAL, ring_all=Category.SIGNAL)
        attend = wakeup.attend

        def attended(descriptor: int, take_in: Callable[[], None], *events: int) -> None:
            attend(descriptor, stopwatch.timed(Category.COPY, take_in), *events)

        wakeup.attend = attended  # type: ignore[method-assign, assignment]

    def start(self) -> None:
        self._stopwatch.start(self._base)

    def stop(self) -> None:
        self._stopwatch.stop()

    def timed(self, category: Category, function: Callable[P, R]) -> Callable[P, R]:
        return self._stopwatch.timed(category, function)

    def part(self, part: Part, **categories: Category) -> Part:
        for name, category in categories.items():
            setattr(part, name, self.timed(category, getattr(part, name)))
        return part

    def methods(self, methods: Iterable[Method]) -> list[Method]:
        return [self._method(one) for one in methods]

    def _method(self, method: Method) -> Method:
        if method.name not in self._methods:
            self._methods[method.name] = measured = copy.copy(method)
            measured.function = self.timed(Category.UPDATE, method.function)  # type: ignore[assignment]
        return self._methods[method.name]

    def calls(self, calls: CallClient) -> CallClient:
        copying = dict.fromkeys(("collect", "carry_on", "special", "ask", "show"), Category.COPY)
        self.part(calls, **copying, flush=Category.SIGNAL)
        if isinstance(calls, LockedClient):
            self.part(calls.server, outwait=Category.WAIT)
            calls.server.methods = self.methods(calls.server.methods)  # of calls of others, whose guards are true now
            if calls.server.log is not None:
                self.part(calls.server.log, add=Category.RECORD, text=Category.RECORD)
        for name in ("call", "post"):
            setattr(calls, name, self.timed(Category.COPY, self._with_methods(getattr(calls, name))))
        return calls

    def turn(self, turn: Turn) -> Turn:
        return MeasuredTurn(turn, self.timed(Category.WAIT, turn.__enter__))

    def _with_methods(self, send: Callable[..., Any]) -> Callable[..., Any]:
        def sent(call: Call[Any], **how: Any) -> Any:
            return send(Call(self._method(call.method), call.args, call.packed, call.into), **how)

        return sent

    def script(self, session: Part) -> None:
        self._base = Category.GRADIENT
        self.part(session, give=Category.OTHER, advance=Category.OTHER)

    def own_hooks(self) -> list[Hook]:
        return [StepTrace(self._stopwatch)] if self._tracing else []


def of_worker(memory: RunMemory, rank: int, hooks: Iterable[Hook]) -> NotProfiled:
    """The profile of a worker, if the run has any. The hook `profiler` traces in place of it."""
    if not memory.plan.profile:
        return NOT_PROFILED
    first = rank < memory.plan.hosts  # of the workers of one process: torch has one profiler for all
    tracing = first and not any(isinstance(hook, Profiler) for hook in hooks)
    return Profiled(Stopwatch(memory.board.times[rank]), memory.wakeup, tracing)


def of_server(memory: RunMemory, shard: int) -> NotProfiled:
    if not memory.plan.profile:
        return NOT_PROFILED
    times = memory.board.times[memory.board.server_place(shard)]
    return Profiled(Stopwatch(times), memory.wakeup, tracing=False)
