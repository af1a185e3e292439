"""Advances a worker's step from one await to the next. The caller performs the operations that it awaits; whether an
operation can be performed at all is checked here, for every world."""

from __future__ import annotations

import math
from collections.abc import Coroutine, Iterator
from pathlib import Path
from types import CoroutineType
from typing import Any

import torch

from paceline.errors import PacelineError, SchemeError
from paceline.ops import Call, Grad, Mean, Meet, Op, Pending, Receive, Send, Sent, Sleep, Start
from paceline.runtime.compression import Compression
from paceline.runtime.stored_results import StoredResults
from paceline.runtime.traffic import Traffic
from paceline.scheme import Scheme
from paceline.worker import Worker


class StepDriver:
    """One worker's coroutine. `advance(answer)` runs to the next await and gives the operation, or None at the end.

    Torch's grad mode at an await (`with torch.enable_grad(): await …`) belongs to the step: it is saved here and
    restored when the step continues, so it never leaks to the next worker.
    """

    __slots__ = (
        *("_compression", "_coroutine", "_grad_mode", "_stored", "_under_way", "_worker", "awaits", "scheme"),
        "traffic",
    )

    def __init__(self, scheme: Scheme, worker: Worker, *, into_cells: bool = False) -> None:
        """`into_cells`: operations say which cells their results will be stored in."""
        self.scheme = scheme
        self._worker = worker
        self._coroutine: Coroutine[Op[Any], Any, None] | None = None
        self._grad_mode = False
        self.awaits = 0  # in this step
        self.traffic = Traffic(worker.workers)
        self._under_way: Op[Any] | None = None  # other than a gradient
        self._compression: Compression | None = None
        self._stored = StoredResults(worker) if into_cells and scheme.compressor is None else None
        if scheme.compressor is not None:
            self._compression = Compression(scheme, worker, scheme.compressor)
            self.traffic.message = self._compression.message_bytes()

    @property
    def running(self) -> bool:
        """Inside a step, at an await."""
        return self._coroutine is not None

    def begin(self) -> None:
        """Create the coroutine of the next step; nothing of it runs yet."""
        step = self.scheme.rates_at(self._worker.state).step(self._worker)
        if type(step) is not CoroutineType and not isinstance(step, Coroutine):  # the second question is slow
            raise SchemeError(f"{type(self.scheme).__name__}.step must be 'async def'")
        self._coroutine = step
        self._grad_mode = False
        self._under_way = None
        self.awaits = 0

    def advance(self, answer: Any) -> Op[Any] | None:
        coroutine = self._coroutine
        assert coroutine is not None, "advance() outside a step"
        if self._under_way is not None:
            self.traffic.incoming(self._under_way, answer)
            if type(self._under_way) is Send:
                answer = Sent(bool(answer))
            self._under_way = None
        if self._compression is not None and self.awaits:
            more, answer = self._compression.incoming(answer)
            if more is not None:
                self.awaits += 1
                self._under_way = more
                self.traffic.outgoing(more, _NOTHING)
                return more
        outside = torch.is_grad_enabled()
        if outside != self._grad_mode:  # asking is ten times cheaper than setting
            torch.set_grad_enabled(self._grad_mode)
        try:
            op = coroutine.send(answer)
        except StopIteration:
            self._coroutine = None
            if not self.awaits:
                raise SchemeError(f"{self._place()}: step() ended without awaiting anything") from None
            return None
        except PacelineError as error:
            error.add_note(f"in {self._place()} at {_line_of(error)}")
            raise
        except Exception as error:
            foreign = _foreign_await(error)
            if foreign:
                raise SchemeError(f"{self._place()}, {_line_of(error)}: {foreign}") from error
            error.add_note(f"in {self._place()} at {_line_of(error)}")
            raise
        finally:
            self._grad_mode = torch.is_grad_enabled()
            if self._grad_mode != outside:
                torch.set_grad_enabled(outside)
        if type(op) is Grad and op.until is None and op.within is None:  # the usual one: nothing of it can be wrong
            self.awaits += 1
            return op
        if not isinstance(op, Op):
            chain = list(_chain(coroutine))
            names = [inner.__qualname__ for inner in chain[1:]]
            names.append(getattr(chain[-1].cr_await, "__qualname__", type(op).__name__))
            line = _line(coroutine)
            self.close()
            raise SchemeError(f"{self._place()}, {line}: awaited '{' -> '.join(names)}'; {_CLOSED_SET}")
        self.awaits += 1
        if not self._usual(op) and (wrong := self._misuse(op)):
            raise SchemeError(f"worker:{self._worker.rank} {wrong}")
        if self._stored is not None and ((type(op) is Call and op.method.reads) or type(op) is Mean):
            op.into = self._stored.places(coroutine)
        whole = op
        if self._compression is not None:
            op = self._compression.outgoing(op)
        self.traffic.outgoing(op, whole)
        self._under_way = None if isinstance(op, Start) else op
        return op

    def _usual(self, op: Op[Any]) -> bool:
        """Whether an operation can be performed, asked in few steps: True for a call of an own method and for a mean
        over all workers; False if `_misuse` has to look at it."""
        if type(op) is Call:
            return self.scheme.methods.get(op.method.name) is op.method
        return type(op) is Mean and op.among is None

    def _misuse(self, op: Op[Any]) -> str | None:
        """Why an operation cannot be performed."""
        match op.op if isinstance(op, Start) else op:
            case Call(method) if self.scheme.methods.get(method.name) is not method:
                return f"called {method.name}(), which is not a method of its own scheme"
            case Mean(among=tuple(among)) if self._worker.rank not in among:
                return f"asks for a mean among {among}, where it is not a member"
            case Meet() as meet if wrong := self._no_member(meet):
                return f"comes to a meeting {wrong}"
            case (Send() | Receive()) as post if wrong := self._no_post(post, started=post is not op):
                return wrong
            case Grad(until=int()) if not self.scheme.methods:
                return "asks for a gradient until a version of the server, and its scheme has no server"
            case Grad(within=float(seconds)) if not seconds > 0:
                return f"asks for a gradient within {seconds} seconds; give a number above 0"
            case Sleep(seconds) if not (seconds >= 0 and math.isfinite(seconds)):
                return f"would sleep {seconds} seconds; give a finite number, at least 0"
            case (Start() | Pending()) as begun if begun is not op:
                return f"starts a {type(begun).__name__}, which cannot be started"
            case _:
                return None

    def _no_member(self, op: Meet) -> str | None:
        members = range(self._worker.workers) if op.among is None else op.among
        if self._worker.rank not in members:
            return f"among {op.among}, where it is not a member"
        outside = [rank for rank in (*op.to, *op.of) if rank not in members]
        return f"with worker {outside[0]}, which is not a member of it" if outside else None

    def _no_post(self, op: Send | Receive, *, started: bool) -> str | None:
        """Why a message cannot be sent, or messages cannot be received."""
        worker = self._worker
        if not self.scheme.sends_messages():
            return f"uses w.{type(op).__name__.lower()}, and sends_messages() of its scheme says that it does not"
        if started:
            return f"starts a {type(op).__name__}, which nobody waits for: await it"
        if isinstance(op, Receive):
            return None
        if op.to == worker.rank or not 0 <= op.to < worker.workers:
            return f"sends a message to worker {op.to}: it is none of the other {worker.workers - 1}"
        x = worker.state.x
        if op.v.shape != x.shape or op.v.dtype != x.dtype:
            return f"sends {op.v.numel()} numbers of {op.v.dtype}; a message is like x: {x.numel()} of {x.dtype}"
        return None

    def close(self) -> None:
        """Abandon the step: its locals are lost, the worker's cells stay."""
        if self._coroutine is not None:
            outside = torch.is_grad_enabled()
            try:
                self._coroutine.close()
            finally:  # the step's own `with torch.enable_grad()` has restored the mode of the step
                torch.set_grad_enabled(outside)
                self._coroutine = None

    def line(self) -> str:
        """File and line at which the step waits, in the innermost coroutine."""
        return "its end" if self._coroutine is None else _line(list(_chain(self._coroutine))[-1])

    def _place(self) -> str:
        return f"worker:{self._worker.rank}, step {self._worker.t}"


