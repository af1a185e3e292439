"""Signs of gradients, with majority vote."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from paceline.compressor import Compressor, Payload
from paceline.compressors._bits import packed_bits, unpacked_bits
from paceline.state import State, Vector


@dataclass(frozen=True)
class SignSGD(Compressor):
    """The sign of every coordinate; several workers vote.

    Bernstein, Wang, Azizzadenesheli, Anandkumar 2018 (arXiv 1802.04434).

    send sign(v), with sign(0) = 1;  x <- x - lr * sign(sum over workers)

    Sent: one bit for each coordinate. A mean of workers is their majority, 0 in a tie; where pushes enter x one by one
    there is no vote. Biased, without error feedback: x ends in an oscillation of about lr per coordinate, so lower the
    rate in time.
    """

    def encode(self, s: State, v: Vector, seed: int) -> Payload:
        return (packed_bits(v >= 0),)

    def decode(self, payload: Payload, like: Vector) -> Vector:
        (data,) = payload
        return unpacked_bits(data, like.numel()).to(like.dtype).mul_(2).sub_(1)

    def combined(self, mean: Vector) -> Vector:
        return torch.sign(mean)

    def warnings(self) -> Iterator[str]:
        yield "signsgd: every update moves each coordinate by lr, so x oscillates by that in the end: lower lr in time"
