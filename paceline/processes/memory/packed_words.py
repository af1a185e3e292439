"""Numbers that share one word of shared memory: each pair is packed and unpacked here, and nowhere else.

Functions, not classes: a server unpacks the number of every call that it looks at.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.processes.memory.call_codec import DTYPES
from paceline.runs.order_log import MemberEvent
from paceline.sampling import mixed

# A call's number, in `posted` and `answered`: how often the run had returned to a checkpoint, and the worker's count.
_COUNTS = 1 << 32


def call_number(generation: int, count: int) -> int:
    return generation * _COUNTS + count


def generation_of(number: int) -> int:
    return number // _COUNTS


def count_of(number: int) -> int:
    return number % _COUNTS


# A request's kind, the last word of a mailbox: a method's number, and whether the server is only to say when the call
# may be performed. Negative: a request that is no method of the scheme.
_ONLY_WHEN = 1 << 16


def asks_when(method: int) -> int:
    """The kind of a request that asks when the worker itself may perform a method."""
    return method + _ONLY_WHEN


def only_asks_when(kind: int) -> bool:
    return kind >= _ONLY_WHEN


def method_of(kind: int) -> int:
    """The number of the method that a request is for."""
    return kind - _ONLY_WHEN if kind >= _ONLY_WHEN else kind


# What a worker waits for, in `awaited`: 1 + the index of a mailbox; or, negative, a method that only reads and whose
# guard the worker evaluates itself for now.


def looks_for(method: int) -> int:
    return -1 - method


def looked_for(awaited: int) -> int | None:
    """The number of that method; None: the worker waits for a reply, or for nothing."""
    return -1 - awaited if awaited < 0 else None


# An entry of the order of calls: the index of a mailbox, or if negative a worker that came or went.
_EVENTS = 10


def member_entry(rank: int, event: MemberEvent) -> int:
    return event - _EVENTS * rank


def member_of(entry: int) -> tuple[int, MemberEvent]:
    """Rank and event of a negative entry; ValueError if there is no such event."""
    rank, event = divmod(-entry, _EVENTS)
    return rank, MemberEvent(-event)


# The shape of a vector at a mean: its length and its dtype.
_DTYPES = 16


def shape_word(v: Tensor) -> int:
    return v.numel() * _DTYPES + DTYPES.index(v.dtype)


def empty_of(shape: int, device: torch.device | str) -> Tensor:
    """A vector of that shape."""
    return torch.empty(shape // _DTYPES, dtype=DTYPES[shape % _DTYPES], device=device)


def bytes_of(shape: int) -> int | None:
    """The bytes of a vector of that shape; None: no vector has it."""
    length, dtype = divmod(shape, _DTYPES)
    return length * DTYPES[dtype].itemsize if length >= 0 and dtype < len(DTYPES) else None


# The key of a mean: its group and the generation; of a meeting also the step. It is compared, never unpacked.
_EVERYBODY = 1


def mean_key(among: Sequence[int] | None, generation: int) -> int:
    """The key of a mean among these ranks, in order; None: all workers. Workers of two generations never meet."""
    group = _EVERYBODY if among is None else mixed("mean", *among) >> 1 | 2
    return group ^ generation << 2


def meeting_key(among: Sequence[int], t: int, generation: int) -> int:
    """The key of a meeting among these ranks, in order, at step t."""
    return (mixed("meeting", t, *among) >> 1 | 2) ^ generation << 2
