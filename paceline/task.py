"""The contract of a task: a model and its data, without anything distributed."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, Self, get_args

import torch
from torch import Tensor

from paceline.errors import UsageError
from paceline.fields import Feed
from paceline.state import Vector

BufferPolicy = Literal["average", "chief"]
Buffers = Mapping[str, Tensor] | None


@dataclass(frozen=True, slots=True)
class Batch:
    """One mini-batch: the tensors of the loss, and the seed that makes its gradient reproducible."""

    data: tuple[Any, ...]  # tensors, the target last; or one dictionary of them
    size: int
    seed: int = 0  # of dropout and augmentation, so that a batch gives the same gradient in every process
    weight: float = 1.0  # under `slice`: workers * size / global size, so that the mean over workers is exact


class GradientStopped(Exception):
    """A gradient was given up before its end: it has become useless (`Task.watch`)."""


@dataclass(frozen=True, slots=True)
class GradientBlock:
    """Gradients that were computed at once: a row each, with their losses and the samples of their batches."""

    losses: Tensor
    gradients: Tensor
    sizes: list[int]


class BatchedGradients(Protocol):
    """Computes the gradients of many workers at once, each at its own point and on its own mini-batch."""

    def capacity(self) -> int:
        """The number of gradients that fit into memory at once."""

    def compute(self, points: Tensor, ranks: Sequence[int], numbers: Sequence[int]) -> GradientBlock:
        """The gradients at the rows of `points`, each on the batch with this number of the worker with this rank."""


class Task(ABC):
    """Model + data. Four methods are the contract; the rest has defaults.

    The parameters are one flat vector `x`. `grad` is pure in `x`: it reads x and changes nothing but `out` and
    `buffers`, so that one task serves many simulated workers.
    """

    name: str = "task"
    batch: int = 32
    feed: Feed = "shared"
    shuffle: bool = True
    buffer_policy: BufferPolicy = "average"
    heterogeneous: bool = False  # workers see different data: their optima differ
    epoch_size: int | None = None  # training samples; None: unknown, or the task makes them up
    notice: str | None = None  # printed before a run, e.g. when a smaller data set replaces this one

    @abstractmethod
    def start(self, seed: int) -> Vector:
        """The parameters at the start: a new vector, a function of the seed."""

    @abstractmethod
    def batches(self, rank: int, workers: int, seed: int, first: int = 0) -> Iterator[Batch]:
        """Worker `rank`'s mini-batches from number `first` on: a pure function of (seed, rank, count)."""

    def prefetched(
        self, rank: int, workers: int, seed: int, first: int = 0, directory: Path | None = None
    ) -> Iterator[Batch]:
        """The same mini-batches for a worker in a process of its own: a task may have other processes read them ahead,
        and keep in the run directory what finds a later batch sooner."""
        return self.batches(rank, workers, seed, first)

    def threaded(
        self, rank: int, workers: int, seed: int, first: int = 0, directory: Path | None = None
    ) -> Iterator[Batch]:
        """The same where a core is free beside the training: a task may have a thread of this process read them
        ahead."""
        return self.prefetched(rank, workers, seed, first, directory)

    def warnings(self, workers: int) -> Iterator[str]:
        """What the user should know before training, as sentences."""
        if self.epoch_size is None:
            return
        share = self.epoch_size // workers if self.feed == "shard" else self.epoch_size
        if self.batch > share:
            whose = "training samples" if self.feed != "shard" else f"samples of a worker's shard ({workers} workers)"
            yield f"batch {self.batch:,} is larger than the {share:,} {whose}: a batch has samples more than once"

    @abstractmethod
    def grad(self, x: Vector, batch: Batch, out: Vector | None = None, buffers: Buffers = None) -> tuple[float, Vector]:
        """Loss and gradient of the batch's mean loss at x; the gradient is written into `out` if given.

        Without `out` the gradient may be a buffer that the next call overwrites. `buffers` are the caller's own
        copies of the non-trainable state (see `buffers()`), updated in place.
        """

    @property
    def follows(self) -> bool:
        """Whether `follow` has an effect."""
        return False

    def follow(self, final: Callable[[int, int], None] | None) -> None:  # noqa: B027
        """While the next gradient is computed, call `final(index, version)` when the numbers of `out` from an index on
        do not change any more; `version` is the count of writes to `out`. An index of -1 takes it all back."""

    def watch(self, useless: Callable[[], bool] | None) -> None:  # noqa: B027
        """While gradients are computed, ask now and then whether the present one is `useless`, and raise
        `GradientStopped` if it is. A task that cannot stop ignores it: its gradient is thrown away at the end."""

    @abstractmethod
    def evaluate(self, x: Vector, buffers: Buffers = None) -> dict[str, float]:
        """Metrics of x on the test data; `loss` is always among them."""

    def buffers(self) -> dict[str, Tensor]:
        """New copies of the non-trainable state, by name (BatchNorm's running statistics); most tasks have none.

        Every worker trains with its own. For evaluation and checkpoints `buffer_policy` decides: `average` takes the
        mean over the workers (integers: the largest), `chief` takes worker 0's.
        """
        return {}

    def trained_model(self, x: Vector, buffers: Buffers = None) -> Any:
        """The model of this task with the weights x, as its framework has it: new, ready to predict and to save."""
        raise UsageError(
            f"task {self.name!r} trains a plain vector, not a model; the vector itself is "
            "paceline.runs.checkpoint.load(PATH).tensors['model']"
        )

    def outputs(self, model: Any, inputs: tuple[Any, ...]) -> Any:
        """The output of a `trained_model` for the inputs of some samples, as tensors of torch."""
        raise UsageError(f"task {self.name!r} trains a plain vector, which predicts nothing")

    def in_launcher(self) -> str | None:
        """Called in the process that is about to fork the processes of a run: why it must not, because a library that
        the task computes with has started threads in it; None: it may. From then on the task starts none there."""
        return None

    def parameters(self) -> list[tuple[str, list[int]]]:
        """Names and shapes of the parameters, in the order of the vector; empty if it is one parameter."""
        return []

    def curvature(self) -> float | None:
        """The largest curvature of the loss, or None if unknown; stability warnings need it."""
        return None

    def on(self, device: torch.device) -> Self:
        """This task on another device."""
        raise UsageError(f"task {self.name!r} computes on the cpu only, not on {device}")

    def batched(self, workers: int, seed: int) -> BatchedGradients:
        """What computes the gradients of many workers at once, equal to those of `grad` up to rounding."""
        raise UsageError(f"task {self.name!r} computes its gradients one by one; omit batched")

    def limited(self, samples: int) -> Self:
        """This task, evaluated on the first `samples` test samples only."""
        raise UsageError(f"task {self.name!r} has no test samples to take fewer of; omit eval_steps")

    def configured(self, *, batch: int | None = None, feed: Feed | None = None, shuffle: bool | None = None) -> Self:
        """This task with another batch size, feed or order (a shallow copy; None keeps the present value)."""
        if batch is not None and batch < 1:
            raise UsageError(f"batch must be at least 1, not {batch}")
        if feed is not None and feed not in get_args(Feed):
            raise UsageError(f"feed must be one of {', '.join(get_args(Feed))}, not {feed!r}")
        other = copy.copy(self)
        other.batch = self.batch if batch is None else batch
        other.feed = self.feed if feed is None else feed
        other.shuffle = self.shuffle if shuffle is None else shuffle
        return other


def average_buffers(rows: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The mean of several workers' buffers; of counts the largest."""
    stacked = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    return {name: one.mean(dim=0) if one.is_floating_point() else one.amax(dim=0) for name, one in stacked.items()}
