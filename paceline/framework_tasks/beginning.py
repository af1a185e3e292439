"""What a run begins with: the first vector, the names of its parts, and the non-trainable state.

A launcher forks, and a framework that has computed there would not survive that. So a launcher has a child process
compute the beginning, and reads it from a pipe: as JSON and plain bytes.
"""

from __future__ import annotations

import json
import os
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from paceline.errors import PacelineError, UsageError
from paceline.state import Vector


@dataclass(frozen=True)
class Beginning:
    """The first vector, the names and shapes of the parameters in it, and the first buffers."""

    vector: Vector
    parameters: list[tuple[str, list[int]]]
    buffers: dict[str, Tensor] = field(default_factory=dict)


def flat(named: Sequence[tuple[str, np.ndarray]], who: str) -> tuple[Vector, list[tuple[str, list[int]]]]:
    """Arrays as one vector, and their names and shapes. UsageError unless they have one floating-point type."""
    kinds = sorted({array.dtype.name for _, array in named})
    if not named:
        raise UsageError(f"{who} has no weights to train")
    if len(kinds) > 1 or kinds[0] not in ("float16", "float32", "float64"):
        raise UsageError(
            f"the weights of {who} are {', '.join(kinds)}: they must have one type, float32 or float64 (or float16)"
        )
    vector = torch.from_numpy(np.concatenate([np.ascontiguousarray(array).reshape(-1) for _, array in named]))
    return vector, [(name, list(array.shape)) for name, array in named]


def places(parameters: Sequence[tuple[str, list[int]]]) -> list[tuple[int, int, tuple[int, ...]]]:
    """Where each parameter begins and ends in the vector, and its shape."""
    found, end = [], 0
    for _, shape in parameters:
        begin, end = end, end + int(np.prod(shape, dtype=np.int64))
        found.append((begin, end, tuple(shape)))
    return found


def computed_aside(compute: Callable[[], Beginning], what: str) -> Beginning:
    """The beginning that a child process computes; its error, if it has one, is raised here."""
    reads, writes = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # libraries' idle threads take care of a fork themselves
        pid = os.fork()
    if not pid:
        try:
            os.close(reads)
            with os.fdopen(writes, "wb") as pipe:
                pipe.write(_bytes(compute))
        finally:
            os._exit(0)
    os.close(writes)
    with os.fdopen(reads, "rb") as pipe:
        data = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if not data:
        raise PacelineError(f"the process that makes the first weights of {what} ended with exit code {status}")
    return _read(data)


def _bytes(compute: Callable[[], Beginning]) -> bytes:
    try:
        made = compute()
    except UsageError as error:
        return json.dumps({"refused": str(error)}).encode()
    except BaseException as error:
        traceback.print_exc()
        return json.dumps({"failed": f"{type(error).__name__}: {error}"}).encode()
    tensors = {"": made.vector, **made.buffers}
    header = {
        "parameters": made.parameters,
        "tensors": [(name, str(one.dtype).removeprefix("torch."), list(one.shape)) for name, one in tensors.items()],
    }
    raw = [one.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for one in tensors.values()]
    return b"".join([json.dumps(header).encode(), b"\n", *raw])


def _read(data: bytes) -> Beginning:
    line, _, rest = data.partition(b"\n")
    header = json.loads(line)
    if "refused" in header:
        raise UsageError(header["refused"])
    if "failed" in header:
        raise PacelineError(header["failed"])
    found, end = {}, 0
    for name, kind, shape in header["tensors"]:
        like = torch.empty(shape, dtype=getattr(torch, kind))
        begin, end = end, end + like.numel() * like.element_size()
        if like.numel():
            plain = torch.frombuffer(bytearray(rest[begin:end]), dtype=like.dtype)
            like.copy_(plain.reshape(shape))
        found[name] = like
    return Beginning(found.pop(""), [(name, shape) for name, shape in header["parameters"]], found)
