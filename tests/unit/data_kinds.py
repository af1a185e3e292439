"""A task of each kind of data. Sample i is (i, i / 10), so that a batch tells which samples it holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, WeightedRandomSampler

from paceline import Tokens, TorchTask
from paceline.task import Batch

N, BATCH = 26, 4


def columns() -> tuple[Tensor, Tensor]:
    return torch.arange(float(N))[:, None], torch.arange(float(N))[:, None] / 10


class ByIndex(Dataset[Any]):
    """Adds noise of torch, numpy and `random`, which must not depend on who reads."""

    def __init__(self, *, named: bool = False) -> None:
        self.named = named

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        noise = 1e-3 * (torch.rand(()).item() + np.random.rand())
        a, b = torch.tensor([float(index)]), torch.tensor([index / 10 + noise])
        return {"a": a, "labels": b} if self.named else (a, b)


class FromStart(IterableDataset[Any]):
    """Samples that can only be read from their start."""

    def __init__(self, read: list[int] | None = None) -> None:
        self.read = read

    def __iter__(self) -> Iterator[Any]:
        for index in range(N):
            if self.read is not None:
                self.read.append(index)
            yield torch.tensor([float(index)]), torch.tensor([index / 10 + 1e-3 * torch.rand(()).item()])

    def __len__(self) -> int:
        return N


class Stateful:
    """A loader of batches that can be set to a state, as torchdata's can."""

    batch_size = BATCH

    def __init__(self, reads: Path | None = None) -> None:
        self._next, self._reads = 0, reads

    def state_dict(self) -> dict[str, Any]:
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._next = state["next"]

    def __iter__(self) -> Iterator[Any]:
        while self._next < N:
            first, self._next = self._next, min(self._next + BATCH, N)
            if self._reads is not None:
                with self._reads.open("a") as file:
                    file.write(f"{first}\n")
            yield tuple(one[first : self._next] for one in columns())
        self._next = 0


class OwnLoss(nn.Module):
    """Called with keywords; gives its own loss, as models of Hugging Face do."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(1, 1)

    def forward(self, a: Tensor, labels: Tensor) -> dict[str, Tensor]:
        output = self.line(a / N)
        return {"loss": nn.functional.mse_loss(output, labels), "logits": output}


def padded(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    a, b = zip(*samples, strict=True)
    return torch.stack(a), torch.stack(b)


def line() -> nn.Module:
    return nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1))


def made(train: Any, **more: Any) -> TorchTask:
    return TorchTask(line, nn.functional.mse_loss, train, columns(), **more)


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(64, 1)

    def forward(self, a: Tensor) -> Tensor:
        result: Tensor = self.rows(a)[..., 0]
        return result


def squares(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target / 64)


def mapped(folder: Path) -> TorchTask:
    files = []
    for name, column in zip("ab", columns(), strict=True):
        np.save(folder / f"{name}.npy", column.numpy())
        files.append(np.load(folder / f"{name}.npy", mmap_mode="r"))
    return made(tuple(files), batch=BATCH)


def tokens(folder: Path) -> TorchTask:
    np.arange(N + 1, dtype=np.uint16).tofile(folder / "train.bin")
    return TorchTask(Embedded, squares, Tokens(folder / "train.bin", 1), batch=BATCH)


KINDS: dict[str, Callable[[Path], TorchTask]] = {
    "tensors": lambda _: made(columns(), batch=BATCH),
    "numpy": lambda _: made(tuple(one.numpy() for one in columns()), batch=BATCH),
    "mapped files": mapped,
    "tokens": tokens,
    "data set": lambda _: made(ByIndex(), batch=BATCH, collate=padded),
    "dictionary": lambda _: TorchTask(OwnLoss, None, dict(zip(("a", "labels"), columns(), strict=True)), batch=BATCH),
    "named samples": lambda _: TorchTask(OwnLoss, None, ByIndex(named=True), batch=BATCH),
    "loader": lambda _: made(DataLoader(ByIndex(), BATCH, shuffle=True, collate_fn=padded)),
    "loader in order": lambda _: made(DataLoader(ByIndex(), BATCH)),
    "loader with processes": lambda _: made(DataLoader(ByIndex(), BATCH, shuffle=True, num_workers=1)),
    "iterable": lambda _: made(FromStart(), batch=BATCH),
    "loader of an iterable": lambda _: made(DataLoader(FromStart(), BATCH)),
    "stateful": lambda _: made(Stateful()),
    "function": lambda _: made(lambda: iter(DataLoader(ByIndex(), BATCH))),
}
STREAMS = ("iterable", "loader of an iterable", "stateful", "function")


def sampled() -> TorchTask:
    weights = [1.0] * (N // 2) + [9.0] * (N - N // 2)
    return made(DataLoader(ByIndex(), BATCH, sampler=WeightedRandomSampler(weights, N)))


def ids(batch: Batch) -> list[int]:
    """The samples of a batch."""
    first = batch.data[0]
    column = first["a"] if isinstance(first, dict) else first
    return [int(value) for value in column.flatten().tolist()]
