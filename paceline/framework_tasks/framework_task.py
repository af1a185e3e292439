"""What tasks of other frameworks share: their data, their launcher, their evaluation."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self, get_args

import torch
from torch import Tensor

from paceline.errors import UsageError
from paceline.fields import Feed
from paceline.framework_tasks.beginning import Beginning, computed_aside
from paceline.framework_tasks.framework_start import started
from paceline.state import Vector
from paceline.task import Batch, BufferPolicy
from paceline.torch_task.batch_parts import Parts, mapped
from paceline.torch_task.random_numbers import all_seeded
from paceline.torch_task.sampled_task import EVALUATION_CHUNK, SampledTask
from paceline.torch_task.samples import Collate
from paceline.torch_task.streams import StreamSamples

ADVICE = "give the task a function that builds the model, and the data as arrays or as a function"


class FrameworkTask(SampledTask):
    """A model that another framework computes. The framework is imported where the task is made, and started where it
    computes: the processes of a run are forked in between."""

    bears_fork = False  # whether the framework survives a fork after it has computed

    def __init__(
        self,
        train: Any,
        test: Any,
        *,
        batch: int | None,
        feed: Feed | None,
        shuffle: bool | None,
        collate: Collate | None,
        name: str,
        prepare: Callable[..., Any] | None,
        buffer_policy: BufferPolicy,
        dtype: torch.dtype | str | None,
        notice: str | None,
    ) -> None:
        if buffer_policy not in get_args(BufferPolicy):
            raise UsageError(f"buffer_policy must be one of {', '.join(get_args(BufferPolicy))}, not {buffer_policy!r}")
        self.name, self.notice, self.buffer_policy, self.prepare = name, notice, buffer_policy, prepare
        self.dtype: torch.dtype | None = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
        if dtype is not None and self.dtype not in (torch.float32, torch.float64, torch.float16):
            raise UsageError(f"dtype must be float32, float64 or float16, not {dtype}")
        self._take_data(train, test, collate, batch, shuffle, None)
        if self.num_workers:
            self.num_workers = 0  # its processes would be forked from one in which the framework computes
            self.notice = self.notice or "num_workers of the DataLoader is not used: each worker reads its own batches"
        self.feed = feed or ("shard" if isinstance(self.train, StreamSamples) else "shared")
        self._check_feed()
        self._beginnings: dict[int, Beginning] = {}
        self._launcher: int | None = None  # the process that must not compute
        # compiled functions of this process: copies of the task (another batch, fewer test samples) share them
        self._computation: dict[str, Any] = {}

    @abstractmethod
    def _begun(self, seed: int) -> Beginning:
        """What a run with this seed begins with, computed in this process."""

    @abstractmethod
    def _start_framework(self) -> None:
        """Have the framework ready to compute in this process."""

    @abstractmethod
    def _gradient(self, x: Vector, batch: Batch, out: Vector, buffers: Mapping[str, Tensor]) -> float:
        """The loss, times the batch's weight; its gradient goes to `out`."""

    @abstractmethod
    def _measured(self, x: Vector, parts: Parts, buffers: Mapping[str, Tensor]) -> dict[str, float]:
        """The loss and the metrics of some samples."""

    def _measured_together(self) -> dict[str, float]:
        """Metrics of all samples since the last call that are no means of those of their parts."""
        return {}

    def in_launcher(self) -> str | None:
        framework = None if self.bears_fork else started()
        self._launcher = None if framework else os.getpid()
        if framework is None or self.bears_fork:
            return None
        return f"{framework} has computed in the launcher, which then cannot fork ({ADVICE})"

    def _beginning(self, seed: int) -> Beginning:
        if seed not in self._beginnings:

            def compute() -> Beginning:
                with self._working():
                    return self._begun(seed)

            aside = self._launcher == os.getpid() and not self.bears_fork
            made = computed_aside(compute, f"task {self.name!r}") if aside else compute()
            for old in [key for key in self._beginnings if key]:
                del self._beginnings[old]
            self._beginnings[seed] = made
        return self._beginnings[seed]

    def start(self, seed: int) -> Vector:
        return self._beginning(seed).vector.clone()

    def parameters(self) -> list[tuple[str, list[int]]]:
        known = next(iter(self._beginnings.values()), None)
        return (known or self._beginning(0)).parameters

    def buffers(self) -> dict[str, Tensor]:
        return {name: one.clone() for name, one in self._beginning(0).buffers.items()}

    def grad(
        self, x: Vector, batch: Batch, out: Vector | None = None, buffers: Mapping[str, Tensor] | None = None
    ) -> tuple[float, Vector]:
        out = torch.empty_like(x) if out is None else out
        with self._working():
            return self._gradient(x, batch, out, self._held(buffers)), out

    def evaluate(self, x: Vector, buffers: Mapping[str, Tensor] | None = None) -> dict[str, float]:
        sums: dict[str, float] = {}
        total = 0
        with self._working(), all_seeded(0):
            held = self._held(buffers)
            for chunk, size in self.test.chunks(EVALUATION_CHUNK):
                total += size
                for name, value in self._measured(x, self._prepared(chunk), held).items():
                    sums[name] = sums.get(name, 0.0) + value * size
            together = self._measured_together()
        if not total:
            raise UsageError(f"task {self.name!r}: the test data give no samples")
        return {name: value / total for name, value in sums.items()} | together

    def _held(self, buffers: Mapping[str, Tensor] | None) -> Mapping[str, Tensor]:
        return self.buffers() if buffers is None else buffers

    @contextmanager
    def _working(self) -> Iterator[None]:
        self._start_framework()
        try:
            yield
        except Exception as error:
            error.add_note(f"in task {self.name!r}")
            raise

    def _cast_parts(self, parts: Parts) -> Parts:
        made, kind = super()._cast_parts(parts), self.dtype
        if kind is None:
            return made
        cast: Parts = mapped(lambda one: one.to(kind) if one.is_floating_point() else one, made)
        return cast

    def __copy__(self) -> Self:
        other = object.__new__(type(self))
        vars(other).update(vars(self))
        return other

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_computation": {}, "_launcher": None}  # another process compiles for itself


def two_words(seed: int) -> tuple[int, int]:
    """A 63-bit seed as two numbers of 31 bits, which every framework takes."""
    return (seed >> 32) & 0x7FFFFFFF, seed & 0x7FFFFFFF


def as_numpy(part: Any) -> Any:
    """A part of a batch as arrays that share its memory."""
    if isinstance(part, Tensor):
        return part.numpy()
    if isinstance(part, Mapping):
        return {name: as_numpy(one) for name, one in part.items()}
    if isinstance(part, tuple | list):
        return type(part)(as_numpy(one) for one in part)
    return part
