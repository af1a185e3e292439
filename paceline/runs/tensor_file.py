"""Writes a safetensors file without copying the tensors: their bytes go to the file as they are.

The SHA-256 of the file is computed while it is written. Large tensors with the same bits are written once.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import mmap
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from paceline.errors import RunError

LARGE = 1 << 20  # bytes from which on equal tensors are looked for
PIECE = 1 << 24  # bytes that are written, or copied from a GPU, at a time
PROBE = 1 << 10  # bytes that are compared first
BLOCK = 1 << 12  # bytes: whole blocks of any usual disk
DIRECT = getattr(os, "O_DIRECT", 0)
WORD = 8

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}


@dataclass(frozen=True)
class Written:
    """`aliases`: names of tensors that are not in the file, because the tensor of another name has the same bits."""

    sha256: str
    aliases: dict[str, str]


def write(path: Path, tensors: Mapping[str, Tensor], first: Sequence[str] = ()) -> Written:
    """Write the tensors, and return when they are on the disk. `first`: names that are never aliases of others."""
    raw = {name: _bytes_of(name, tensors[name]) for name in sorted(tensors, key=lambda name: name not in first)}
    aliases = _equal_tensors(raw, tensors)
    # the largest numbers first: so each tensor is aligned to its own
    kept = sorted((name for name in raw if name not in aliases), key=lambda name: -tensors[name].element_size())
    head: dict[str, object] = {}
    end = 0
    for name in kept:
        begin, end = end, end + raw[name].numel()
        shape = list(tensors[name].shape)
        head[name] = {"dtype": _NAMES[tensors[name].dtype], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(head, separators=(",", ":")).encode()
    text += b" " * (-len(text) % WORD)
    total = hashlib.sha256()

    def pieces() -> Iterator[memoryview]:
        yield memoryview(len(text).to_bytes(WORD, "little") + text)
        for name in kept:
            for piece in torch.split(raw[name], PIECE):
                yield piece.cpu().numpy().data

    def summed() -> Iterator[memoryview]:
        for piece in pieces():
            total.update(piece)
            yield piece

    def add_up() -> None:
        for _ in summed():
            pass

    on_gpu = any(one.device.type != "cpu" for one in raw.values())  # each piece is copied from there only once
    if end <= PIECE or on_gpu:
        _put_on_disk(path, summed(), large=end > PIECE)
    else:
        adding = threading.Thread(target=add_up)
        adding.start()  # at the same time as the writing: both leave the interpreter to others
        try:
            _put_on_disk(path, pieces(), large=True)
        finally:
            adding.join()
    return Written(total.hexdigest(), aliases)


def _put_on_disk(path: Path, pieces: Iterator[memoryview], *, large: bool) -> None:
    """Write a file, and return when it is on the disk. A large one bypasses the system's page cache: to find memory for
    a copy of all of it can take longer than the disk does."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    handle = None
    if large and DIRECT:
        with suppress(OSError):  # the file system cannot
            handle = os.open(path, flags | DIRECT, 0o666)
    if handle is None:
        handle = os.open(path, flags, 0o666)
    try:
        for block in _blocks(pieces) if large else pieces:
            if large and len(block) % BLOCK:  # the last one
                _through_cache(handle)
            _write_whole(handle, block)
        os.fsync(handle)
    finally:
        os.close(handle)


def _blocks(pieces: Iterator[memoryview]) -> Iterator[memoryview]:
    """The same bytes in pieces of one size, at one place in memory, with the alignment that bypassing the page cache
    asks for. All but the last have whole blocks of the disk."""
    room = memoryview(mmap.mmap(-1, PIECE))
    filled = 0
    for piece in pieces:
        while piece:
            count = min(len(piece), PIECE - filled)
            room[filled : filled + count] = piece[:count]
            filled, piece = filled + count, piece[count:]
            if filled == PIECE:
                yield room
                filled = 0
    whole = filled // BLOCK * BLOCK
    if whole:
        yield room[:whole]
    if filled > whole:
        yield room[whole:filled]


def _write_whole(handle: int, data: memoryview) -> None:
    while data:
        try:
            data = data[os.write(handle, data) :]
        except OSError as error:
            if error.errno != errno.EINVAL or not _through_cache(handle):  # EINVAL: the disk has larger blocks
                raise


def _through_cache(handle: int) -> bool:
    """Have a file that bypasses the page cache written through it from now on; False if it is so already."""
    flags = fcntl.fcntl(handle, fcntl.F_GETFL)
    if not flags & DIRECT:
        return False
    fcntl.fcntl(handle, fcntl.F_SETFL, flags & ~DIRECT)
    return True


def _bytes_of(name: str, tensor: Tensor) -> Tensor:
    """The bytes of a tensor, not copied if it is contiguous."""
    if tensor.dtype not in _NAMES:
        raise RunError(f"tensor {name!r} could not be written: a checkpoint cannot hold {tensor.dtype}")
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _equal_tensors(raw: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """For each large tensor that has the bits of an earlier one: its name, and the earlier one's."""
    aliases: dict[str, str] = {}
    distinct: dict[tuple[object, ...], list[str]] = {}
    for name, one in raw.items():
        if one.numel() >= LARGE:
            alike = distinct.setdefault((tensors[name].dtype, tensors[name].shape, one.device), [])
            twin = next((other for other in alike if _same(one, raw[other])), None)
            if twin is None:
                alike.append(name)
            else:
                aliases[name] = twin
    return aliases


def _same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a[:PROBE], b[:PROBE]) and (a.data_ptr() == b.data_ptr() or torch.equal(_words(a), _words(b)))


def _words(a: Tensor) -> Tensor:
    """The bytes as whole numbers where they can be: faster to compare."""
    whole = a.numel() % WORD == 0 and a.storage_offset() % WORD == 0 and a.data_ptr() % WORD == 0
    return a.view(torch.int64) if whole else a
