"""Means by NCCL, between GPUs."""

from __future__ import annotations

from paceline.collectives.gloo import Gloo


class Nccl(Gloo):
    """As Gloo, on GPUs: vectors stay there."""

    name = "nccl"
    device = "cuda"
