"""What crosses between processes: how large it is, and how a result is put together from parts of the vector."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def size(content: Any) -> int:
    """Bytes."""
    if isinstance(content, Tensor):
        return content.numel() * content.element_size()
    return sum(map(size, content)) if isinstance(content, tuple) else 8


def joined(results: Sequence[Any]) -> Any:
    """One result from those of the pieces: tensors end to end, numbers from the first piece."""
    first = results[0]
    if isinstance(first, Tensor):
        return torch.cat(list(results), dim=-1) if first.dim() else first
    if isinstance(first, tuple):
        return tuple(joined(items) for items in zip(*results, strict=True))
    return first


def cut(args: tuple[Any, ...], low: int, high: int, length: int) -> tuple[Any, ...]:
    """Arguments for the server of coordinates low to high: vectors as long as x are cut, the rest stays whole."""
    return tuple(cut(a, low, high, length) if isinstance(a, tuple) else _part(a, low, high, length) for a in args)


def _part(value: Any, low: int, high: int, length: int) -> Any:
    vector = isinstance(value, Tensor) and value.dim() and value.is_floating_point() and value.shape[-1] == length
    return value[..., low:high] if vector else value


def assembled(results: Sequence[Any], widths: Sequence[int]) -> Any:
    """One result from those of several servers: parts of vectors end to end, all else as the first server gave it."""
    first = results[0]
    if isinstance(first, tuple):
        return tuple(assembled(items, widths) for items in zip(*results, strict=True))
    parts = isinstance(first, Tensor) and first.dim() and first.is_floating_point() and first.shape[-1] == widths[0]
    return torch.cat(list(results), dim=-1) if parts else first
