"""A compressor's payload as one tensor of bytes that describes itself: words, as of a call, and the data they name."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.compressor import Payload
from paceline.processes.memory.call_codec import MOST, check, decode, encode
from paceline.processes.memory.segment import WORD


def to_bytes(payload: Payload, length: int = 0) -> Tensor:
    """The payload in bytes: not `length` of them, which servers would take for a vector and cut."""
    parts: list[Tensor] = []
    room = 0

    def place(tensor: Tensor) -> int:
        nonlocal room
        at, data = room, tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        parts.append(data)
        short = -data.numel() % WORD
        if short:
            parts.append(data.new_zeros(short))
        room += data.numel() + short
        return at

    words = encode(payload, place)
    head = torch.tensor([len(words), *words], dtype=torch.int64).view(torch.uint8)
    if head.numel() + room == length:
        parts.append(head.new_zeros(WORD))
    return torch.cat((head, *parts))


def from_bytes(data: Tensor) -> Payload:
    """The payload; its tensors are views of the bytes. ValueError if they mean nothing."""
    count = int(data[:WORD].view(torch.int64)) if data.numel() >= WORD else 0
    if not 0 < count <= MOST or WORD * (count + 1) > data.numel():
        raise ValueError(f"a payload of {data.numel()} bytes with {count} words")
    words, content = data[WORD : WORD * (count + 1)].view(torch.int64).tolist(), data[WORD * (count + 1) :]
    check(words, lambda offset, size: offset >= 0 and offset + size <= content.numel())

    def tensor(offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        size = dtype.itemsize * torch.Size(shape).numel()
        return content[offset : offset + size].view(dtype).view(shape)

    return decode(words, tensor)
