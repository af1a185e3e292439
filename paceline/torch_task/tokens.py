"""Sequences cut from one long row of tokens, such as a file of 16-bit numbers that is mapped into memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.errors import DataError, UsageError


class Tokens:
    """A data set of sequences: sample i is `context` tokens from place i * stride on, and the target is the same
    sequence one token later.

    tokens: the path of a file of `dtype` numbers, which is mapped and never read as a whole, or an array or tensor;
    stride: the tokens between two starts. `context` (the default) cuts the text into pieces, so that an epoch has each
            token once; 1 has a sample for every place, from which a shuffled run draws as nanoGPT does.
    """

    def __init__(
        self,
        tokens: str | Path | NDArray[Any] | Tensor,
        context: int,
        *,
        stride: int | None = None,
        dtype: str = "uint16",
    ) -> None:
        for name, value in (("context", context), ("stride", 1 if stride is None else stride)):
            if value < 1:
                raise UsageError(f"Tokens: {name} must be at least 1, not {value}")
        self.context, self.stride = context, context if stride is None else stride
        self._file: tuple[str, str, int, int] | None = None
        if isinstance(tokens, str | Path):
            path = Path(tokens)
            if not path.is_file():
                raise DataError(f"there is no file of tokens {path}")
            size = np.dtype(dtype).itemsize
            if path.stat().st_size % size:
                raise DataError(f"{path} is no file of {dtype} numbers: its size is no multiple of {size}")
            self._file = (str(path.resolve()), dtype, 0, path.stat().st_size // size)
        elif isinstance(tokens, np.memmap) and tokens.filename is not None and tokens.ndim == 1:
            self._file = (str(tokens.filename), str(tokens.dtype), int(tokens.offset), len(tokens))
        self._tokens = self._mapped() if self._file is not None else _plain(tokens)
        self._length = max(0, (len(self._tokens) - context - 1) // self.stride + 1)
        if len(self._tokens) < context + 1:
            raise UsageError(f"{len(self._tokens)} tokens are too few for a sequence of {context} and its targets")

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < self._length:
            raise IndexError(index)
        first = index * self.stride
        cut = torch.from_numpy(self._tokens[first : first + self.context + 1].astype(np.int64))
        return cut[:-1], cut[1:]

    def gathered(self, indices: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """The samples with these indices, stacked."""
        if not ((indices >= 0) & (indices < self._length)).all():
            raise IndexError(indices)
        reach = np.arange(self.context + 1)
        rows = torch.from_numpy(self._tokens[(indices * self.stride)[:, None] + reach].astype(np.int64, copy=False))
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def __getstate__(self) -> dict[str, Any]:
        """Another process maps the file itself: the tokens are not copied."""
        state = dict(vars(self))
        if self._file is not None:
            del state["_tokens"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if self._file is not None:
            self._tokens = self._mapped()

    def _mapped(self) -> NDArray[Any]:
        assert self._file is not None
        path, dtype, offset, length = self._file
        return np.memmap(path, np.dtype(dtype), "r", offset, (length,))


def _plain(tokens: Any) -> NDArray[Any]:
    array = tokens.numpy() if isinstance(tokens, Tensor) else np.asarray(tokens)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise UsageError(f"Tokens takes one row of whole numbers, not {array.dtype} of shape {array.shape}")
    return array
