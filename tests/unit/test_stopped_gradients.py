"""A gradient that has become useless: who may ask for it, what a task stops, what it leaves, and virtual time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from paceline import TorchTask, simulate
from paceline.errors import SchemeError
from paceline.processes.roles.stoppable import gradient_unless
from paceline.scheme import Scheme, State, Vector, on_server
from paceline.tasks.quadratic import quadratic
from paceline.worker import Worker


@dataclass(frozen=True)
class Asking(Scheme, name="asking"):
    """A gradient with a limit, and a push that says whether it came."""

    until: int = 0
    within: float = 0.0
    started: bool = False

    def server(self, x0: Vector, workers: int) -> State:
        return State(x=x0, stopped=0)

    @on_server
    def push(self, s: State, done: int) -> tuple[Vector, int]:
        s.stopped += 1 - done
        s.x += 1.0
        s.v += 1
        return s.x, s.v

    async def step(self, w: Worker) -> None:
        asked = w.grad(w.x, until=w.v + self.until if self.until else None, within=self.within or None)
        g = await (await w.start(asked)) if self.started else await asked
        w.x, w.v = await self.push(int(g is not None))


@dataclass(frozen=True)
class Serverless(Scheme, name="serverless"):
    """Asks for a version of a server that is not there."""

    async def step(self, w: Worker) -> None:
        await w.grad(w.x, until=3)


def stops(scheme: Scheme, **options: Any) -> list[tuple[float, int]]:
    """The time and the number of stopped gradients after each update."""
    seen: list[tuple[float, int]] = []
    options = {"workers": 2, "steps": 6, "speeds": (1.0, 0.1)} | options
    simulate("toy", scheme, watch=lambda e: seen.append((e.now, e.centre.stopped)), **options)
    return seen


@pytest.mark.parametrize("started", [False, True])
def test_a_version_ends_a_gradient_at_its_moment(started: bool) -> None:
    """Worker 0 takes a second, worker 1 ten: when worker 0 pushes, worker 1 is told, and pushes that it has none."""
    seen = stops(Asking(until=1, started=started), steps=4)
    assert seen[0] == (1.0, 0)
    assert seen[1] == (1.0, 1)
    assert seen[-1][1] >= 2


def test_a_deadline_ends_a_gradient_after_its_seconds() -> None:
    assert stops(Asking(within=3.0), steps=4) == [(1.0, 0), (2.0, 0), (3.0, 0), (3.0, 1)]


def test_the_word_travels_as_a_message() -> None:
    seen = stops(Asking(until=1), steps=2, network="latency=0.25")
    assert seen == [(1.25, 0), (1.75, 1)]  # push; the word; a push


def test_a_stopped_gradients_batch_is_the_next_one() -> None:
    """Worker 1 is always stopped: it takes no batch. Worker 0's batches are those that it would have alone."""
    task = quadratic(dim=3, noise=1.0)
    counts: list[list[int]] = []
    options = {"steps": 9, "speeds": (1.0, 0.01)}
    simulate(task, Asking(until=1), workers=2, watch=lambda e: counts.append([s.gradients for s in e.seats]), **options)
    assert counts[-1][1] == 0


def test_batched_gradients_have_the_same_times() -> None:
    task = {"workers": 5, "steps": 40, "compute": "exponential:1", "lr": 0.05}
    one, many = (simulate("digits-mlp", "ringmaster", threshold=2, batched=how, **task) for how in (False, True))
    assert one.virtual_seconds == many.virtual_seconds
    assert one.gradients == many.gradients
    torch.testing.assert_close(one.vector, many.vector, rtol=1e-5, atol=1e-6)


def test_without_a_server_there_is_no_version() -> None:
    with pytest.raises(SchemeError, match="its scheme has no server"):
        simulate("toy", Serverless(), workers=2, steps=2)


def test_a_deadline_is_above_nothing() -> None:
    @dataclass(frozen=True)
    class Hasty(Asking, name="hasty"):
        async def step(self, w: Worker) -> None:
            await w.grad(w.x, within=-1.0)

    with pytest.raises(SchemeError, match="give a number above 0"):
        simulate("toy", Hasty(), workers=1, steps=2)


class Model(nn.Module):
    """Two layers with batch statistics; notes how far a gradient has come."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.outer = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.outer(torch.relu(self.norm(self.inner(x))))
        return out


def small() -> TorchTask:
    rows = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    return TorchTask(Model(), nn.CrossEntropyLoss(), (rows, (rows[:, 0] > 0).long()), batch=8)


@pytest.mark.parametrize("looks", range(1, 8))
def test_a_task_stops_wherever_it_looks_and_leaves_no_trace(looks: int) -> None:
    """Useless at the n-th look: before the forward pass, after it, or after a part of the backward pass."""
    task = small()
    x, batch = task.start(0), next(task.batches(0, 1, 0))
    buffers = task.buffers()
    before = {name: buffer.clone() for name, buffer in buffers.items()}
    asked = 0

    def useless() -> bool:
        nonlocal asked
        asked += 1
        return asked >= looks

    assert gradient_unless(useless, task, task.grad, x, batch, torch.empty_like(x), buffers) is None
    assert asked == looks
    assert all(torch.equal(before[name], buffers[name]) for name in before)
    plain, again = small(), torch.empty_like(x)
    loss, g = task.grad(x, batch, again, buffers)
    expected = plain.grad(x, batch, torch.empty_like(x), plain.buffers())
    assert (loss, torch.equal(g, expected[1])) == (expected[0], True)
    assert any(not torch.equal(before[name], buffers[name]) for name in before)


def test_a_gradient_that_stays_useful_is_the_gradient() -> None:
    task = small()
    x, batch = task.start(0), next(task.batches(0, 1, 0))
    found = gradient_unless(lambda: False, task, task.grad, x, batch, torch.empty_like(x), task.buffers())
    assert found is not None
    assert torch.equal(found[1], small().grad(x, batch, torch.empty_like(x), task.buffers())[1])


def test_a_task_that_cannot_stop_throws_its_gradient_away() -> None:
    task = quadratic(dim=3, noise=0.1)
    x, batch, asked = task.start(0), next(task.batches(0, 1, 0)), iter([False, True])
    assert gradient_unless(lambda: next(asked), task, task.grad, x, batch, torch.empty_like(x), None) is None
    assert list(asked) == []
