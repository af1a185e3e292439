"""The contract of compressors: what of a vector a worker sends, and what it keeps for the next time.

A compressor is a class of paceline/compressors/NAME.py, or an entry point of the group `paceline.compressors`.
docs/compression.md has a complete example.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import itertools
import math
from abc import abstractmethod
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self, get_type_hints

import torch
from torch import Tensor

from paceline.fields import Component, bounds
from paceline.state import Cell, State, Vector

Payload = tuple[Any, ...]  # what is sent: tensors of fixed sizes, and numbers
Pieces = Generator[Vector, Vector, Vector]  # vectors whose means are wanted; their means come back; gives the result
Shapes = tuple[tuple[int, ...], ...]
Fragment = tuple[tuple[int, int], ...]  # ranges of the vector


@dataclass(frozen=True)
class Compressor(Component):
    """Encodes a vector in fewer bytes. Subclasses are frozen dataclasses whose fields are the options.

    `encode` and `decode` are the operator C of the papers. With `feedback` the part of the vectors that C has not sent
    so far is kept in the cell `error`, and added to the next vector: the sum of what was decoded, plus `error`, is the
    sum of the vectors that were given.
    """

    kind: ClassVar[str] = "compressor"
    unbiased: ClassVar[bool] = False  # the expectation of decode(encode(v)) is v
    shared: ClassVar[tuple[str, ...]] = ()  # cells that all workers have alike; the others are a worker's own
    shapes: ClassVar[Shapes] = ()  # of the parameters in the vector; none: the vector is one parameter

    def __init_subclass__(cls, name: str | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.name = name or _file_name(cls)

    @classmethod
    def members(cls) -> Mapping[str, type[Self]]:
        """The compressors that have a name, by their names."""
        return {cls.name: cls}  # config.build knows the family

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self), include_extras=True)
        for field in dataclasses.fields(self):
            for bound in bounds(hints[field.name]):
                bound.check(f"compressor {self.name}", field.name, getattr(self, field.name))

    def __str__(self) -> str:
        """The compressor as users write it: topk:fraction=0.01."""
        given = ",".join(f"{name}={_text(value)}" for name, value in self.given().items())
        return f"{self.name}:{given}" if given else self.name

    def fitted(self, shapes: Sequence[Sequence[int]]) -> Self:
        """This compressor for a vector of parameters with these shapes."""
        other = copy.copy(self)
        object.__setattr__(other, "shapes", tuple(tuple(shape) for shape in shapes))
        return other

    def fitted_to(self, fragment: Fragment) -> Self:
        """This compressor for a fragment: the shapes of the parameters in it. A fragment that cuts a parameter is one
        parameter itself."""
        ends = list(itertools.accumulate(map(math.prod, self.shapes), initial=0))
        shapes = [
            shape
            for low, high in fragment
            for first, last, shape in zip(ends, ends[1:], self.shapes, strict=False)
            if low <= first and last <= high
        ]
        whole = sum(map(math.prod, shapes)) == sum(high - low for low, high in fragment)
        return self.fitted(shapes if whole else ())

    def shapes_cell(self) -> Tensor:
        """The shapes as a cell, by which every process knows them."""
        flat = itertools.chain.from_iterable((len(shape), *shape) for shape in self.shapes)
        return torch.tensor([len(self.shapes), *flat], dtype=torch.int64)

    def fitted_by(self, cell: Tensor) -> Self:
        """This compressor for the shapes in a cell."""
        count, *rest = cell.tolist()
        shapes, at = [], 0
        for _ in range(count):
            shapes.append(rest[at + 1 : at + 1 + rest[at]])
            at += 1 + rest[at]
        return self.fitted(shapes)

    @property
    def retained(self) -> float | None:
        """The factor of the kept error before a vector is added to it; None: no error feedback."""
        return None

    @property
    def points(self) -> bool:
        """Whether it is precise enough for parameters, not only for steps: workers that meet give each other their
        models. An error of at most a fifth of the length of a normal vector, and no error feedback."""
        return False

    def cells(self, x0: Vector) -> dict[str, Cell]:
        """What a worker keeps between two vectors, at the start."""
        return {} if self.retained is None else {"error": torch.zeros_like(x0)}

    @abstractmethod
    def encode(self, s: State, v: Vector, seed: int) -> Payload:
        """What is sent of v. `s` has the cells, and the numbers `s.v`, the version of x that the worker has, and
        `s.workers`; `seed` is another one for each vector that a worker sends."""

    @abstractmethod
    def decode(self, payload: Payload, like: Vector) -> Vector:
        """The vector that a payload stands for; `like` has its length, its dtype and its device."""

    def pack(self, s: State, v: Vector, seed: int) -> tuple[Payload, Vector]:
        """The payload of v, and what it decodes to, with error feedback. Changes the cells of `s`."""
        if self.retained is None:
            payload = self.encode(s, v, seed)
            return payload, self.decode(payload, v)
        error = s.cell("error")
        if self.retained != 1:
            error.mul_(self.retained)
        error.add_(v)
        payload = self.encode(s, error, seed)
        sent = self.decode(payload, error)
        error.sub_(sent)
        return payload, sent

    def pieces(self, s: State, v: Vector, seed: int) -> Pieces | None:
        """The mean of v over all workers, by means of smaller vectors; `seed` and the `shared` cells are the same on
        all workers. None: payloads are gathered instead, and their decoded vectors averaged in the order of ranks."""
        return None

    def combined(self, mean: Vector) -> Vector:
        """What an update uses in place of the mean of decoded vectors."""
        return mean

    def warnings(self) -> Iterator[str]:
        """Stability limits that the options cross, as sentences."""
        yield from ()

    def parameters(self, v: Vector) -> list[Vector]:
        """The parameters in a vector, as views with their shapes; a vector of unknown make-up is one parameter."""
        sizes = [math.prod(shape) for shape in self.shapes]
        if sum(sizes) != v.numel():
            return [v]
        return [part.view(shape) for part, shape in zip(torch.split(v, sizes), self.shapes, strict=True)]


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _file_name(cls: type) -> str:
    file = getattr(inspect.getmodule(cls), "__file__", None)
    stem = Path(file).stem if file else cls.__name__.lower()
    return stem.rstrip("_").replace("_", "-")
