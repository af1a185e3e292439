"""Writes a safetensors file without copying the tensors: their bytes go to the file as they are.

The SHA-256 of the file is computed while it is written. Large tensors with the same bits are written once.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from paceline.errors import RunError

LARGE = 1 << 20  # bytes from which on equal tensors are looked for
PIECE = 1 << 24  # bytes that are written, or copied from a GPU, at a time
PROBE = 1 << 10  # bytes that are compared first
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

    def add_up() -> None:
        for piece in pieces():
            total.update(piece)

    with path.open("wb", buffering=0) as file:
        on_gpu = any(one.device.type != "cpu" for one in raw.values())  # each piece is copied from there only once
        adding = threading.Thread(target=add_up) if end > PIECE and not on_gpu else None
        if adding is not None:  # at the same time as the writing: both leave the interpreter to others
            adding.start()
        try:
            for piece in pieces():
                if adding is None:
                    total.update(piece)
                while piece:
                    piece = piece[file.write(piece) :]
            os.fsync(file.fileno())
        finally:
            if adding is not None:
                adding.join()
    return Written(total.hexdigest(), aliases)


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
