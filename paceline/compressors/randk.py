"""Random-k sparsification without indices."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paceline.compressor import Compressor, Payload, Pieces
from paceline.compressors.topk import Share, kept
from paceline.errors import SchemeError
from paceline.sampling import permute
from paceline.state import State, Vector

CHECKED = 1 << 10  # seeds are compared modulo this: sums of such numbers are exact


@dataclass(frozen=True)
class RandK(Compressor):
    """Random coordinates, times length / k.

    Stich, Cordonnier, Jaggi, Sparsified SGD with Memory, 2018 (arXiv 1809.07599); Konecny et al. 2016 (arXiv
    1610.05492).

    k = fraction * length;  J <- k coordinates, by a keyed permutation of the seed;  send v[J] * length / k

    Sent: k values and the seed, from which the receiver knows J. Unbiased. `feedback=true`: without the factor, and
    with error feedback. Where there is no server all workers choose the same J, and a mean is an all-reduce of k
    values. fraction=1 sends everything.
    """

    fraction: Share = 0.01
    feedback: bool = False
    unbiased = True

    @property
    def retained(self) -> float | None:
        return 1.0 if self.feedback else None

    def encode(self, s: State, v: Vector, seed: int) -> Payload:
        return self._values(v, self._places(seed, v)), seed

    def decode(self, payload: Payload, like: Vector) -> Vector:
        values, seed = payload
        out = torch.zeros_like(like)
        out[self._places(seed, like)] = values.to(like.dtype)
        return out

    def pieces(self, s: State, v: Vector, seed: int) -> Pieces:
        if self.feedback:
            v = s.cell("error").add_(v)
        places = self._places(seed, v)
        values = self._values(v, places)
        if self.feedback:
            v[places] = 0
        mark = values.new_tensor([seed % CHECKED])
        mean = yield torch.cat((values, mark))
        if mean[-1] != mark[0]:
            raise SchemeError("workers have averaged different coordinates: their versions of x differ")
        out = torch.zeros_like(v)
        out[places] = mean[:-1]
        return out

    def _values(self, v: Vector, places: Tensor) -> Vector:
        values = v[places]
        return values if self.feedback else values * (v.numel() / places.numel())

    def _places(self, seed: int, v: Vector) -> Tensor:
        first = np.arange(kept(self.fraction, v.numel()), dtype=np.uint64)
        if first.size == v.numel():
            return torch.arange(v.numel(), device=v.device)
        places = permute(first, v.numel(), np.array([seed], np.uint64))
        return torch.from_numpy(places.astype(np.int64)).to(v.device)
