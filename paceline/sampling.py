"""The samples of a mini-batch: a pure function of (seed, rank, count), without a stored order.

The order of an epoch is a keyed permutation of range(n), computed when it is needed. So a worker can start at batch one
billion at once, and ten thousand simulated workers need no memory for their orders.
"""

import math
from collections.abc import Callable, Iterator
from hashlib import blake2b
from itertools import count
from typing import NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from paceline.errors import UsageError
from paceline.fields import Feed

Words = NDArray[np.uint64]
Indices = NDArray[np.int64]

CHUNK = 1024  # indices computed together once a stream runs, to spread numpy's cost per call
LARGE_CHUNK = 8192  # for a worker with a process of its own, which has memory for it: a third of the time
ROUNDS = 4  # of the Feistel network; each one changes both halves

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def mixed(*parts: int | str) -> int:
    """A 63-bit seed that depends on every part."""
    text = "\x1f".join(map(str, parts)).encode()
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "little") >> 1


def sample_seed(seed: int, rank: int, count: int) -> int:
    """The seed of the random numbers inside one mini-batch (dropout, noise): 63 bits."""
    return mixed("sample", seed, rank, count)


def sample_seeds(seed: int, rank: int, first: int) -> Iterator[int]:
    """`sample_seed` of the counts from `first` on. What all of them begin with is hashed once."""
    begun = blake2b(f"sample\x1f{seed}\x1f{rank}\x1f".encode(), digest_size=8)
    for number in count(first):
        one = begun.copy()
        one.update(b"%d" % number)
        yield int.from_bytes(one.digest(), "little") >> 1


class Portion(NamedTuple):
    """A worker's part of a batch: samples `first` to `first + size`, and the weight of its gradient."""

    first: int
    size: int
    weight: float


def portion(batch: int, feed: Feed, rank: int, workers: int) -> Portion:
    """The whole batch; under `slice` this worker's part of the common batch, as by numpy's array_split."""
    if feed not in get_args(Feed):
        raise UsageError(f"feed must be one of {', '.join(get_args(Feed))}, not {feed!r}")
    if batch < 1:
        raise UsageError(f"batch must be at least 1, not {batch}")
    if not 0 <= rank < workers:
        raise UsageError(f"rank must be from 0 to {workers - 1} (there are {workers} workers), not {rank}")
    if feed != "slice":
        return Portion(0, batch, 1.0)
    if batch < workers:
        raise UsageError(
            f"feed=slice splits one common batch of {batch} between {workers} workers, so some would get none; "
            f"use a batch of at least {workers}, or feed=shared"
        )
    least, extra = divmod(batch, workers)
    size = least + (rank < extra)
    return Portion(rank * least + min(rank, extra), size, workers * size / batch)