_NOTHING = Sleep(0.0)
_CLOSED_SET = (
    "a step may await only w.grad, w.mean, w.meet, w.swap, w.send, w.receive, w.sleep, w.start, a pending operation, "
    "or a call of an @on_server method"
)


def _chain(coroutine: Any) -> Iterator[Any]:
    """A coroutine, the one that it awaits, and so on."""
    while getattr(coroutine, "cr_frame", None) is not None:
        yield coroutine
        coroutine = coroutine.cr_await


def _line(coroutine: Any) -> str:
    return f"{Path(coroutine.cr_frame.f_code.co_filename).name}:{coroutine.cr_frame.f_lineno}"


def _foreign_await(error: Exception) -> str | None:
    text = str(error)
    if isinstance(error, TypeError) and "await" in text:
        return f"{text}; {_CLOSED_SET}"
    if isinstance(error, RuntimeError) and "event loop" in text:
        return f"asyncio does not run here ({text}); {_CLOSED_SET}"
    return None


def _line_of(error: BaseException) -> str:
    """The line of the step itself: the frame below that of this file."""
    trace = error.__traceback__
    frame = trace.tb_next if trace is not None and trace.tb_next is not None else trace
    return f"{Path(frame.tb_frame.f_code.co_filename).name}:{frame.tb_lineno}" if frame else "an unknown line"
