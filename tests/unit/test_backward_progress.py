"""How far a gradient is during a backward pass: told from the end to the front, and taken back when it is wrong."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from paceline.torch_task import TorchTask
from paceline.torch_task.flat_module import FlatModule

Told = list[tuple[int, int]]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1))


def backward(flat: FlatModule, loss: Tensor, out: Tensor) -> tuple[Told, list[Tensor]]:
    """What was told of a pass, and what the gradient was then."""
    told: Told = []
    seen: list[Tensor] = []

    def final(index: int, version: int) -> None:
        told.append((index, version))
        seen.append(out.clone())

    flat.progress().begin(out, final)
    loss.backward()  # type: ignore[no-untyped-call]
    flat.progress().end()
    return told, seen


def bound() -> tuple[FlatModule, Tensor]:
    flat = FlatModule(model())
    out = torch.zeros(flat.size)
    flat.bind(flat.vector(), out)
    return flat, out


def test_what_is_told_to_be_final_does_not_change_any_more() -> None:
    flat, out = bound()
    for _ in range(2):
        out.zero_()
        told, seen = backward(flat, flat.module(torch.ones(3, 6)).sum(), out)
        indices = [index for index, _ in told]
        assert indices == sorted(indices, reverse=True)
        assert len(set(indices)) >= 3
        assert told[-1] == (0, out._version)
        for (index, _), then in zip(told, seen, strict=True):
            assert torch.equal(then[index:], out[index:])


def test_parameters_without_a_gradient_are_final_at_the_end() -> None:
    flat, out = bound()
    inner = flat.module[0](torch.ones(3, 6)).sum() + flat.module[4](torch.ones(3, 4)).sum()  # type: ignore[index]
    told, _ = backward(flat, inner, out)
    assert told[-1] == (0, out._version)
    assert 0 < told[0][0] < flat.size


def test_a_write_of_somebody_else_takes_it_all_back() -> None:
    flat, out = bound()
    first = flat.parameters[0]
    for act in (lambda _: out.mul_(2), lambda _: flat.parameters[-1].grad.add_(1)):  # type: ignore[union-attr]
        removable = first.register_hook(lambda gradient, act=act: (act(gradient), None)[1])  # type: ignore[misc]
        told, _ = backward(flat, flat.module(torch.ones(3, 6)).sum(), out)
        removable.remove()
        assert told[0][0] >= 0
        assert told[-1][0] == -1
        assert [index for index, _ in told].count(-1) == 1


def test_a_gradient_that_is_written_twice_takes_it_all_back() -> None:
    """As with torch's reentrant checkpoints, where autograd runs inside autograd."""
    from torch.utils.checkpoint import checkpoint

    flat, out = bound()
    last = flat.module[4]  # type: ignore[index]
    x = torch.ones(3, 4, requires_grad=True)
    twice = sum(checkpoint(last, x, use_reentrant=True).sum() for _ in range(2))
    told, _ = backward(flat, twice, out)
    assert told[-1][0] == -1


def test_a_task_tells_of_one_gradient_and_of_none_that_it_clips() -> None:
    data = (torch.randn(8, 6), torch.randn(8, 1))
    task = TorchTask(model, nn.functional.mse_loss, data, batch=4)
    batch, told = next(iter(task.batches(0, 1, 0))), []
    x, out = task.start(0), torch.zeros(task.flat.size)
    assert task.follows
    task.follow(lambda index, version: told.append((index, version)))
    _, first = task.grad(x, batch, out)
    assert told[-1] == (0, out._version)
    count, first = len(told), first.clone()
    assert torch.equal(task.grad(x, batch, out)[1], first)
    assert len(told) == count
    assert not TorchTask(model, nn.functional.mse_loss, data, clip=1.0).follows
