"""The samples of a worker's consecutive mini-batches, gathered several batches at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice

from paceline.sampling import LARGE_CHUNK, Stream, sample_seeds
from paceline.torch_task.batch_parts import Parts, tensors_in
from paceline.torch_task.samples import Samples

BYTES = 1 << 20  # of the batches that are made together, unless one has more: half of a core's cache
MOST = 16  # batches


def row_blocks(
    train: Samples, stream: Stream, seed: int, rank: int, first: int, finish: Callable[[Parts], Parts]
) -> Iterator[list[tuple[int, Parts]]]:
    """Seeds and parts of the batches from number `first` on; `finish` makes the parts of the samples. The first block
    is one batch, so that it comes soon."""
    seeds, indices = sample_seeds(seed, rank, first), stream.from_(first, LARGE_CHUNK)
    number, most = 1, 0
    while True:
        made = [finish(rows) for rows in train.take_many(list(islice(indices, number)))]
        yield [(next(seeds), parts) for parts in made]
        if not most:
            most = max(1, min(MOST, BYTES // max(1, sum(one.nbytes for one in tensors_in(made[0])))))
        number = min(4 * number, most)
