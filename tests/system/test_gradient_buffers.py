"""Gradients are computed in the two buffers that a worker has in shared memory: none is made or copied elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest
import torch
from in_step import InStep
from torch import Tensor

import paceline
from paceline import Batch, Task
from paceline.state import Vector

WARM = 5  # gradients until every view has been made


class NotesPlaces(Task):
    """Walks towards zero. It tells at how many addresses the chief's gradients were computed, and how many of them are
    not in shared memory."""

    name, batch = "notes-places", 1

    def __init__(self) -> None:
        self.places: list[int] = []

    def start(self, seed: int) -> Vector:
        return torch.ones(100_000)

    def batches(self, rank: int, workers: int, seed: int, first: int = 0) -> Iterator[Batch]:
        return repeat(Batch((), 1))

    def grad(
        self, x: Vector, batch: Batch, out: Vector | None = None, buffers: Mapping[str, Tensor] | None = None
    ) -> tuple[float, Vector]:
        assert out is not None
        self.places.append(out.data_ptr())
        return float(x[0]), out.copy_(x)

    def evaluate(self, x: Vector, buffers: Mapping[str, Tensor] | None = None) -> dict[str, float]:
        places, shared = set(self.places[WARM:]), shared_ranges()
        elsewhere = [place for place in places if not any(place in one for one in shared)]
        return {"loss": float(x[0]), "places": float(len(places)), "elsewhere": float(len(elsewhere))}


def shared_ranges() -> list[range]:
    """The addresses of this process that are anonymous shared memory."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:" in line]
    ends = [line[0].split("-") for line in lines]
    return [range(int(first, 16), int(last, 16)) for first, last in ends]


@pytest.mark.parametrize(
    ("scheme", "workers"),
    [("sgd", 1), ("allreduce", 1), ("allreduce", 2), ("allreduce", 3), ("averaging", 3), ("sync", 3), ("async", 3)],
)
def test_gradients_use_the_same_two_buffers(scheme: str, workers: int, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"workers": workers, "steps": 40, "lr": 0.01, "hooks": [InStep(str(tmp_path), workers)]}
    result = paceline.train(NotesPlaces(), scheme, directory=tmp_path / "run", say=lambda _: None, **settings)
    assert 1 <= result.metrics["places"] <= 2
    assert result.metrics["elsewhere"] == 0
