"""A worker's cells as bytes, which a worker that is restarted takes over from another one."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.processes.memory.run_memory import RunMemory


def own_cells(memory: RunMemory, rank: int) -> list[Tensor]:
    """A worker's cells and buffers in shared memory, and its step."""
    state, buffers = memory.worker_state(rank), memory.buffers(rank)
    own = memory.own_cells()
    cells = [state.cell(name) for name in sorted(set(state) - own)] + [buffers[name] for name in sorted(buffers)]
    return [*cells, torch.tensor([memory.board.t[rank]])]


def size_of(cells: list[Tensor]) -> int:
    return sum(cell.numel() * cell.element_size() for cell in cells)


def flat(cells: list[Tensor]) -> Tensor:
    """A copy of them, as bytes."""
    return torch.cat([cell.reshape(-1).view(torch.uint8) for cell in cells])


def take_cells(memory: RunMemory, rank: int, given: Tensor) -> None:
    """Continue with the cells of another worker, at its step."""
    board, cells = memory.board, own_cells(memory, rank)
    if board.busy[rank] % 2:  # it died while it may have been writing one
        for name in memory.own_cells():
            memory.worker_state(rank).cell(name).zero_()
    at = 0
    for cell in cells:
        size = cell.numel() * cell.element_size()
        cell.copy_(given[at : at + size].clone().view(cell.dtype).view(cell.shape))
        at += size
    board.t[rank] = int(cells[-1])
