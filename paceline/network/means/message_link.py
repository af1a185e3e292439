"""The connection to a worker of another node, for messages that nobody waits for.

A message follows its head directly, in parts. A note says that a message was taken: its slot is free.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.network.means import mean_rooms
from paceline.network.means.mean_rooms import as_bytes, slices
from paceline.network.secure.channel import Channel, ProtocolError
from paceline.ops import MESSAGES

_HEAD = struct.Struct("<qqqqdqq")
_NOTE = struct.Struct("<qqq")


class MailMessage(IntEnum):
    """The kinds of messages: the head of a worker's message; a part of its vector; a note that one was taken."""

    HEAD, PART, NOTE = range(1, 4)


HEAD, PART, NOTE = MailMessage


class Note(NamedTuple):
    """A message was taken: its slot, its number among those of the slot, and the last checkpoint of its taker."""

    slot: int
    sequence: int
    cut: int


class Head(NamedTuple):
    """What a message is, beside its vector."""

    slot: int
    sequence: int  # among the messages of that slot
    cut: int  # the last checkpoint that its sender had taken part in
    step: int  # in which it was sent
    number: float
    size: int  # bytes that follow
    packed: int  # 1: they are a compressor's payload; 0: the vector


class Letter:
    """A message that is coming in. `data`: its bytes."""

    def __init__(self, head: Head) -> None:
        self.head = head
        self.data = torch.empty(head.size, dtype=torch.uint8)
        self._room = as_bytes(self.data)
        self._filled = 0

    def add(self, part: bytearray) -> bool:
        """Whether it is whole now."""
        if self._filled + len(part) > self.head.size:
            raise ProtocolError(f"PART with {len(part):,} bytes, of a message of {self.head.size:,}")
        self._room[self._filled : self._filled + len(part)] = part
        self._filled += len(part)
        return self._filled == self.head.size


class MessageLink:
    """One connection. `whole`: bytes of a vector; `most`: those of the largest payload that may come."""

    def __init__(self, connection: socket.socket, whole: int, most: int) -> None:
        self._whole, self._most = whole, most
        limits = {HEAD: _HEAD.size, PART: mean_rooms.SLICE, NOTE: _NOTE.size}
        self.channel = Channel(
            connection,
            limits={int(kind): most for kind, most in limits.items()},
            most_pending=1 << 62,  # what is sent is not copied, and is no more than the slots hold
        )
        self._letter: Letter | None = None

    def bury(self) -> None:
        self.channel.close()

    def message(self, head: Head, data: Tensor) -> None:
        self.channel.send(HEAD, _HEAD.pack(*head))
        for part in slices(data):
            self.channel.send(PART, part)

    def note(self, note: Note) -> None:
        self.channel.send(NOTE, _NOTE.pack(*note))

    def exchange(self) -> Iterator[Letter | Note]:
        """Send what is pending, and give what has come whole."""
        if self.channel.pending:
            self.channel.flush()
        for kind, payload in self.channel.receive():
            if kind == NOTE:
                yield self._note(payload)
            elif kind == HEAD:
                if self._letter is not None:
                    raise ProtocolError("HEAD came inside a message")
                self._letter = Letter(self._head(payload))
            else:
                if self._letter is None:
                    raise ProtocolError("PART came before a HEAD")
                if self._letter.add(payload):
                    whole, self._letter = self._letter, None
                    yield whole

    def _head(self, payload: bytearray) -> Head:
        if len(payload) != _HEAD.size:
            raise ProtocolError(f"HEAD with {len(payload)} bytes")
        head = Head(*_HEAD.unpack(payload))
        fits = 0 < head.size <= self._most if head.packed else head.size == self._whole
        if not (fits and 0 <= head.slot < MESSAGES and head.sequence > 0 and head.step >= 0):
            raise ProtocolError(
                f"a message with {head}; a vector has {self._whole:,} bytes, there are {MESSAGES} slots"
            )
        return head

    def _note(self, payload: bytearray) -> Note:
        if len(payload) != _NOTE.size:
            raise ProtocolError(f"NOTE with {len(payload)} bytes")
        note = Note(*_NOTE.unpack(payload))
        if not 0 <= note.slot < MESSAGES:
            raise ProtocolError(f"a note of slot {note.slot}; there are {MESSAGES}")
        return note
