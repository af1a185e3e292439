"""Top-k sparsification with error feedback."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from paceline.compressor import Compressor, Payload
from paceline.compressors._bits import packed, unpacked
from paceline.compressors._buckets import BLOCK, buckets, joined
from paceline.errors import UsageError
from paceline.fields import Bound, Fraction, Natural
from paceline.state import State, Vector

SAMPLED = 1 << 14  # numbers of a sample
Share = Annotated[float, Bound(0, 1, above=True)]


def kept(fraction: float, length: int) -> int:
    """The number of coordinates that a share of a vector is; at least one."""
    return min(max(round(fraction * length), 1), length)


def largest(v: Vector, k: int) -> Tensor:
    """The places of the k largest magnitudes in each row, in ascending order."""
    if v.shape[-1] == v.numel() >= SAMPLED * 16 and k <= v.numel() // 16:
        found = _by_threshold(v.view(-1), k)
        if found is not None:
            return found.view(*v.shape[:-1], k)
    return v.abs().topk(k, sorted=False).indices.sort().values


def _by_threshold(v: Vector, k: int) -> Tensor | None:
    """The same places in a long vector, faster: a sample tells a magnitude that somewhat more than k are above; the
    largest are chosen among those. None if there are fewer, or if equal magnitudes leave a choice."""
    sample = v[:: v.numel() // SAMPLED].abs()
    wanted = sample.numel() * k / v.numel()
    rank = int(wanted + 4 * wanted**0.5) + 8
    threshold = sample.topk(min(rank, sample.numel())).values[-1]
    candidates = torch.cat(
        [(part.abs() < threshold).logical_not_().nonzero().view(-1).add_(low) for low, part in _blocks(v)]
    )
    if not k <= candidates.numel() <= v.numel() // 4:
        return None
    sizes = v[candidates].abs()
    least = sizes.topk(k, sorted=False).values.min()
    chosen = (sizes < least).logical_not_()
    places = candidates[chosen]
    return places if places.numel() == k else None


def _blocks(v: Vector) -> Iterator[tuple[int, Vector]]:
    for low in range(0, v.numel(), BLOCK):
        yield low, v[low : low + BLOCK]


@dataclass(frozen=True)
class TopK(Compressor):
    """The coordinates of largest magnitude, with error feedback.

    Stich, Cordonnier, Jaggi, Sparsified SGD with Memory, 2018 (arXiv 1809.07599); the options of SparseLoCo: Sarfi et
    al. 2025 (arXiv 2508.15706).

    p <- v + decay * e;  k = fraction * length;  send the k coordinates of p with the largest |p|;  e <- p - sent

    Sent: k values and k indices of 4 bytes. `chunk`: the largest of every `chunk` coordinates instead of the largest of
    all, with indices of 2 bytes. `bits=2`: of the chosen values the sign, and whether the magnitude is above the mean
    of its chunk; each side stands for the mean of its magnitudes. fraction=1 sends everything. Differs from SparseLoCo,
    whose authors' code has four bins of 1.5 standard deviations for 2 bits, each of which stands for the mean in it.
    """

    fraction: Share = 0.01
    chunk: Natural = 0
    bits: Annotated[int, Bound(2, 32)] = 32
    decay: Fraction = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bits not in (2, 32):
            raise UsageError(f"compressor topk: bits must be 2 or 32, not {self.bits}")

    @property
    def retained(self) -> float:
        return self.decay

    def encode(self, s: State, v: Vector, seed: int) -> Payload:
        rows = buckets(v, self.chunk)
        places = largest(rows, kept(self.fraction, rows.shape[1]))
        values = rows.gather(1, places)
        short = rows.shape[1] <= 1 << 15
        indices = places.to(torch.int16 if short else torch.int32)
        if self.bits == 32:
            return values, indices
        sizes = values.abs()
        upper = sizes > sizes.mean(1, keepdim=True)
        count = upper.sum(1, keepdim=True)
        high = (sizes * upper).sum(1, keepdim=True) / count.clamp(min=1)
        low = (sizes * ~upper).sum(1, keepdim=True) / (sizes.shape[1] - count).clamp(min=1)
        codes = (values < 0).to(torch.uint8) | (upper.to(torch.uint8) << 1)
        return packed(codes.view(-1), 2), torch.cat((low, high), 1), indices

    def decode(self, payload: Payload, like: Vector) -> Vector:
        *first, indices = payload
        if self.bits == 32:
            values = first[0]
        else:
            data, levels = first
            codes = unpacked(data, 2, indices.numel()).view(indices.shape)
            values = levels.gather(1, (codes >> 1).long())
            values = torch.where((codes & 1).bool(), -values, values)
        length = min(self.chunk or like.numel(), like.numel())
        rows = like.new_zeros((indices.shape[0], length))
        return joined(rows.scatter_(1, indices.long(), values.to(like.dtype)), like)

    def warnings(self) -> Iterator[str]:
        if self.fraction < 0.001:
            yield (
                f"{self}: error feedback with a share below 0.001 needs a rate of about that share at first; warm it "
                "up (dgc has a warm-up of the share)"
            )
