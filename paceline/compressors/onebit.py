"""1-bit SGD."""

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.compressor import Compressor, Payload
from paceline.compressors._bits import packed_bits, unpacked_bits
from paceline.state import State, Vector


@dataclass(frozen=True)
class OneBit(Compressor):
    """One bit for each coordinate and two values for each row of a weight matrix, with error feedback.

    Seide, Fu, Droppo, Li, Yu, 1-Bit Stochastic Gradient Descent, Interspeech 2014.

    p <- v + e;  in each row: send p >= 0, the mean of those p, and the mean of the others;  e <- p - sent

    Sent: one bit for each coordinate and two values for each row. A row is what one output neuron has (the paper's
    column: its matrices are transposed); biases and other vectors are one row each. Differs from the paper: no AdaGrad
    and no double quantisation around it.
    """

    @property
    def retained(self) -> float:
        return 1.0

    def encode(self, s: State, v: Vector, seed: int) -> Payload:
        bits = v >= 0
        levels = []
        for values, above in zip(self._rows(v), self._rows(bits), strict=True):
            count = above.sum(1)
            high = (values * above).sum(1) / count.clamp(min=1)
            low = (values * ~above).sum(1) / (values.shape[1] - count).clamp(min=1)
            levels.append(torch.stack((low, high), 1))
        return packed_bits(bits), torch.cat(levels)

    def decode(self, payload: Payload, like: Vector) -> Vector:
        data, levels = payload
        bits, parts, at = unpacked_bits(data, like.numel()), [], 0
        for above in self._rows(bits):
            low, high = torch.split(levels[at : at + len(above)].to(like.dtype), 1, dim=1)
            parts.append(torch.where(above, high, low).view(-1))
            at += len(above)
        return torch.cat(parts)

    def _rows(self, v: Tensor) -> list[Tensor]:
        return [p.reshape(p.shape[0] if p.dim() > 1 else 1, -1) for p in self.parameters(v) if p.numel()]
