"""Messages between the processes of one worker: a line of JSON, then the bytes of tensors. Nothing is pickled."""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

import torch
from torch import Tensor

from paceline.task import Batch

_HEAD = struct.Struct("<q")  # the length of the JSON


def send(connection: socket.socket, message: dict[str, Any], batch: Batch | None = None) -> None:
    """Send plain data, and a slice of a batch."""
    tensors: list[Tensor] = []
    if batch is not None:
        tree = _described(batch.data, tensors)
        kinds = [[str(one.dtype).removeprefix("torch."), list(one.shape)] for one in tensors]
        told = {"size": batch.size, "seed": batch.seed, "weight": batch.weight, "data": tree, "tensors": kinds}
        message = message | {"batch": told}
    text = json.dumps(message).encode()
    connection.sendall(_HEAD.pack(len(text)) + text)
    for one in tensors:
        if one.numel():
            connection.sendall(_bytes(one.contiguous()))


def receive(connection: socket.socket) -> tuple[dict[str, Any], Batch | None] | None:
    """The next message and its slice; None when the other process has closed its end, or died."""
    head = bytearray(_HEAD.size)
    try:
        if not _filled(connection, memoryview(head)):
            return None
        text = bytearray(_HEAD.unpack(head)[0])
        if not _filled(connection, memoryview(text)):
            return None
        message = json.loads(text)
        told = message.pop("batch", None)
        if told is None:
            return message, None
        tensors = []
        for kind, shape in told["tensors"]:
            one = torch.empty(shape, dtype=getattr(torch, kind))  # aligned as torch's own
            if one.numel() and not _filled(connection, _bytes(one)):
                return None
            tensors.append(one)
    except ConnectionResetError:
        return None
    data = _restored(told["data"], tensors)
    return message, Batch(data, told["size"], told["seed"], told["weight"])


def _described(part: Any, tensors: list[Tensor]) -> Any:
    """A part of a batch as JSON; its tensors are put on the list."""
    if isinstance(part, Tensor):
        tensors.append(part)
        return {"tensor": len(tensors) - 1}
    if isinstance(part, dict):
        return {"items": [[key, _described(value, tensors)] for key, value in part.items()]}
    if type(part) in (tuple, list):
        return {type(part).__name__: [_described(one, tensors) for one in part]}
    return {"value": part}


def _restored(tree: dict[str, Any], tensors: list[Tensor]) -> Any:
    ((kind, value),) = tree.items()
    if kind == "tensor":
        return tensors[value]
    if kind == "items":
        return {key: _restored(one, tensors) for key, one in value}
    if kind in ("tuple", "list"):
        return (tuple if kind == "tuple" else list)(_restored(one, tensors) for one in value)
    return value


def _bytes(tensor: Tensor) -> memoryview:
    plain: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(plain)


def _filled(connection: socket.socket, room: memoryview) -> bool:
    """Read until the room is full; False if the other end has closed before."""
    while len(room):
        count = connection.recv_into(room)
        if not count:
            return False
        room = room[count:]
    return True
