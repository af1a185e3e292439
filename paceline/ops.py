"""The operations that a step may await; there are no others. An operation is plain data; the driver performs it."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import Tensor

from paceline.state import Vector

if TYPE_CHECKING:
    from paceline.scheme import ServerMethod

R = TypeVar("R")
Group = tuple[int, ...]
MESSAGES = 4  # messages of one worker that may be under way
MESSAGE_CELLS = ("message_vectors", "message_numbers", "message_heads", "message_taken")  # runtime/messages.py


@dataclass(frozen=True, slots=True)
class Packed:
    """Compressed vectors, as they cross a network: the payload of each, by the place of the argument (a mean or a
    meeting has place 0). Where memory is shared, what they decode to crosses instead: the same bits. None at all: that
    is shorter than the payloads of all members of a mean."""

    payloads: dict[int, tuple[Any, ...]]


class Op(Generic[R]):
    """Awaiting an operation gives it to the driver; the result is the driver's answer."""

    __slots__ = ()

    def __await__(self) -> Generator[Op[Any], R, R]:
        return (yield self)


@dataclass(slots=True, eq=False)
class Grad(Op[Any]):
    """The gradient at x on the worker's next mini-batch. It is stopped, and None is its result, when the server's
    version has reached `until`, or `within` seconds have passed; then the next gradient is of the same mini-batch."""

    x: Vector
    until: int | None = None
    within: float | None = None


@dataclass(slots=True, eq=False)
class Call(Op[R]):
    """A call of an `@on_server` method; arguments and result cross by value."""

    method: ServerMethod[Any, Any]
    args: tuple[Any, ...]
    packed: Packed | None = None  # of compressed arguments: args hold what it decodes to
    into: tuple[Tensor | None, ...] = ()  # cells that the result will be stored in: it may be written there at once

    def __str__(self) -> str:
        shown = (
            f"{name}=<{value.numel()} numbers>" if isinstance(value, Tensor) else f"{name}={value!r}"
            for name, value in zip(self.method.parameters, self.args, strict=False)
        )
        return f"{self.method.name}({', '.join(shown)})"


@dataclass(slots=True, eq=False)
class Mean(Op[Vector]):
    """The weighted mean of v over the living workers (of `among`), with the same bits for all of them."""

    v: Vector
    weight: float = 1.0
    among: Group | None = None
    whole: bool = False  # v is not compressed
    packed: Packed | None = None  # of a compressed vector: v is what it decodes to
    fragment: int | None = None  # the number of the fragment that v is, in the scheme's `fragments_of`
    into: tuple[Tensor | None, ...] = ()  # the cell that the result will be stored in: it may be written there at once


@dataclass(frozen=True, slots=True, eq=False)
class Met:
    """What a worker takes from a meeting: who took part, and the vectors of those that it asked for, by rank."""

    present: Group
    vectors: dict[int, Vector]
    numbers: dict[int, float]  # of all that took part
    lost: Vector | None = None  # what the others did not get of the worker's own vector, as it was compressed


@dataclass(slots=True, eq=False)
class Meet(Op[Met]):
    """A meeting of the living workers (of `among`) that are at step t: a worker gives v to those of `to`, and gets the
    vectors of those of `of`. Nobody waits for a worker that has finished step t."""

    v: Vector
    to: Group
    of: Group
    t: int
    number: float = 1.0
    among: Group | None = None
    packed: Packed | None = None  # of a compressed vector: v is what it decodes to
    lost: Vector | None = None  # and this is the rest


@dataclass(frozen=True, slots=True, eq=False)
class PeerMessage:
    """A message that has come from another worker: its sender's rank, a vector and a number."""

    sender: int
    v: Vector
    number: float


@dataclass(frozen=True, slots=True, eq=False)
class Sent:
    """Whether a message leaves: `if await w.send(…)`."""

    leaves: bool
    lost: Vector | None = None  # what the receiver does not get of the vector, as it was compressed

    def __bool__(self) -> bool:
        return self.leaves


@dataclass(slots=True, eq=False)
class Send(Op[Sent]):
    """A message to another worker, which leaves when the step ends. Nobody waits for it. False: it was not sent."""

    to: int
    v: Vector
    number: float = 1.0
    packed: Packed | None = None  # of a compressed vector: v is what it decodes to


@dataclass(slots=True, eq=False)
class Receive(Op[tuple[PeerMessage, ...]]):
    """The messages that have come since the last time, possibly none, in the order of their senders' ranks."""


def message_cells(x0: Vector, workers: int) -> dict[str, Tensor]:
    """A worker's cells for its messages under way, and for which of the others' it has taken."""
    sizes = ((MESSAGES, 2), (MESSAGES, 4), (workers * MESSAGES, 3))
    kinds = (torch.float64, torch.int64, torch.int64)
    rest = [torch.zeros(size, dtype=kind) for size, kind in zip(sizes, kinds, strict=True)]
    return dict(zip(MESSAGE_CELLS, (x0.new_zeros(MESSAGES, x0.numel()), *rest), strict=True))


@dataclass(slots=True, eq=False)
class Sleep(Op[None]):
    """A pause."""

    seconds: float


@dataclass(slots=True, eq=False)
class Pending(Op[R]):
    """An operation under way; awaiting it waits for its result."""

    op: Op[R]
    done: bool = False
    result: Any = None
    waited: bool = field(default=False, repr=False)


@dataclass(slots=True, eq=False)
class Start(Op[Pending[R]]):
    """Begin an operation without waiting; its tensors are copied now, so the worker may change its own."""

    op: Op[R]


def mapped(function: Callable[[Tensor], Any], value: Any) -> Any:
    """An argument or a result with `function` applied to each of its tensors, also in nested tuples."""
    if isinstance(value, Tensor):
        return function(value)
    return tuple([mapped(function, item) for item in value]) if isinstance(value, tuple) else value


def tensors(value: Any) -> list[Tensor]:
    """The tensors of an argument or a result, in their order."""
    if not isinstance(value, tuple):
        return [value] if isinstance(value, Tensor) else []
    found: list[Tensor] = []
    for item in value:
        if isinstance(item, Tensor):
            found.append(item)
        elif isinstance(item, tuple):
            found += tensors(item)
    return found


def content(op: Op[Any]) -> Any:
    """What crosses a network for an operation: its arguments, or the payloads of those that are compressed."""
    match op:
        case Call(_, args, None):
            return args
        case Call(_, args, Packed(payloads)):
            return tuple(payloads.get(place, arg) for place, arg in enumerate(args))
        case Mean(packed=Packed(payloads)) | Meet(packed=Packed(payloads)) | Send(packed=Packed(payloads)) if payloads:
            return payloads[0]
        case Mean(v) | Meet(v) | Send(_, v):
            return v
        case _:
            return ()


def nbytes(value: Any) -> int:
    """The bytes of an argument, a result or a payload; a number has 8."""
    if isinstance(value, Tensor):
        return value.nbytes
    if not isinstance(value, tuple):
        return 8
    total = 0
    for item in value:  # most are tensors and numbers: a loop is faster than a generator of calls
        total += 8 if type(item) is int else item.nbytes if type(item) is Tensor else nbytes(item)
    return total


def copied(op: Op[R]) -> Op[R]:
    """The same operation with copies of its tensors."""
    match op:
        case Grad(x, until, within):
            return Grad(x.clone(), until, within)
        case Call(method, args, packed):
            return Call(method, mapped(Tensor.clone, args), packed)
        case Mean(v) | Meet(v):
            return replace(op, v=v.clone())
        case _:
            return op
