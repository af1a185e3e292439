"""The vectors that the processes of one worker share: the parameters, the buffers, and what each has computed."""

from __future__ import annotations

import os
from collections.abc import Mapping

from torch import Tensor

from paceline.inside.kind import Inside
from paceline.processes.memory.segment import Layout, Segment
from paceline.state import Vector


class SharedSlices:
    """One mapping of them. `ddp`: every process but the first has a row for its gradient; `fsdp`: all write their
    ranges of one gradient."""

    def __init__(self, segment: Segment) -> None:
        layout = Layout.read(segment)
        self.x = layout.tensor(segment, "x")
        self.buffers = layout.under(segment, "buffer.")
        self._rows = layout.under(segment, "row.")

    def row(self, number: int) -> Vector:
        """The gradient of a process's slice; with fsdp, that of the whole batch."""
        return self._rows[str(number) if str(number) in self._rows else "0"]

    @classmethod
    def laid_out(
        cls, descriptor: int, inside: Inside, x: Vector, buffers: Mapping[str, Tensor]
    ) -> tuple[SharedSlices, int]:
        """For the first process, which knows the vector; gives the size too, which the others need."""
        layout = Layout()
        layout.add("x", x.shape, x.dtype)
        for name, one in buffers.items():
            layout.add(f"buffer.{name}", one.shape, one.dtype)
        for number in range(1, inside.processes) if inside.kind == "ddp" else (0,):
            layout.add(f"row.{number}", x.shape, x.dtype)
        os.ftruncate(descriptor, layout.size)
        segment = Segment(descriptor, layout.size)
        layout.write(segment)
        return cls(segment), layout.size
