"""Floating point numbers of 4 bits."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from paceline.compressor import Payload
from paceline.compressors._bits import packed
from paceline.compressors._buckets import blocks, buckets, joined
from paceline.compressors._rounding import Rounding
from paceline.fields import Natural
from paceline.state import State, Vector

# the magnitudes of the eight codes without the sign
VALUES = {
    "e2m1": (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0),
    "e3m0": (0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0),
}


@dataclass(frozen=True)
class FP4(Rounding):
    """Every coordinate as a float of 4 bits, times the scale of its bucket.

    Rouhani et al., Microscaling Data Formats, 2023 (arXiv 2310.10537): e2m1; `format=e3m0` is that of streaming DiLoCo:
    Douillard et al. 2025 (arXiv 2501.18512).

    in each bucket: c <- max |v| / the largest code;  send c and the code nearest to v / c

    Sent: half a byte for each coordinate and a value for each bucket. Differs from the papers: scales have the type of
    the vector.
    """

    bucket: Natural = 32
    format: Literal["e2m1", "e3m0"] = "e2m1"

    def encode(self, s: State, v: Vector, seed: int) -> Payload:
        known = self._values(v)
        limits = ((known[1:] + known[:-1]) / 2).tolist()
        rows = buckets(v, self.bucket)
        scales = rows.new_empty((rows.shape[0], 1))
        codes = torch.empty(rows.shape, dtype=torch.uint8, device=rows.device)
        for part in blocks(rows):
            shares = rows[part].abs()
            torch.div(shares.amax(1, keepdim=True), known[-1], out=scales[part])
            shares /= scales[part].clamp(min=torch.finfo(v.dtype).tiny)
            found = codes[part].fill_(len(limits))
            for limit in limits:
                found -= (shares <= limit).view(torch.uint8)
            found |= (rows[part] < 0).view(torch.uint8) << 3
        return packed(codes.view(-1), 4), scales.view(-1)

    def decode(self, payload: Payload, like: Vector) -> Vector:
        data, scales = payload
        known = self._values(like)
        length = min(self.bucket or like.numel(), like.numel())
        signed = torch.cat((known, -known))
        of_byte = torch.arange(256, device=like.device)
        pairs = torch.stack((signed[of_byte & 15], signed[of_byte >> 4]), 1)  # the two values of each byte
        values = pairs.index_select(0, data.int()).view(-1)[: scales.numel() * length].view(-1, length)
        return joined(values.mul_(scales.to(like.dtype).view(-1, 1)), like)

    def _values(self, like: Vector) -> Tensor:
        return torch.tensor(VALUES[self.format], dtype=like.dtype, device=like.device)
