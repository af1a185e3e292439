"""Signs with a scale and error feedback."""

from dataclasses import dataclass

from paceline.compressor import Compressor, Payload
from paceline.compressors._bits import packed_bits, unpacked_bits
from paceline.state import State, Vector


@dataclass(frozen=True)
class EFSign(Compressor):
    """The sign of every coordinate times the mean magnitude, with error feedback.

    Karimireddy, Rebjock, Stich, Jaggi 2019 (arXiv 1901.09847).

    p <- v + e;  send (|p|_1 / length) * sign(p);  e <- p - sent

    Sent: one bit for each coordinate, and the scale. One coordinate is exact. Differs from the paper: e is in units of
    v, not of lr * v, so a rate that falls also lowers what is kept.
    """

    @property
    def retained(self) -> float:
        return 1.0

    def encode(self, s: State, v: Vector, seed: int) -> Payload:
        return packed_bits(v >= 0), v.abs().mean()

    def decode(self, payload: Payload, like: Vector) -> Vector:
        data, scale = payload
        return unpacked_bits(data, like.numel()).to(like.dtype).mul_(2).sub_(1).mul_(scale)
