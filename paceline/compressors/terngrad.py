"""TernGrad: three values."""

from dataclasses import dataclass

import torch

from paceline.compressor import Compressor, Payload
from paceline.compressors._bits import packed
from paceline.compressors._buckets import BLOCK
from paceline.fields import Rate
from paceline.state import State, Vector


@dataclass(frozen=True)
class TernGrad(Compressor):
    """Every coordinate as -1, 0 or 1, at random, times the largest magnitude of its parameter.

    Wen et al. 2017 (arXiv 1705.07878).

    in each parameter: m <- max |v|;  send m and c_j = sign(v_j) * b_j, b_j = 1 with probability |v_j| / m;
                       decoded: m * c_j

    Unbiased. Sent: 2 bits for each coordinate and one value for each parameter. `clip`: magnitudes are first limited to
    this number of standard deviations (the paper: 2.5), which is biased; 0 does not clip. Differs from the paper: no
    scaler is shared among workers.
    """

    clip: Rate = 0.0
    unbiased = True

    def encode(self, s: State, v: Vector, seed: int) -> Payload:
        parts = [part.reshape(-1) for part in self.parameters(v) if part.numel()]
        if self.clip:
            limits = [self.clip * part.std(correction=0) for part in parts]
            parts = [part.clamp(-limit, limit) for part, limit in zip(parts, limits, strict=True)]
        tops = torch.stack([part.abs().max() for part in parts])
        codes = torch.empty(v.shape, dtype=torch.uint8, device=v.device)
        rng, at = torch.Generator(v.device).manual_seed(seed), 0
        for part, top in zip(parts, tops.clamp(min=torch.finfo(v.dtype).tiny), strict=True):
            for block in torch.split(part, BLOCK):
                ones = torch.rand(block.shape, generator=rng, dtype=v.dtype, device=v.device) < block.abs() / top
                found = codes[at : at + block.numel()]  # 0, 1, and 2 for -1
                torch.add(ones.view(torch.uint8), (ones & (block < 0)).view(torch.uint8), out=found)
                at += block.numel()
        return packed(codes, 2), tops

    def decode(self, payload: Payload, like: Vector) -> Vector:
        data, tops = payload
        of_byte = torch.arange(256, device=like.device).view(-1, 1) >> torch.tensor([0, 2, 4, 6], device=like.device)
        known = torch.tensor([0, 1, -1, 0], dtype=like.dtype, device=like.device)
        fours = known[of_byte & 3]  # the values of each byte
        values = fours.index_select(0, data.int()).view(-1)[: like.numel()]
        parts = [part.view(-1) for part in self.parameters(values) if part.numel()]
        for part, top in zip(parts, tops.to(like.dtype), strict=True):
            part *= top
        return values
