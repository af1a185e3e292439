"""Deep gradient compression."""

import math
from dataclasses import dataclass

import torch

from paceline.compressor import Compressor, Payload
from paceline.compressors.topk import Share, kept, largest
from paceline.fields import Fraction, Natural, Rate
from paceline.state import Cell, State, Vector

WARM_UP = (0.25, 0.0625, 0.015625, 0.004)  # shares that are sent before the last one


@dataclass(frozen=True)
class DGC(Compressor):
    """Deep gradient compression: top-k of gradients with their momentum.

    Lin, Han, Mao, Wang, Dally 2018 (arXiv 1712.01887).

    g <- g * min(1, clip / (sqrt(workers) * |g|))
    u <- momentum * u + g;  e <- e + u;  send the largest fraction of |e|;  zero the sent coordinates in e, and in u

    The momentum is on the worker: the rule should be sgd. `masking=false` leaves u as it is: with fraction=1 that is
    momentum SGD, while with masking it is plain SGD. `clip=0` does not clip. `warm_up`: the updates for each of the
    shares 25, 6.25, 1.5625 and 0.4 %, which come first. Sent: k values and k indices of 4 bytes. Differs from the
    paper: its warm-up is one epoch for each share and is given in updates here; the largest are those of the whole
    vector, not of each layer.
    """

    fraction: Share = 0.001
    momentum: Fraction = 0.9
    clip: Rate = 0.0
    masking: bool = True
    warm_up: Natural = 0

    @property
    def retained(self) -> float:
        return 1.0

    def cells(self, x0: Vector) -> dict[str, Cell]:
        return super().cells(x0) | {"momentum": torch.zeros_like(x0)}

    def pack(self, s: State, v: Vector, seed: int) -> tuple[Payload, Vector]:
        if self.clip:
            most = self.clip / math.sqrt(s.workers)
            v = v * (most / v.norm().clamp(min=most))
        u = s.cell("momentum").mul_(self.momentum).add_(v)
        payload, sent = super().pack(s, u, seed)
        if self.masking:
            u[payload[1].long()] = 0
        return payload, sent

    def encode(self, s: State, v: Vector, seed: int) -> Payload:
        places = largest(v, kept(self.share(s.v), v.numel()))
        return v[places], places.to(torch.int32)

    def decode(self, payload: Payload, like: Vector) -> Vector:
        values, places = payload
        return torch.zeros_like(like).scatter_(0, places.long(), values.to(like.dtype))

    def share(self, version: int) -> float:
        """The share that is sent at a version of x."""
        stage = version // self.warm_up if self.warm_up else len(WARM_UP)
        return max(WARM_UP[stage], self.fraction) if stage < len(WARM_UP) else self.fraction
