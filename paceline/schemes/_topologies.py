"""Which workers of a decentralised scheme are neighbours, and how fast their models mix."""

from __future__ import annotations

import math
from typing import Literal

import torch

Topology = Literal["ring", "torus", "exponential", "full", "alone"]


def neighbours(topology: Topology, rank: int, workers: int) -> tuple[int, ...]:
    """The other workers that a worker is connected with. Every worker has the same number of them."""
    match topology:
        case "ring":
            found = {rank - 1, rank + 1}
        case "torus":
            rows = _rows(workers)
            columns = workers // rows
            row, column = divmod(rank, columns)
            sideways = {row * columns + (column + hop) % columns for hop in (-1, 1)}
            found = sideways | {(row + hop) % rows * columns + column for hop in (-1, 1)}
        case "exponential":
            found = {rank + sign * hop for hop in hops(workers) for sign in (-1, 1)}
        case "full":
            found = set(range(workers))
        case "alone":
            found = set()
    return tuple(sorted({other % workers for other in found} - {rank}))


def hops(workers: int) -> list[int]:
    """1, 2, 4, … below the number of workers; 0 for one worker."""
    return [1 << k for k in range(max(workers - 1, 0).bit_length())] or [0]


def _rows(workers: int) -> int:
    """Of a torus: the largest divisor up to the square root; 1 makes it a ring."""
    return next(rows for rows in range(math.isqrt(workers), 0, -1) if workers % rows == 0)


def second_eigenvalue(topology: Topology, workers: int) -> float:
    """The second largest absolute eigenvalue of the mixing matrix with equal weights: the share of the distance between
    workers that is left after one mixing."""
    mixing = torch.zeros(workers, workers, dtype=torch.float64)
    for rank in range(workers):
        members = [rank, *neighbours(topology, rank, workers)]
        mixing[rank, members] = 1 / len(members)
    values = torch.linalg.eigvalsh(mixing).abs().sort().values
    return float(values[-2]) if workers > 1 else 0.0


def any_order(name: str) -> str:
    """Why a scheme whose messages are received at any step cannot be exact."""
    fixed = f"{name} partner=same-step has a fixed order"
    return f"a message is received at any step of its receiver; {fixed}, or record the run and use `paceline replay`"
