"""A worker's mini-batches of samples that have an index."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING

from paceline.sampling import CHUNK, LARGE_CHUNK, Indices, sample_seeds
from paceline.task import Batch
from paceline.torch_task import loaders
from paceline.torch_task.ahead_thread import made_ahead
from paceline.torch_task.batch_parts import Parts
from paceline.torch_task.random_numbers import not_seeded, seeding_of
from paceline.torch_task.row_blocks import row_blocks
from paceline.torch_task.samples import Samples

if TYPE_CHECKING:
    from paceline.torch_task.sampled_task import SampledTask


def drawn_batches(
    task: SampledTask,
    rank: int,
    workers: int,
    seed: int,
    first: int,
    *,
    alone: bool = False,
    thread: bool = False,
    num_workers: int = 0,
) -> Iterator[Batch]:
    """The batches from number `first` on. `alone`: the worker has a process of its own, with memory for many indices;
    `thread`: a thread gathers the samples ahead, where neither they nor their order are made by code of the user, which
    would draw from the random numbers of the gradient; so it calls only a `prepare` that is known to draw none.
    `num_workers`: processes that make whole batches ahead."""
    train = task.train
    assert isinstance(train, Samples)
    stream = task.stream(rank, workers, seed)
    seeding = seeding_of(task.prepare, draws=train.draws)

    def fetch(drawn: tuple[int, Indices]) -> tuple[int, Parts]:
        own, indices = drawn
        with seeding(own ^ 1):  # other numbers than those of dropout
            return own, task._cast_parts(train.take(indices))

    def finished(gathered: tuple[int, Parts]) -> tuple[int, Parts]:
        own, parts = gathered
        with seeding(own ^ 1):
            return own, task._cast_parts(parts)

    def ready(parts: Parts) -> Parts:
        return task._pinned(task._cast_parts(parts))

    def drawn() -> Iterator[Batch]:
        made: Iterator[tuple[int, Parts]]
        if thread and not num_workers and not train.draws and stream.in_key_order:
            whole = seeding is not_seeded
            blocks = made_ahead(row_blocks(train, stream, seed, rank, first, ready if whole else tuple))
            made = chain.from_iterable(blocks)
            made = made if whole else map(finished, made)
        else:
            blocks, indices = None, stream.from_(first, LARGE_CHUNK if alone else CHUNK)
            asked = zip(sample_seeds(seed, rank, first), indices, strict=False)
            made = loaders.read_ahead(asked, fetch, num_workers, task._processes) if num_workers else map(fetch, asked)
        try:
            for own, parts in made:
                yield Batch(task._placed(parts), stream.size, own, stream.weight)
        finally:
            if blocks is not None:
                blocks.close()

    return drawn()  # so that a wrong request fails here, not at the first batch