class Stream:
    """One worker's endless sequence of index arrays. Batches are always full and may span two epochs.

    shared: every worker draws from all n samples, in an order of its own;
    shard:  worker r draws only from samples r, r + N, r + 2N, …;
    slice:  `batch` is one common batch of all workers, in one common order, and each takes its slice.
    With one worker the three are the same. `shuffle=False` keeps the stored order. With `drop_last` the samples at the
    end of an epoch that make no full batch are omitted. `order` gives the samples of each epoch in another order, of
    which `n` is the length.
    """

    def __init__(
        self,
        n: int,
        batch: int,
        feed: Feed,
        shuffle: bool,
        rank: int,
        workers: int,
        seed: int,
        *,
        drop_last: bool = False,
        order: Callable[[int], Indices] | None = None,
    ) -> None:
        if n < 1:
            raise UsageError("there are no samples to draw from: the data set is empty")
        self.first, self.size, self.weight = portion(batch, feed, rank, workers)
        self.batch, self.shuffle = batch, shuffle
        self.offset, self.stride, self.n = 0, 1, n
        if feed == "shard":
            if n < workers:
                raise UsageError(
                    f"feed=shard gives each of {workers} workers its own samples, but there are only {n}; "
                    f"use at most {n} workers, or feed=shared"
                )
            self.offset, self.stride, self.n = rank, workers, (n - rank + workers - 1) // workers
        self.key = seed, 0 if feed == "slice" else rank
        self.drawn_from = self.n  # samples; an epoch has `n` of them
        if drop_last:
            self.n -= self.n % batch
            if not self.n:
                raise UsageError(f"drop_last omits all {self.drawn_from} samples: they make no batch of {batch}")
        self._order = order
        self._orders: dict[int, Indices] = {}

    def indices(self, count: int) -> Indices:
        """The samples of batch number `count`."""
        return self._block(count, 1).reshape(-1)

    def from_(self, first: int = 0, most: int = CHUNK) -> Iterator[Indices]:
        """The batches from number `first` on, computed in chunks of at most `most` indices. Chunks grow, because a
        simulated worker may take only a few."""
        most = max(1, most // self.size)
        chunk = 1
        while True:
            yield from self._block(first, chunk)
            first += chunk
            chunk = min(4 * chunk, most)

    def _block(self, first: int, batches: int) -> Indices:
        """The samples of consecutive batches, one row each."""
        epoch, begin = divmod(first * self.batch + self.first, self.n)
        lines: Words = np.arange(batches, dtype=np.uint64)
        lines = lines * np.uint64(self.batch) + np.uint64(begin)
        within: Words = np.arange(self.size, dtype=np.uint64)
        place: Words = (lines[:, None] + within).reshape(-1)
        if self._order is not None:
            return self._ordered(place, epoch).reshape(batches, self.size)
        key: Words
        if place[-1] < self.n:
            key = self._keys(epoch, 1)
        else:
            later: Words = place // np.uint64(self.n)
            place = place % np.uint64(self.n)
            key = self._keys(epoch, int(later[-1]) + 1)[later.astype(np.intp)]
        if self.shuffle:
            place = permute(place, self.drawn_from, key)
        return (place.astype(np.int64) * self.stride + self.offset).reshape(batches, self.size)

    def _ordered(self, place: Words, epoch: int) -> Indices:
        """The samples at these places, counted from the start of `epoch`."""
        assert self._order is not None
        epochs, places = np.divmod(place.astype(np.int64), self.n)
        found = np.empty_like(places)
        for later in np.unique(epochs).tolist():
            if epoch + later not in self._orders:
                self._orders = dict(list(self._orders.items())[-1:]) | {epoch + later: self._order(epoch + later)}
            chosen = epochs == later
            found[chosen] = self._orders[epoch + later][places[chosen] * self.stride + self.offset]
        return found

    def _keys(self, epoch: int, epochs: int) -> Words:
        return np.array([self.epoch_key(epoch + e) for e in range(epochs)], np.uint64)

    def epoch_key(self, epoch: int) -> int:
        """The key of the permutation that orders an epoch."""
        return mixed("order", *self.key, epoch)

    @property
    def in_key_order(self) -> bool:
        """Whether a key alone determines the order of an epoch."""
        return self._order is None


def permute(places: Words, n: int, key: Words) -> Words:
    """The image of each place under a keyed permutation of range(n); `key` has one word, or one for each place.

    A Feistel network over a grid of rows x columns just larger than n. A result beyond n is permuted again until it is
    below n (cycle walking), which keeps the map one-to-one.
    """
    rows = math.isqrt(n - 1) + 1  # rounded up: with one row it could only rotate
    columns = -(-n // rows)
    result = _feistel(places, rows, columns, key)
    out = np.flatnonzero(result >= n)
    while out.size:
        result[out] = _feistel(result[out], rows, columns, key if key.size == 1 else key[out])
        out = out[result[out] >= n]
    return result


def _feistel(places: Words, rows: int, columns: int, key: Words) -> Words:
    row, column = np.divmod(places, np.uint64(columns))
    for number in range(ROUNDS):
        row = _turn(row, column, rows, key + np.uint64((2 * number * _GOLDEN) & _MASK))
        column = _turn(column, row, columns, key + np.uint64(((2 * number + 1) * _GOLDEN) & _MASK))
    return row * np.uint64(columns) + column


def _turn(half: Words, other: Words, size: int, key: Words) -> Words:
    """`half` plus a hash of the other half, modulo `size`."""
    z = other + key
    z ^= z >> np.uint64(30)
    z *= np.uint64(0xBF58476D1CE4E5B9)
    z ^= z >> np.uint64(27)
    z *= np.uint64(0x94D049BB133111EB)
    z >>= np.uint64(32)
    z *= np.uint64(size)  # the high half of a product spreads 32 bits over range(size) without a division
    z >>= np.uint64(32)
    z += half
    np.minimum(z, z - np.uint64(size), out=z)  # modulo size: a z below size wraps to a larger number
    return z
