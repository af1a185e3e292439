"""Counts the bytes that a worker sends and receives, in every world: those of vectors and numbers, without headers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.ops import Call, Mean, Meet, Op, Packed, Pending, Receive, Send, Start, content, nbytes


class Traffic:
    """The bytes of one worker's calls and means. A mean is one vector sent and one received; of compressed vectors the
    worker receives those of all other members. `uncompressed`: what `sent` would be without a compressor."""

    __slots__ = ("_workers", "message", "received", "sent", "uncompressed")

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self.sent = self.received = self.uncompressed = 0
        self.message: int | None = None  # bytes of a compressed message of another worker; None: it has a vector

    def outgoing(self, op: Op[Any], whole: Op[Any]) -> None:
        """Count an operation that a worker begins; `whole`: the one before compression."""
        inner = op.op if isinstance(op, Start) else op
        if type(inner) is Mean and inner.packed is None and whole is op:  # the usual mean, in few steps
            size = inner.v.nbytes
            self.sent += size
            self.uncompressed += size
            return
        if type(inner) is Call and inner.packed is None:
            size = nbytes(inner.args)  # not the same each time: a fragment may be shorter than the one before
            self.sent += size
            self.uncompressed += size
            return
        match inner:
            case Meet(v, to):
                self.sent += len(to) * nbytes(content(inner))
                self.uncompressed += len(to) * nbytes(v)
            case Call() | Mean():
                self.sent += nbytes(content(inner))
                self.uncompressed += nbytes(content(whole.op if isinstance(whole, Start) else whole))

    def incoming(self, op: Op[Any], answer: Any) -> None:
        """Count the result of an operation that a worker has waited for."""
        inner = op.op if isinstance(op, Pending) else op
        if type(inner) is Mean and inner.packed is None:
            self.received += inner.v.nbytes
            return
        if type(inner) is Call:
            if answer is not None:
                self.received += nbytes(answer)
            return
        match inner:
            case Mean(among=among, packed=Packed(payloads)) if payloads:
                members = self._workers if among is None else len(among)
                self.received += (members - 1) * nbytes(payloads[0])
            case Mean(v):
                self.received += nbytes(v)
            case Meet():
                self.received += len(answer.vectors) * nbytes(content(inner))
            case Send(_, v) if answer:  # not one that was refused
                self.sent += nbytes(content(inner))
                self.uncompressed += nbytes(v)
            case Receive():
                self.received += sum(nbytes(one.v) if self.message is None else self.message for one in answer)


def traffic_of(workers: Sequence[Traffic]) -> dict[str, list[int]]:
    """The bytes of all workers, in the order of ranks."""
    return {name: [getattr(one, name) for one in workers] for name in ("sent", "received", "uncompressed")}
