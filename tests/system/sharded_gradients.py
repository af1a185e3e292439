"""Gradients of a model in three shards beside those of slices computed one after the other; prints what was equal."""

from __future__ import annotations

import os

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from paceline.inside.sliced_task import SlicedTask, sliced
from paceline.processes.inside.inner_group import InnerGroup, LedTask
from paceline.torch_task import TorchTask


class Speller(nn.Module):
    """Tied weights, a frozen layer, dropout, BatchNorm, sizes that three does not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.letters = nn.Embedding(11, 8)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2)) for _ in range(2)])
        self.frozen = nn.Linear(8, 8)
        self.frozen.requires_grad_(False)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.letters.weight
        self.unused = nn.Parameter(torch.zeros(2))

    def forward(self, letters: Tensor) -> Tensor:
        y = self.letters(letters).mean(1)
        for layer in self.layers:
            y = y + torch.tanh(layer(y))
        return self.head(self.norm(self.frozen(y)))


def made() -> TorchTask:
    letters = torch.randint(11, (40, 5), generator=torch.Generator().manual_seed(0))
    return TorchTask(Speller, cross_entropy, (letters, letters[:, 0]), batch=10)


def main() -> None:
    torch.set_num_threads(1)
    alone = sliced(made(), "fsdp:3")
    assert isinstance(alone, SlicedTask)
    group = InnerGroup(alone.inside, "worker:0", lambda: alone, print, lambda: None)
    together = LedTask(alone, group)
    x, batches = alone.start(0), alone.batches(0, 1, 0)
    ours, theirs = alone.buffers(), alone.buffers()
    for _ in range(3):
        batch = next(batches)
        loss, g = alone.grad(x, batch, torch.empty_like(x), ours)
        found, other = together.grad(x, batch, torch.empty_like(x), theirs)
        same = torch.equal(g.view(torch.int32), other.view(torch.int32)) and loss == found
        same = same and all(torch.equal(ours[name], theirs[name]) for name in ours)
        print("same" if same else f"loss {loss - found}, gradient {(g - other).abs().max()}", flush=True)
        x = x - 0.1 * g
    pids = group.pids
    group.close()
    for pid in pids:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            continue
        print(pid, "is left")
        return
    print("ended", flush=True)


if __name__ == "__main__":
    main()
