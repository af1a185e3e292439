"""Whole numbers of 8 bits."""

from dataclasses import dataclass

import torch

from paceline.compressor import Payload
from paceline.compressors._buckets import blocks, buckets, joined
from paceline.compressors._rounding import Rounding
from paceline.fields import Natural
from paceline.state import State, Vector


@dataclass(frozen=True)
class Int8(Rounding):
    """Every coordinate as a whole number from -127 to 127, times the scale of its bucket.

    Dettmers, 8-Bit Approximations for Parallelism in Deep Learning, 2016 (arXiv 1511.04561).

    in each bucket: c <- max |v| / 127;  send c and round(v / c)

    Sent: one byte for each coordinate and a value for each bucket; `bucket=0`: the whole vector is one. Differs from
    the paper: linear steps instead of its tree of exponents.
    """

    bucket: Natural = 1024

    def encode(self, s: State, v: Vector, seed: int) -> Payload:
        rows = buckets(v, self.bucket)
        scales = rows.new_empty((rows.shape[0], 1))
        codes = torch.empty(rows.shape, dtype=torch.int8, device=rows.device)
        for part in blocks(rows):
            torch.div(rows[part].abs().amax(1, keepdim=True), 127, out=scales[part])
            codes[part] = (rows[part] / scales[part].clamp(min=torch.finfo(v.dtype).tiny)).round_()
        return codes, scales

    def decode(self, payload: Payload, like: Vector) -> Vector:
        codes, scales = payload
        return joined(codes.to(like.dtype) * scales.to(like.dtype), like)
