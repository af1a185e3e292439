"""A mailbox: the shared memory of one call, with its words, its arguments and its result.

A call is posted when its number is written to the board, after everything else: a worker that is killed before has
posted nothing. It is answered when the server has written the same number to `answered`. The number contains the
generation of the run: calls from before a return to a checkpoint are void.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from paceline.errors import SchemeError
from paceline.ops import Call
from paceline.processes.memory.byte_ranges import Piece
from paceline.processes.memory.call_codec import decode, decode_checked
from paceline.processes.memory.packed_words import method_of, only_asks_when
from paceline.processes.memory.payload_codec import from_bytes
from paceline.processes.memory.run_memory import HEAD_WORDS, RunMemory
from paceline.processes.memory.segment import ALIGN, LARGE, PAGE, aligned
from paceline.scheme import ServerMethod


class WorkerRequest(IntEnum):
    """Requests besides the scheme's own methods, which have numbers from 0."""

    SAVE = -1
    SET = -2
    SHOW = -6  # the servers' state as it is now, for a worker of another node
    COUNT = -7  # of that only the first server's numbers and ledger, without vectors


SAVE, SET, SHOW, COUNT = WorkerRequest  # as module names: looking up a member takes longer


class Mailbox:
    """The memory of one call. The server's side notes here what it knows of the call and of its reply."""

    def __init__(self, memory: RunMemory, rank: int, number: int) -> None:
        self.rank, self.number, self.index = rank, number, memory.board.mailbox(rank, number)
        self._segment = memory.segment
        head = memory.layout.places[f"lane.{rank}.{number}.head"].offset // 8
        self.request = memory.segment.words[head : head + HEAD_WORDS]
        self.reply = memory.segment.words[head + HEAD_WORDS : head + 2 * HEAD_WORDS]
        args, reply = (memory.layout.places[f"lane.{rank}.{number}.{part}"] for part in ("args", "reply"))
        self.taken = 0  # the number of the call that the server has taken from here
        self.tell = False  # the server only says when the worker may perform the call
        self.prepared: tuple[int, Any] | None = None  # a call's number and its request, if that is decoded already
        self.told: array[int] | None = None  # the words of the reply, if they are known,
        self.pieces: list[Piece] = []  # the byte ranges of its tensors,
        self.data: list[memoryview] | None = None  # and bytes to send instead of the memory at those offsets
        self.reply_at = reply.offset
        self._areas = {"args": (args.offset, args.shape[0]), "reply": (reply.offset, reply.shape[0])}

    def area(self, part: str) -> Callable[[int], int]:
        """A function that allocates bytes in the area `args` or `reply`, and gives their offset."""
        offset, size = self._areas[part]
        used = 0

        def room(nbytes: int) -> int:
            nonlocal used
            unit = PAGE if nbytes >= LARGE else ALIGN
            place = aligned(offset + used, unit)
            used = place - offset + aligned(nbytes, unit)
            if used > size:
                raise SchemeError(f"a call carries {used} bytes of tensors; {size} fit: send fewer vectors in one call")
            return place

        return room

    def copy_in(self, tensor: Tensor, room: Callable[[int], int]) -> int:
        place = room(tensor.nbytes)
        if tensor.is_cuda:
            self._segment.pin(place, tensor.nbytes)
        self._segment.tensor(place, tensor.dtype, tensor.shape).copy_(tensor)
        return place


def put(words: memoryview, values: array[int]) -> None:
    words[0] = len(values)
    words[1 : 1 + len(values)] = values


def got(words: memoryview) -> list[int]:
    taken: list[int] = words[1 : 1 + words[0]].tolist()
    return taken


def received(
    memory: RunMemory, mailbox: Mailbox, methods: list[ServerMethod[Any, Any]], bounds: tuple[int, int]
) -> Any:
    """The request in a mailbox: a call with its arguments in place (this server's shard of vectors), or number and
    arguments of a WorkerRequest."""
    prepared, mailbox.prepared = mailbox.prepared, None
    mailbox.taken = memory.board.posted[mailbox.index]
    if prepared is not None and prepared[0] == mailbox.taken:
        request = prepared[1]
    else:
        words, number = got(mailbox.request), mailbox.request[HEAD_WORDS - 1]
        request = understood(memory, mailbox, words, number, methods, bounds)
    return _decompressed(memory, request, bounds) if isinstance(request, Call) else request


def _decompressed(memory: RunMemory, request: Call[Any], bounds: tuple[int, int]) -> Call[Any]:
    """A call with this server's shard of the vectors in place of payloads: each comes alone in a tuple."""
    sites = memory.compressed_sites()
    if sites is None or not any(isinstance(arg, tuple) for arg in request.args):
        return request
    args, known, x = list(request.args), request.method.parameters, memory.server_state().x
    for site in sites.sites:
        place = known.index(site.argument) if site.method == request.method.name else None
        if place is None or not isinstance(args[place], tuple):
            continue
        fragment = sites.fragment(int(args[known.index(site.number)]) if site.number else None)
        like = x.new_empty(sites.length(fragment, memory.layout.notes["length"]))
        v = sites.compressor(fragment).decode(from_bytes(args[place][0]), like)
        args[place] = v if site.number else v[slice(*bounds)]
    return Call(request.method, tuple(args))


def understood(
    memory: RunMemory,
    mailbox: Mailbox,
    words: list[int],
    number: int,
    methods: list[ServerMethod[Any, Any]],
    bounds: tuple[int, int],
    allowed: Callable[[int, int], bool] | None = None,
) -> Any:
    """The request that words ask for, in a mailbox or still on their way there. `allowed`: of words that came over a
    network and are to be checked, see `decode_checked`."""
    low, high = bounds
    length = memory.layout.notes["length"]
    segment = memory.segment
    whole = high - low == length

    def tensor(offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        found = segment.tensor(offset, dtype, shape)
        return found if whole or not shape or shape[-1] != length else found[..., low:high]

    args = decode(words, tensor) if allowed is None else decode_checked(words, allowed, tensor)
    if number < 0:
        return number, args
    mailbox.tell = only_asks_when(number)
    return Call(methods[method_of(number)], args)
