"""Writes event files of TensorBoard without importing TensorBoard: that takes time, and its writer has a thread, which
a launcher that forks should not have.

An event file is a sequence of records: length, masked CRC-32C of the length, content, masked CRC-32C of the content.
A content is an `Event` of TensorBoard's protocol buffers, encoded here field by field. A test has TensorBoard read it.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from pathlib import Path

VERSION = "brain.Event:2"
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # wire types
_STRING_TENSOR = 7  # DT_STRING


class SessionStatus(IntEnum):
    """How a session ended, as the hparams plugin numbers it."""

    UNKNOWN, SUCCESS, FAILURE = range(3)


class EventFile:
    """A new file in a folder. Every record is handed to the system at once, so a death cuts off no more than one."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time_ns() // 10**9:010d}.{socket.gethostname()}.{os.getpid()}"
        self._path = folder / f"{name}.{time.time_ns() % 10**9}.paceline"
        self._write(_field(3, VERSION), None)

    def scalars(self, values: Mapping[str, float], step: int, at: float | None = None) -> None:
        """Values by tag, of a global step, at a time of day: None is now."""
        self._summary([_field(1, tag) + _float(2, value) for tag, value in values.items()], step, at)

    def counts(self, tag: str, counts: Mapping[int, int], step: int, at: float | None = None) -> None:
        """A histogram of whole numbers from how often each was seen: one bar for each, as wide as one."""
        if not counts:
            return
        edges: dict[float, int] = {}  # right edge of a bar -> its count
        for number, count in sorted(counts.items()):
            edges.setdefault(number - 0.5, 0)  # the range between two bars is empty
            edges[number + 0.5] = count
        figures = [min(counts) - 0.5, max(counts) + 0.5, sum(counts.values())]
        figures += [sum(number**power * count for number, count in counts.items()) for power in (1, 2)]
        histogram = b"".join(_double(field, float(figure)) for field, figure in enumerate(figures, 1))
        histogram += _field(6, _doubles(edges)) + _field(7, _doubles(edges.values()))
        self._summary([_field(1, tag) + _field(5, histogram)], step, at)

    def text(self, tag: str, markdown: str, step: int, at: float) -> None:
        shape = _field(2, _field(2, _number(1, 1)))
        tensor = _number(1, _STRING_TENSOR) + shape + _field(8, markdown)
        value = _field(1, f"{tag}/text_summary") + _field(9, _plugin("text", b"")) + _field(8, tensor)
        self._summary([value], step, at)

    def session(
        self, group: str, hyper: Mapping[str, str | float | bool], status: SessionStatus, began: float, ended: float
    ) -> None:
        """A session of the hparams plugin: hyper-parameters, and how it ended. The scalars of the folder are its
        metrics. There is no record of the experiment: TensorBoard would show the columns of one run for all."""
        values = [_field(1, _field(1, name) + _field(2, _plain(value))) for name, value in hyper.items()]
        start = b"".join(values) + _field(4, group) + _double(5, began)
        self._hparams("session_start_info", _field(3, start), began)
        self._hparams("session_end_info", _field(4, _number(1, status) + _double(2, ended)), ended)

    def _hparams(self, name: str, content: bytes, at: float) -> None:
        self._summary([_field(1, f"_hparams_/{name}") + _field(9, _plugin("hparams", content))], 0, at)

    def _summary(self, values: Sequence[bytes], step: int, at: float | None) -> None:
        self._write(_number(2, step) + _field(5, b"".join(_field(1, value) for value in values)), at)

    def _write(self, event: bytes, at: float | None) -> None:
        content = _double(1, time.time() if at is None else at) + event
        length = struct.pack("<Q", len(content))
        with self._path.open("ab") as stream:
            stream.write(length + _masked(length) + content + _masked(content))


def _varint(number: int) -> bytes:
    number &= (1 << 64) - 1
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3 | _VARINT) + _varint(value)


def _double(field: int, value: float) -> bytes:
    return _varint(field << 3 | _FIXED64) + struct.pack("<d", value)


def _doubles(values: Iterable[float]) -> bytes:
    return b"".join(struct.pack("<d", value) for value in values)


def _float(field: int, value: float) -> bytes:
    """A float of four bytes; what is too large for it is infinite."""
    try:
        packed = struct.pack("<f", value)
    except OverflowError:
        packed = struct.pack("<f", float("inf") if value > 0 else float("-inf"))
    return _varint(field << 3 | _FIXED32) + packed


def _field(field: int, content: bytes | str) -> bytes:
    encoded = content.encode() if isinstance(content, str) else content
    return _varint(field << 3 | _BYTES) + _varint(len(encoded)) + encoded


def _plugin(name: str, content: bytes) -> bytes:
    """Metadata of a value that a plugin shows."""
    return _field(1, _field(1, name) + _field(2, content))


def _plain(value: str | float | bool) -> bytes:
    """A google.protobuf.Value."""
    if isinstance(value, bool):
        return _number(4, value)
    return _field(3, value) if isinstance(value, str) else _double(2, value)


def _table() -> list[int]:
    table = []
    for number in range(256):
        for _ in range(8):
            number = number >> 1 ^ (0x82F63B78 if number & 1 else 0)
        table.append(number)
    return table


_CRC32C = _table()


def _masked(content: bytes) -> bytes:
    """The checksum of a record's part: CRC-32C, turned so that a checksum of checksums is sound."""
    table, crc = _CRC32C, 0xFFFFFFFF
    for byte in content:
        crc = table[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)
