"""Floating point numbers of 8 bits."""

from dataclasses import dataclass

import torch

from paceline.compressor import Payload
from paceline.compressors._buckets import blocks, buckets, joined
from paceline.compressors._rounding import Rounding
from paceline.fields import Natural
from paceline.state import State, Vector

MOST = torch.finfo(torch.float8_e4m3fn).max


@dataclass(frozen=True)
class FP8(Rounding):
    """Every coordinate as a float of 8 bits (e4m3), times the scale of its bucket.

    Micikevicius et al., FP8 Formats for Deep Learning, 2022 (arXiv 2209.05433).

    in each bucket: c <- max |v| / 448;  send c and fp8(v / c)

    Sent: one byte for each coordinate and a value for each bucket; `bucket=0`: the whole vector is one.
    """

    bucket: Natural = 1024

    def encode(self, s: State, v: Vector, seed: int) -> Payload:
        rows = buckets(v, self.bucket)
        scales = rows.new_empty((rows.shape[0], 1))
        codes = torch.empty(rows.shape, dtype=torch.float8_e4m3fn, device=rows.device)
        for part in blocks(rows):
            torch.div(rows[part].abs().amax(1, keepdim=True), MOST, out=scales[part])
            codes[part] = (rows[part] / scales[part].clamp(min=torch.finfo(v.dtype).tiny)).clamp_(-MOST, MOST)
        return codes.view(torch.uint8), scales

    def decode(self, payload: Payload, like: Vector) -> Vector:
        codes, scales = payload
        return joined(codes.view(torch.float8_e4m3fn).to(like.dtype) * scales.to(like.dtype), like)
