"""`batched`: gradients in flight are computed at once. Times and orders are those of single gradients, values close."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from batched_runs import Course, Several, assert_same
from small_models import DATA, net, normed, task
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

from paceline import Hook, simulate
from paceline.compute_times import Exponential
from paceline.config import build
from paceline.errors import LossError, UsageError
from paceline.simulator.cost import Cost
from paceline.simulator.engine import SimulationEngine
from paceline.tasks.cnn import grey_net
from paceline.torch_task import TorchTask
from paceline.torch_task.drawn_together import GatheredBatches, StackedBatches

SCHEMES = [
    ("async", {"lr": 0.05}),
    ("async", {"rule": "adam", "lr": 0.01}),
    ("sync", {}),
    ("allreduce", {}),
    ("averaging", {"window": 3}),
    ("downpour", {"n_push": 2, "n_fetch": 3}),
    ("agn", {"window": 3}),
    ("adag", {"window": 2}),
    ("dynsgd", {}),
    ("easgd", {}),
    ("aeasgd", {"window": 2}),
    ("aeamsgd", {"window": 2, "delta": 0.5}),
    ("hogwild", {"chunks": 4, "lr": 0.05}),
    ("groups", {}),
    ("sync-repeat", {}),
]


@pytest.mark.parametrize(("scheme", "hyper"), SCHEMES, ids=lambda one: one if isinstance(one, str) else "")
def test_times_and_orders_are_those_of_single_gradients(scheme: str, hyper: dict[str, Any]) -> None:
    assert_same(task(), scheme, hyper, workers=6)


@pytest.mark.parametrize(("scheme", "hyper"), SCHEMES[:4], ids=lambda one: one if isinstance(one, str) else "")
def test_equal_times_are_settled_as_with_single_gradients(scheme: str, hyper: dict[str, Any]) -> None:
    assert_same(task(), scheme, hyper, workers=6, compute="constant:1", steps=40)


def small_images(**options: Any) -> TorchTask:
    generator = torch.Generator().manual_seed(4)
    images = torch.randint(0, 256, (40, 28, 28), generator=generator, dtype=torch.uint8)

    def prepare(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return images.unsqueeze(1).float() / 255, labels

    data = (images, torch.arange(40) % 10)
    return TorchTask(lambda: grey_net(0.5), cross_entropy, data, batch=2, prepare=prepare, **options)


def test_the_convolutional_network_with_dropout_draws_the_same_masks() -> None:
    assert_same(small_images(), "async", {"lr": 0.02}, tolerance=1e-3, workers=3, steps=5)


def test_digits_with_a_network_between_workers_and_server() -> None:
    job = build.task_of("digits-mlp", {})
    assert_same(job, "async", {"lr": 0.05}, workers=9, steps=60, network="latency=0.1,bandwidth=1e6")


@pytest.mark.parametrize("feed", ["shared", "shard", "slice"])
def test_every_feed(feed: Any) -> None:
    assert_same(task(feed=feed, batch=17), "async", {}, workers=7, steps=40)


class Rows(Dataset[Any]):
    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> Any:
        return DATA[0][index] + 0.1 * torch.rand(()), DATA[1][index]


KINDS = {
    "noise in prepare": lambda: task(prepare=lambda x, y: (x + 0.1 * torch.rand_like(x), y)),
    "a data set that draws": lambda: TorchTask(net, cross_entropy, Rows(), batch=4),
    "a loader": lambda: TorchTask(net, cross_entropy, DataLoader(Rows(), batch_size=4, shuffle=True)),
    "clipped": lambda: task(clip=0.1),
    "double": lambda: task(dtype=torch.float64),
    "mixed precision": lambda: task(autocast=torch.bfloat16),
    "tied": lambda: task(model=Tied),
    "frozen": lambda: task(model=frozen),
    "by name": lambda: TorchTask(Named, None, {"x": DATA[0], "y": DATA[1]}, batch=4),
    "whole batch in prepare": lambda: task(prepare=lambda x, y: (x - x.mean(0), y)),
}


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.out = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 3)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.b(torch.tanh(self.a(x)))))


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"loss": cross_entropy(self.net(x), y)}


def frozen() -> nn.Module:
    model = net()
    model[0].bias.requires_grad_(False)
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_tasks_of_every_kind(kind: str) -> None:
    assert_same(KINDS[kind](), "async", {}, tolerance=2e-2 if kind == "mixed precision" else 1e-4, workers=5, steps=25)


def test_samples_in_memory_are_gathered_and_others_stacked() -> None:
    assert isinstance(task().batched(3, 0)._batches, GatheredBatches)
    assert isinstance(KINDS["whole batch in prepare"]().batched(3, 0)._batches, GatheredBatches)
    for kind in ("noise in prepare", "a data set that draws", "a loader"):
        assert isinstance(KINDS[kind]().batched(3, 0)._batches, StackedBatches)


FAULTS = [
    ["kill:1@step=2,back=3"],
    ["kill:0@time=2.5,back=1", "stop:2@update=5,for=4"],
    ["kill:server:0@call=20,back=1"],
    ["partition:1@time=2,for=3", "delay:2@time=1,by=0.5,for=4"],
    ["random:seed=7,count=6"],
]


@pytest.mark.parametrize(("faults", "servers"), [*((one, 1) for one in FAULTS[:3]), *((one, 2) for one in FAULTS[3:])])
def test_faults_and_virtual_checkpoints(faults: list[str], servers: int) -> None:
    results = [
        simulate(
            task(), "agn", workers=4, steps=30, compute="exponential:1", faults=faults, servers=servers, seed=2,
            checkpoint_steps=8, batched=batched,
        )
        for batched in (False, True)
    ]  # fmt: skip
    one, other = (dataclasses.replace(one, batched=False, vector=torch.zeros(1), metrics={}) for one in results)
    assert repr(one) == repr(other)
    assert one.fates == other.fates
    torch.testing.assert_close(results[0].vector, results[1].vector, rtol=1e-4, atol=1e-5)


def test_several_gradients_of_one_worker_in_flight() -> None:
    """Their batches go by the order in which they are due, not by that of their starts."""
    cost = Cost(compute_law=Exponential(1.0))
    runs = []
    for batched in (False, True):
        engine = SimulationEngine(task(), Several(lr=0.05), workers=4, seed=1, cost=cost, batched=batched)
        seen = Course(engine)
        engine.run(60)
        runs.append((engine, seen))
    assert runs[0][1].order == runs[1][1].order
    np.testing.assert_allclose(runs[0][1].losses, runs[1][1].losses, rtol=1e-4)
    torch.testing.assert_close(runs[0][0].centre.x, runs[1][0].centre.x)


class Watcher(Hook):
    def __init__(self, seen: list[Any]) -> None:
        self.seen = seen

    def after_gradient(self, session: Any, loss: float) -> None:
        self.seen.append((session.worker.rank, session.updates, session.seconds, round(loss, 3)))
        norm = session.gradient_norm()
        self.seen.append(None if norm != norm else round(norm, 3))


def test_hooks_are_called_for_each_gradient() -> None:
    seen: list[Any] = []
    simulate(task(), "async", workers=4, steps=40, hooks=[Watcher(seen)], batched=True)
    assert len(seen) == 80


def test_hooks_see_the_same_losses_norms_and_moments() -> None:
    seen: tuple[list[Any], list[Any]] = ([], [])
    for batched, told in zip((False, True), seen, strict=True):
        simulate(task(), "async", workers=4, steps=20, compute="exponential:1", hooks=[Watcher(told)], batched=batched)
    assert seen[0] == seen[1]
    assert len(seen[0]) >= 40


def test_a_loss_that_is_not_finite_ends_the_run_where_it_is_due() -> None:
    told = []
    for batched in (False, True):
        with pytest.raises(LossError) as caught:
            simulate(task(), "async", workers=3, steps=200, lr=3e38, batched=batched)
        told.append(str(caught.value))
    assert told[0] == told[1]


class Drawing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x + torch.randn_like(x))


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) if x.sum().item() > 0 else self.net(-x)


class Feeding(Hook, name="feeding"):
    def feed(self, session: Any, batch: Any) -> Any:
        return batch


@pytest.mark.parametrize(
    ("job", "settings", "why"),
    [
        ("toy", {}, "task 'toy' computes its gradients one by one; omit batched"),
        (task(normed), {}, "has buffers that a gradient may change, such as those of BatchNorm"),
        (task(Drawing), {}, "its model draws random numbers otherwise than by dropout"),
        (task(Branching), {}, "cannot run under torch.func.vmap"),
        (task(compile=True), {}, "is compiled, and batched runs its model by vmap"),
        (task(), {"exact": True}, "an exact run has the bits of single gradients"),
        (task(), {"hooks": [Feeding()]}, "the hook 'feeding' changes a batch"),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_what_cannot_be_batched_is_refused(job: Any, settings: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        simulate(job, "sync", workers=2, steps=5, batched=True, **settings)


def test_a_result_says_that_it_was_batched() -> None:
    result = simulate(task(), "async", workers=4, steps=8, batched=True)
    assert result.batched
    assert result.as_dict()["batched"] is True
    assert ("gradients in flight", "computed at once") in list(result.rows())
    assert "batched" not in simulate(task(), "async", workers=4, steps=8).as_dict()


def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(UsageError, match="device must be cpu, cuda or cuda:K"):
        simulate(task(), "async", device="tpu")
    if not torch.cuda.is_available():
        with pytest.raises(UsageError, match="torch finds no GPU here"):
            simulate(task(), "async", device="cuda")
