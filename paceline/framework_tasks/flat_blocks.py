"""A flat vector as a few arrays of a framework: each large parameter by itself, small neighbours together.

Large parameters are then neither cut out of the vector nor joined to one by copies, and many small ones do not cost a
call each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from paceline.state import Vector

LARGE = 1 << 15  # numbers: from here on a copy costs more than a call

Place = tuple[int, int, tuple[int, ...]]


class FlatBlocks:
    """`places`: where each parameter begins and ends in the vector, and its shape."""

    def __init__(self, places: Sequence[Place]) -> None:
        self.members: list[list[Place]] = []
        joins = False  # whether the next small parameter belongs to the last block
        for place in places:
            large = place[1] - place[0] >= LARGE
            if joins and not large:
                self.members[-1].append(place)
            else:
                self.members.append([place])
            joins = not large

    def cut(self, x: Any) -> list[Any]:
        """The blocks of a vector, as views."""
        return [x[block[0][0] : block[-1][1]] for block in self.members]

    def weights(self, blocks: Sequence[Any], reshape: Callable[[Any, tuple[int, ...]], Any]) -> list[Any]:
        """The parameters in the blocks, in the framework's own arrays."""
        found = []
        for block, members in zip(blocks, self.members, strict=True):
            first = members[0][0]
            for begin, end, shape in members:
                part = block if len(members) == 1 else block[begin - first : end - first]
                found.append(reshape(part, shape))
        return found

    def joined(self, gradients: Sequence[Any], join: Callable[[list[Any]], Any]) -> list[Any]:
        """A flat array for each block; `join` makes one of several flat arrays. The gradients are flat."""
        left = iter(gradients)
        made = []
        for members in self.members:
            own = [next(left) for _ in members]
            made.append(own[0] if len(own) == 1 else join(own))
        return made

    def write(self, out: Vector, blocks: Sequence[Any], tensor: Callable[[Any], Vector]) -> None:
        """Copy blocks of the framework into the vector; `tensor` views one as a tensor of torch."""
        for place, block in zip(self.cut(out), blocks, strict=True):
            place.copy_(tensor(block))
