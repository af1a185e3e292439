"""The operations that a step may await; there are no others. An operation is plain data; the driver performs it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from torch import Tensor

from paceline.state import Vector

if TYPE_CHECKING:
    from paceline.scheme import ServerMethod

R = TypeVar("R")
Group = tuple[int, ...]


class Op(Generic[R]):
    """Awaiting an operation gives it to the driver; the result is the driver's answer."""

    __slots__ = ()

    def __await__(self) -> Generator[Op[Any], R, R]:
        return (yield self)


@dataclass(slots=True, eq=False)
class Grad(Op[Vector]):
    """The gradient at x on the worker's next mini-batch."""

    x: Vector


@dataclass(slots=True, eq=False)
class Call(Op[R]):
    """A call of an `@on_server` method; arguments and result cross by value."""

    method: ServerMethod[Any, Any]
    args: tuple[Any, ...]

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


def tensors(value: Any) -> Iterator[Tensor]:
    """The tensors of an argument or a result, in their order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from tensors(item)


def copied(op: Op[R]) -> Op[R]:
    """The same operation with copies of its tensors."""
    match op:
        case Grad(x):
            return Grad(x.clone())
        case Call(method, args):
            return Call(method, mapped(Tensor.clone, args))
        case Mean(v, weight, among):
            return Mean(v.clone(), weight, among)
        case _:
            return op
