"""Floating point numbers of 16 bits."""

from dataclasses import dataclass

import torch

from paceline.compressor import Payload
from paceline.compressors._rounding import Rounding
from paceline.state import State, Vector


@dataclass(frozen=True)
class BF16(Rounding):
    """Every coordinate as a bfloat16.

    Kalamkar et al., A Study of BFLOAT16 for Deep Learning Training, 2019 (arXiv 1905.12322).

    send bf16(v)

    Sent: two bytes for each coordinate. Sums are made in the type of the vector.
    """

    def encode(self, s: State, v: Vector, seed: int) -> Payload:
        return (v.to(torch.bfloat16),)

    def decode(self, payload: Payload, like: Vector) -> Vector:
        (values,) = payload
        return torch.as_tensor(values, dtype=like.dtype)
