"""Encodes the arguments and results of calls as 64-bit words: a tensor by its offset in shared memory, other values
themselves. Nothing is pickled."""

from __future__ import annotations

import math
import struct
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.errors import SchemeError

NONE, WHOLE, REAL, TRUTH, TENSOR, TEXT, TUPLE = range(7)
DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)
_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}
MOST = 480  # words of one message
_LONGEST_TEXT = 2048
_MOST_DIMENSIONS = 64
_LARGEST = 1 << 48  # bytes of a tensor, where a dimension of size 0 counts as 1


def encode(values: tuple[Any, ...], place: Callable[[Tensor], int]) -> array[int]:
    """The values as words; `place` copies a tensor to shared memory and gives its offset."""
    words = array("q")
    _write(values, place, words)
    if len(words) > MOST:
        raise SchemeError(f"a call carries too much besides its tensors ({len(words)} words, {MOST} are allowed)")
    return words


def _write(values: tuple[Any, ...], place: Callable[[Tensor], int], words: array[int]) -> None:
    words.append(len(values))
    for value in values:
        if isinstance(value, Tensor):
            if value.dtype not in _CODES:
                raise SchemeError(f"a tensor of {value.dtype} cannot cross between processes")
            words.extend((TENSOR, _CODES[value.dtype], place(value), value.dim(), *value.shape))
        elif isinstance(value, bool):
            words.extend((TRUTH, int(value)))
        elif isinstance(value, int):
            if not -(1 << 63) <= value < 1 << 63:
                raise SchemeError(f"the number {value} has more than 64 bits and cannot cross between processes")
            words.extend((WHOLE, value))
        elif isinstance(value, float):
            words.extend((REAL, struct.unpack("q", struct.pack("d", value))[0]))
        elif value is None:
            words.append(NONE)
        elif isinstance(value, str):
            text = value.encode()
            if len(text) > _LONGEST_TEXT:
                raise SchemeError(f"a text of {len(text)} bytes is too long to cross between processes")
            words.extend((TEXT, len(text)))
            words.frombytes(text + bytes(-len(text) % 8))
        elif isinstance(value, tuple):
            words.append(TUPLE)
            _write(value, place, words)
        else:
            raise SchemeError(
                f"a {type(value).__name__} cannot cross between processes; "
                "only tensors, numbers, strings and tuples of them do"
            )


def check(words: Sequence[int], allowed: Callable[[int, int], bool]) -> int:
    """Check words that came over a network before `decode` gets them: ValueError if they are malformed. `allowed` says
    whether the peer may use these bytes (offset, size). Gives the number of values."""
    return len(decode_checked(words, allowed, lambda *_: NOTHING))


def decode_checked(
    words: Sequence[int],
    allowed: Callable[[int, int], bool],
    tensor: Callable[[int, torch.dtype, tuple[int, ...]], Tensor],
) -> tuple[Any, ...]:
    """The values of words that came over a network; ValueError as from `check`. `tensor` gives the tensor at an offset
    that has been checked."""
    if not 0 < len(words) <= MOST:
        raise ValueError(f"{len(words)} words; 1 to {MOST} are allowed")

    def checked(offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        size = extent = dtype.itemsize * math.prod(shape)
        if size <= 0:
            extent = dtype.itemsize * math.prod(max(one, 1) for one in shape)
        wrong = (shape and min(shape) < 0) or extent > _LARGEST or offset % dtype.itemsize
        if wrong or (size and not allowed(offset, size)):
            raise ValueError(f"a tensor of shape {shape} at {offset}, which is not allowed")
        return tensor(offset, dtype, shape)

    try:
        values, end = _read(words, 0, checked)
    except IndexError:
        raise ValueError("words are missing") from None
    if end != len(words):
        raise ValueError(f"the values take {end} words; there are {len(words)}")
    return values


NOTHING = torch.empty(0)  # where a tensor is wanted and only its description counts


def decode(words: list[int], tensor: Callable[[int, torch.dtype, tuple[int, ...]], Tensor]) -> tuple[Any, ...]:
    """The values that `encode` was given; `tensor` gives the tensor at an offset."""
    return _read(words, 0, tensor)[0]


def _read(words: Sequence[int], at: int, tensor: Callable[..., Tensor]) -> tuple[tuple[Any, ...], int]:
    """The values that start at a word, and the index of the word after them."""
    count, at = words[at], at + 1
    if not 0 <= count <= len(words):
        raise ValueError(f"{count} values in {len(words)} words")
    values: list[Any] = []
    for _ in range(count):
        kind = words[at]
        if kind == TENSOR:
            code, offset, dims = words[at + 1 : at + 4]
            if not (0 <= code < len(DTYPES) and 0 <= dims <= _MOST_DIMENSIONS):
                raise ValueError(f"a tensor of kind {code} with {dims} dimensions")
            values.append(tensor(offset, DTYPES[code], tuple(words[at + 4 : at + 4 + dims])))
            at += 4 + dims
        elif kind == WHOLE:
            values.append(words[at + 1])
            at += 2
        elif kind == REAL:
            values.append(struct.unpack("d", struct.pack("q", words[at + 1]))[0])
            at += 2
        elif kind == TRUTH:
            values.append(bool(words[at + 1]))
            at += 2
        elif kind == NONE:
            values.append(None)
            at += 1
        elif kind == TEXT:
            length = words[at + 1]
            if not 0 <= length <= _LONGEST_TEXT:
                raise ValueError(f"a text of {length} bytes")
            end = at + 2 - (-length // 8)
            values.append(array("q", words[at + 2 : end]).tobytes()[:length].decode())
            at = end
        elif kind == TUPLE:
            inner, at = _read(words, at + 1, tensor)  # no deeper than MOST, which recursion can take
            values.append(inner)
        else:
            raise ValueError(f"a value of kind {kind}")
    return tuple(values), at
