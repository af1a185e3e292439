"""Means by NCCL, between GPUs."""

from __future__ import annotations

from paceline.collectives.gloo import GlooCollective


class NcclCollective(GlooCollective):
    """As Gloo, on GPUs: vectors stay there."""

    name = "nccl"
    device = "cuda"
