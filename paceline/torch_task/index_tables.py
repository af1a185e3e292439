"""The samples of many workers' mini-batches at once, on the device that computes: the integers of `sampling.Stream`."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.sampling import ROUNDS, Stream, permute

AHEAD = 16  # batches of a worker whose indices are computed together
TABLE_BYTES = 1 << 26  # of the indices that are kept
PIECE = 8192

_GOLDEN = 0x9E3779B97F4A7C15


class IndexTable:
    """The indices of the next batches of workers whose streams have the same sizes."""

    def __init__(self, streams: Sequence[Stream], device: torch.device) -> None:
        self._streams, self._device = streams, device
        size = streams[0].size
        self._ahead = max(1, min(AHEAD, TABLE_BYTES // (8 * size * len(streams))))
        self._first = np.full(len(streams), -self._ahead - 1, np.int64)
        self._table = torch.empty((len(streams), self._ahead, size), dtype=torch.int64, device=device)
        self._keys: dict[tuple[int, int], int] = {}

    def indices(self, places: NDArray[np.int64], numbers: NDArray[np.int64]) -> Tensor:
        """Of the batches with these numbers of the streams at these places: a row each."""
        behind = numbers - self._first[places]
        missing = (behind < 0) | (behind >= self._ahead)
        if missing.any():
            self._fill(places[missing], numbers[missing])
            behind = numbers - self._first[places]
        found = torch.from_numpy(np.stack((places, behind))).to(self._device)
        return self._table[found[0], found[1]]

    def _fill(self, places: NDArray[np.int64], numbers: NDArray[np.int64]) -> None:
        some = self._streams[0]
        # where the row of each batch begins: its epoch, and its place there
        counts = (numbers[:, None] + np.arange(self._ahead)).reshape(-1)
        owners = np.repeat(places, self._ahead)
        firsts = np.array([self._streams[place].first for place in places], np.int64).repeat(self._ahead)
        epochs, begins = np.divmod(counts * some.batch + firsts, some.n)
        later = int((begins.max() + some.size - 1) // some.n) + 1  # epochs that the longest row reaches into
        keys = np.array(
            [[self._key(o, e + k) for k in range(later)] for o, e in zip(owners.tolist(), epochs.tolist(), strict=True)]
        )
        offsets = np.array([self._streams[place].offset for place in places], np.int64).repeat(self._ahead)
        begins_t, keys_t, offsets_t = (torch.from_numpy(one).to(self._device) for one in (begins, keys, offsets))
        place = begins_t[:, None] + torch.arange(some.size, device=self._device)
        epoch = place.div(some.n, rounding_mode="floor")
        place = place - epoch * some.n
        if some.shuffle:
            shuffled = permuted if self._device.type != "cpu" else _permuted_in_pieces
            place = shuffled(place, some.drawn_from, keys_t.gather(1, epoch))
        rows = place * some.stride + offsets_t[:, None]
        self._table[torch.from_numpy(places).to(self._device)] = rows.view(len(places), self._ahead, some.size)
        self._first[places] = numbers

    def _key(self, place: int, epoch: int) -> int:
        """The key of a stream's epoch, as a signed number."""
        key = self._keys.get((place, epoch))
        if key is None:
            if len(self._keys) > 8 * len(self._streams):
                self._keys.clear()
            key = self._keys[place, epoch] = _signed(int(self._streams[place].epoch_key(epoch)))
        return key


def permuted(places: Tensor, n: int, keys: Tensor) -> Tensor:
    """`sampling.permute` in torch's signed integers: the same numbers, on any device."""
    rows = math.isqrt(n - 1) + 1
    columns = -(-n // rows)
    result = _feistel(places, rows, columns, keys)
    if rows * columns > n:
        out = (result >= n).nonzero(as_tuple=True)
        while out[0].numel():
            again = _feistel(result[out], rows, columns, keys[out])
            result[out] = again
            still = again >= n
            out = tuple(one[still] for one in out)
    return result


def _permuted_in_pieces(places: Tensor, n: int, keys: Tensor) -> Tensor:
    """On the CPU numpy is several times faster, in pieces that the caches hold."""
    flat, key = (one.reshape(-1).numpy().astype(np.uint64) for one in (places, keys))
    pieces = [permute(flat[at : at + PIECE], n, key[at : at + PIECE]) for at in range(0, flat.size, PIECE)]
    return torch.from_numpy(np.concatenate(pieces).astype(np.int64)).view(places.shape)


def _feistel(places: Tensor, rows: int, columns: int, keys: Tensor) -> Tensor:
    row = places.div(columns, rounding_mode="floor")
    column = places - row * columns
    for number in range(ROUNDS):
        row = _turn(row, column, rows, keys + _signed(2 * number * _GOLDEN))
        column = _turn(column, row, columns, keys + _signed((2 * number + 1) * _GOLDEN))
    return row * columns + column


def _turn(half: Tensor, other: Tensor, size: int, key: Tensor) -> Tensor:
    z = other + key
    z ^= (z >> 30) & ((1 << 34) - 1)  # torch's shift keeps the sign
    z *= _signed(0xBF58476D1CE4E5B9)
    z ^= (z >> 27) & ((1 << 37) - 1)
    z *= _signed(0x94D049BB133111EB)
    z = (z >> 32) & ((1 << 32) - 1)
    z *= size
    z >>= 32
    z += half
    return torch.where(z >= size, z - size, z)


def _signed(word: int) -> int:
    word &= (1 << 64) - 1
    return word - (1 << 64) if word >> 63 else word
