"""How a worker is made of several processes, as people write it: `ddp:2`, `fsdp:4`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, cast

from paceline.errors import UsageError

MOST = 64  # processes of one worker

InsideKind = Literal["ddp", "fsdp"]


@dataclass(frozen=True)
class Inside:
    """The processes inside a worker. `ddp`: each has the whole model; `fsdp`: each has a shard of every parameter."""

    kind: InsideKind
    processes: int

    def __str__(self) -> str:
        return f"{self.kind}:{self.processes}"

    @classmethod
    def read(cls, text: str) -> Inside | None:
        """What a setting says; None if it is empty: a worker is one process."""
        if not text:
            return None
        found = re.fullmatch(r"(ddp|fsdp):(\d{1,6})", text)
        if found is None:
            raise UsageError(
                f"inside must be ddp:K or fsdp:K, with K processes per worker, such as ddp:2, not {text!r}"
            )
        number = int(found[2])
        if not 2 <= number <= MOST:
            raise UsageError(f"inside: a worker has from 2 to {MOST} processes, not {number}; omit inside for one")
        return cls(cast(InsideKind, found[1]), number)


def processes_of(text: str) -> int:
    """The number of processes that a worker consists of."""
    found = Inside.read(text)
    return 1 if found is None else found.processes


def check(text: str, *, exact: bool, device: str) -> None:
    """Refuse settings with which a worker cannot be several processes."""
    if Inside.read(text) is None:
        return
    if exact:
        raise UsageError(
            f"an exact run cannot have workers of several processes (inside {text}): its bits are those of "
            "micro-batches computed whole, and a sliced one gives others; use more --workers, which change none"
        )
    if device != "cpu":
        raise UsageError(
            f"inside {text} computes on the cpu, not on {device}: it was never tried on GPUs; "
            "for GPUs see the recipe for your own loop in docs/inside.md"
        )
