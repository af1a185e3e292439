"""QSGD: random rounding to levels."""

from dataclasses import dataclass
from typing import Annotated

import torch

from paceline.compressor import Compressor, Payload
from paceline.compressors._bits import bits_for, packed, unpacked
from paceline.compressors._buckets import blocks, buckets, joined
from paceline.fields import Bound, Natural
from paceline.state import State, Vector

Levels = Annotated[int, Bound(1, 127)]


@dataclass(frozen=True)
class QSGD(Compressor):
    """Every coordinate rounded at random to one of `levels` parts of the norm of its bucket.

    Alistarh, Grubic, Li, Tomioka, Vojnovic 2017 (arXiv 1610.02132).

    in each bucket: send |v|_2 and sign(v_j) * l_j;  decoded: |v|_2 * sign(v_j) * l_j / levels, where
    l_j = floor(levels * |v_j| / |v|_2 + u_j), u_j uniform in [0, 1)

    Unbiased. Sent: log2(2 * levels + 1) bits for each coordinate, rounded up to 2, 4 or 8, and a value for each bucket.
    `bucket=0`: the whole vector is one, whose variance grows with the root of its length. Differs from the paper: codes
    have a fixed length, without Elias coding.
    """

    levels: Levels = 4
    bucket: Natural = 512
    unbiased = True

    @property
    def points(self) -> bool:
        """By the error of a normal vector: each step has a share 1 / levels of the norm, and rounding 1 / 6 of its
        square on average."""
        return self.bucket > 0 and self.bucket / 6 <= (self.levels / 5) ** 2

    def encode(self, s: State, v: Vector, seed: int) -> Payload:
        rows = buckets(v, self.bucket)
        norms = rows.norm(dim=1, keepdim=True)
        factors = self.levels / norms.clamp(min=torch.finfo(v.dtype).tiny)
        codes = torch.empty(rows.shape, dtype=torch.uint8, device=rows.device)
        rng = torch.Generator(rows.device).manual_seed(seed)
        for part in blocks(rows):
            steps = rows[part].abs().mul_(factors[part])
            steps += torch.rand(steps.shape, generator=rng, dtype=rows.dtype, device=rows.device)
            steps.floor_().clamp_(max=self.levels)
            codes[part] = steps.copysign_(rows[part]).add_(self.levels)
        return packed(codes.view(-1), bits_for(2 * self.levels + 1)), norms.view(-1)

    def decode(self, payload: Payload, like: Vector) -> Vector:
        data, norms = payload
        length = min(self.bucket or like.numel(), like.numel())
        codes = unpacked(data, bits_for(2 * self.levels + 1), norms.numel() * length).view(-1, length)
        rows = codes.to(like.dtype).sub_(self.levels).mul_((norms.to(like.dtype) / self.levels).view(-1, 1))
        return joined(rows, like)
