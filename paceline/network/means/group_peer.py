"""The connection to another member of a group: the kinds of messages, and what is still to come for an exchange."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable, Sequence
from enum import IntEnum

from paceline.network.means import mean_rooms
from paceline.network.means.group import HEAD
from paceline.network.secure.channel import Channel


class MeanMessage(IntEnum):
    """The kinds of messages: a header (and a small vector), a slice, a slice of the mean, a broadcast, and the header
    of a vector that is still being computed, before its slices; its START follows when the worker is at the mean."""

    START, PART, SUM, GIVEN, EARLY = range(1, 6)


START, PART, SUM, GIVEN, EARLY = MeanMessage  # by themselves: looking up a member takes longer
LIMITS: dict[int, int] = {
    START: HEAD + mean_rooms.SMALL,
    **dict.fromkeys((PART, SUM, GIVEN), mean_rooms.SLICE),
    EARLY: HEAD,
}


class GroupPeer:
    """The connection to another member, and what is still to come from it for the exchange under way."""

    def __init__(self, place: int, connection: socket.socket, room: Callable[[GroupPeer, int, int], memoryview | None]):
        self.place = place
        self.channel = Channel(
            connection,
            limits=LIMITS,
            most_pending=1 << 62,  # what is sent is not copied, and is no more than the vectors
            room=lambda kind, length: room(self, kind, length),
        )
        self.due: dict[int, deque[memoryview]] = {kind: deque() for kind in LIMITS}  # where what has not begun goes
        self.missing = dict.fromkeys(LIMITS, 0)  # how many messages have not come whole
        self.placed: deque[bool] = deque()  # of the messages coming in: whether each goes where it belongs
        self.early: deque[tuple[int, bytearray]] = deque()  # of the next exchange
        self.events = 0  # that are waited for

    def expect(self, kind: int, into: Sequence[memoryview]) -> None:
        """Expect a message for each of these buffers, and receive it there."""
        self.due[kind].extend(into)
        self.missing[kind] += len(into)

    @property
    def owes(self) -> bool:
        return any(self.missing.values())

    @property
    def complete(self) -> bool:
        """Whether all that is to come for the exchange under way has come, or begun to."""
        return not any(into for kind, into in self.due.items() if kind != EARLY)
