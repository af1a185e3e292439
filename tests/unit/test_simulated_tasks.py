"""What the simulator does with losses, errors and buffers of a task."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from machine import Spoilt
from torch import Tensor, nn

from paceline import TorchTask, simulate
from paceline.errors import LossError, RunError
from paceline.simulator.engine import SimulationEngine


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_ends_the_run(loss: float) -> None:
    with pytest.raises(LossError, match=f"worker:0, step 2, update 4: the loss is {loss}; a smaller lr") as caught:
        simulate(Spoilt(loss), "async", workers=2, steps=100)
    result = caught.value.result
    assert result is not None
    assert (result.updates, result.gradients) == (4, 4)
    assert torch.isfinite(result.vector).all()
    assert math.isnan(result.loss)


def test_an_error_in_the_task_says_where() -> None:
    with pytest.raises(ZeroDivisionError, match="oh") as caught:
        simulate(Spoilt(error=ZeroDivisionError("oh")), "async", workers=2, steps=100)
    assert caught.value.__notes__ == ["in the gradient of worker:0, step 2"]


def test_a_task_that_runs_dry_says_so() -> None:
    with pytest.raises(RunError, match="worker:0, step 1: the task has no more mini-batches"):
        simulate(Spoilt(batches=1), "async", workers=2, steps=100)


def batch_norm(policy: Any) -> TorchTask:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 3, generator=generator) + torch.tensor([0.0, 5.0, -3.0])
    y = x.sum(1, keepdim=True)
    model = lambda: nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))  # noqa: E731
    return TorchTask(model, nn.functional.mse_loss, (x, y), batch=8, buffer_policy=policy)


@pytest.mark.parametrize("policy", ["average", "chief"])
def test_every_worker_trains_with_buffers_of_its_own(policy: str) -> None:
    seen: list[dict[str, list[Tensor]]] = []

    def keep(run: SimulationEngine) -> None:
        seen.append({name: [seat.buffers[name].clone() for seat in run.seats] for name in run.seats[0].buffers})

    task = batch_norm(policy)
    result = simulate(task, "async", workers=3, steps=12, lr=0.01, seed=1, watch=keep)
    last = seen[-1]
    assert not torch.equal(last["0.running_mean"][0], last["0.running_mean"][1])
    assert [int(n) for n in last["0.num_batches_tracked"]] == [4, 4, 4]
    chosen = {
        name: rows[0] if policy == "chief" else torch.stack(rows).mean(0) if rows[0].is_floating_point() else rows[0]
        for name, rows in last.items()
    }
    assert result.metrics == task.evaluate(result.vector, chosen)
    assert result.metrics != task.evaluate(result.vector)


def test_the_two_buffer_policies_differ_in_evaluation_only() -> None:
    average, chief = (simulate(batch_norm(p), "sync", workers=3, steps=6, lr=0.01) for p in ("average", "chief"))
    assert average.digest == chief.digest
    assert average.loss != chief.loss


@pytest.mark.parametrize("policy", ["average", "chief"])
def test_the_dead_have_no_say_in_the_statistics(policy: str) -> None:
    """Worker 0 dies before its first gradient: its statistics are those of no data at all."""
    alone = simulate(batch_norm(policy), "async", workers=2, steps=150, lr=0.05, faults=["kill:0@time=0.5"])
    both = simulate(batch_norm(policy), "async", workers=2, steps=150, lr=0.05)
    assert alone.loss < 1.5 * both.loss + 0.05


def test_half_precision_trains_and_has_a_digest() -> None:
    x = torch.randn(32, 3, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    task = TorchTask(lambda: nn.Linear(3, 1).to(torch.bfloat16), nn.MSELoss(), (x, x[:, :1]), batch=8)
    result = simulate(task, "sync", workers=2, steps=40)
    assert len(result.digest) == 64
    assert result.loss < 0.5
