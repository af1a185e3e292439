"""TensorBoard's files."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


@contextmanager
def _without_tensorflow() -> Iterator[None]:
    """TensorBoard would import TensorFlow where it is installed, which takes seconds. It does not if it finds a module
    of this name."""
    stub = "tensorboard.compat.notf"
    if "tensorflow" in sys.modules or stub in sys.modules:  # the user's script has it already, or does not want it
        yield
        return
    sys.modules[stub] = ModuleType(stub)
    try:
        yield
    finally:
        del sys.modules[stub]


def writer(directory: Path) -> SummaryWriter:
    """A writer into a folder. Imported only here: it takes time, and its own warnings are not the user's."""
    with warnings.catch_warnings(), _without_tensorflow():
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
