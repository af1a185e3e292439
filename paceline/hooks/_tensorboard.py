"""TensorBoard's files."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


def writer(directory: Path) -> SummaryWriter:
    """A writer into a folder. Imported only here: it takes a second, and its own warnings are not the user's."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(str(directory))


def add_counts(to: SummaryWriter, tag: str, counts: Mapping[int, int], step: int) -> None:
    """A histogram of whole numbers from how often each was seen: one bar for each, as wide as one."""
    if not counts:
        return
    edges: dict[float, int] = {}  # right edge of a bar -> its count
    for number, count in sorted(counts.items()):
        edges.setdefault(number - 0.5, 0)  # the range between two bars is empty
        edges[number + 0.5] = count
    to.add_histogram_raw(
        tag,
        min=min(counts) - 0.5,
        max=max(counts) + 0.5,
        num=sum(counts.values()),
        sum=sum(number * count for number, count in counts.items()),
        sum_squares=sum(number * number * count for number, count in counts.items()),
        bucket_limits=list(edges),
        bucket_counts=list(edges.values()),
        global_step=step,
    )
