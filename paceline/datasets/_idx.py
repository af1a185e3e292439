"""The idx format of MNIST: a type, the dimensions, and bytes."""

from __future__ import annotations

import math
import struct

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.errors import DataError


def read(content: bytes) -> Tensor:
    """The tensor of unsigned bytes that idx content holds."""
    zero, kind, dims = struct.unpack_from(">HBB", content)
    shape = struct.unpack_from(f">{dims}I", content, 4)
    begin = 4 + 4 * dims
    if zero or kind != 8 or len(content) - begin != math.prod(shape):
        raise DataError(f"not idx content of unsigned bytes: type {kind}, shape {shape}, {len(content)} bytes")
    array = np.frombuffer(content, np.uint8, offset=begin)
    return torch.from_numpy(array.reshape(shape).copy())


def write(array: NDArray[np.uint8]) -> bytes:
    """The idx content of an array of unsigned bytes."""
    header = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
    return header + np.ascontiguousarray(array).tobytes()
