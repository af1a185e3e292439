"""What training recipes do around the model: clipping, mixed precision, compilation, memory formats, checkpointing."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from paceline import TorchTask, simulate
from paceline.errors import UsageError
from paceline.torch_task import seeded

DATA = torch.randn(40, 3, 8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 5
LR, STEPS = 0.1, 6


class Net(nn.Module):
    """A small convolutional network, with or without activation checkpointing."""

    def __init__(self, *, saves: bool = False) -> None:
        super().__init__()
        self.saves = saves
        self.first = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Dropout(0.5))
        self.last = nn.Linear(4 * 36, 5)

    def forward(self, a: Tensor) -> Tensor:
        hidden = checkpoint(self.first, a, use_reentrant=False) if self.saves else self.first(a)
        result: Tensor = self.last(hidden.flatten(1))
        return result


def task(**more: Any) -> TorchTask:
    return TorchTask(Net, cross_entropy, DATA, batch=8, **more)


def plain_loop(own: TorchTask, step: Any) -> Tensor:
    """The parameters after a few steps of plain torch on the task's batches; `step` makes the gradients."""
    with seeded(0):
        module = Net()
    optimizer = torch.optim.SGD(module.parameters(), LR)
    for batch in islice(own.batches(0, 1, 0), STEPS):
        optimizer.zero_grad()
        with seeded(batch.seed):
            step(module, *batch.data)
        optimizer.step()
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()])


def test_clip_has_the_bits_of_clip_grad_norm() -> None:
    def step(module: nn.Module, a: Tensor, b: Tensor) -> None:
        cross_entropy(module(a), b).backward()
        norms.append(float(nn.utils.clip_grad_norm_(module.parameters(), 0.5)))

    norms: list[float] = []
    own = task(clip=0.5)
    expected = plain_loop(own, step)
    assert max(norms) > 0.5, "nothing is clipped"
    assert torch.equal(simulate(own, "sgd", steps=STEPS, lr=LR).vector, expected)


def test_clip_of_slices_is_refused() -> None:
    with pytest.raises(UsageError, match="clipped parts do not add up to the clipped whole"):
        task(clip=1.0, feed="slice")
    with pytest.raises(UsageError, match="which exact runs have"):
        simulate(task(clip=1.0), "sync", exact=True, steps=1)
    with pytest.raises(UsageError, match="clip must be above 0"):
        task(clip=0.0)


def test_autocast_has_the_bits_of_plain_torch() -> None:
    def step(module: nn.Module, a: Tensor, b: Tensor) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            output = module(a)
            loss = cross_entropy(output, b)
        kinds.add(output.dtype)
        loss.backward()

    kinds: set[torch.dtype] = set()
    own = task(autocast=torch.bfloat16)
    expected = plain_loop(own, step)
    assert kinds == {torch.bfloat16}
    found = simulate(own, "sgd", steps=STEPS, lr=LR)
    assert found.vector.dtype == torch.float32
    assert torch.equal(found.vector, expected)
    assert found.digest != simulate(task(), "sgd", steps=STEPS, lr=LR).digest
    with pytest.raises(UsageError, match="autocast must be"):
        task(autocast=torch.float64)


@pytest.mark.parametrize("given", ["argument", "model"])
def test_compiled_models(given: str) -> None:
    """With a backend that compiles nothing the graph is still traced, and the bits are those of the model."""
    if given == "argument":
        own = task(compile={"backend": "aot_eager"})
    else:
        with seeded(0):
            compiled: Any = torch.compile(Net(), backend="aot_eager")
        own = TorchTask(compiled, cross_entropy, DATA, batch=8, compile={"backend": "aot_eager"})
    own.flat.module.first[2].p = plain = 0.0  # random numbers of compiled code are its own
    assert [name for name, _ in own.parameters()] == [name for name, _ in task().parameters()]
    other = task()
    other.flat.module.first[2].p = plain
    x, batch = own.start(0), next(own.batches(0, 1, 0))
    loss, g = own.grad(x, batch, torch.empty_like(x))
    expected, h = other.grad(x, batch, torch.empty_like(x))
    assert loss == pytest.approx(expected)
    assert torch.allclose(g, h, atol=1e-6)
    y = x - g  # another vector: the compiled code must compute with it
    assert own.grad(y, batch)[0] == pytest.approx(other.grad(y, batch)[0])
    assert own.evaluate(y)["loss"] == pytest.approx(other.evaluate(y)["loss"], rel=1e-5)


def test_channels_last_inputs_and_models() -> None:
    def last(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return a.to(memory_format=torch.channels_last), b

    own = TorchTask(lambda: Net().to(memory_format=torch.channels_last), cross_entropy, DATA, batch=8, prepare=last)
    other, x = task(), own.start(0)
    assert torch.equal(x, other.start(0))  # the vector has the logical order of the weights, whatever their format
    batch = next(own.batches(0, 1, 0))
    assert batch.data[0].is_contiguous(memory_format=torch.channels_last)
    for one in (own, other):
        one.flat.module.first[2].p = 0.0  # dropout draws in the order of the memory
    loss, g = own.grad(x, batch, torch.empty_like(x))
    expected, h = other.grad(x, next(other.batches(0, 1, 0)), torch.empty_like(x))
    assert loss == pytest.approx(expected, rel=1e-5)
    assert torch.allclose(g, h, atol=1e-5)
    assert own.evaluate(x)["loss"] == pytest.approx(other.evaluate(x)["loss"], rel=1e-5)


def test_activation_checkpointing_changes_no_bit() -> None:
    own = TorchTask(lambda: Net(saves=True), cross_entropy, DATA, batch=8)
    found, expected = (simulate(one, "sync", workers=2, steps=STEPS, lr=LR) for one in (own, task()))
    assert found.digest == expected.digest


def test_a_recipe_with_all_of_them_repeats(tmp_path: Path) -> None:
    own = TorchTask(lambda: Net(saves=True), cross_entropy, DATA, batch=8, clip=0.5, autocast=torch.bfloat16)
    first, second = (simulate(own, "async", workers=3, epochs=2, lr=LR, compute="exponential:1.0") for _ in range(2))
    assert first.digest == second.digest
    assert first.updates == 10
