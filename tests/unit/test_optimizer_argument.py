"""`optimizer=` and `schedule=`: objects and functions of Python that a plan holds as text."""

from __future__ import annotations

import functools
import json
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW, Optimizer, lr_scheduler

import paceline
from paceline import TorchTask
from paceline.errors import UsageError

GENERATOR = torch.Generator().manual_seed(0)
INPUTS, TARGETS = torch.randn(64, 5, generator=GENERATOR), torch.randint(3, (64,), generator=GENERATOR)
STEPS = 12


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


def task(module: nn.Module | None = None) -> TorchTask:
    return TorchTask(module or model(), nn.CrossEntropyLoss(), train=(INPUTS, TARGETS), batch=16, name="small")


def groups(module: nn.Module) -> Optimizer:
    matrices = [parameter for parameter in module.parameters() if parameter.dim() > 1]
    rest = [parameter for parameter in module.parameters() if parameter.dim() == 1]
    given = [{"params": matrices, "weight_decay": 0.1, "lr": 0.03}, {"params": rest, "weight_decay": 0.0}]
    return AdamW(given, lr=0.01, betas=(0.8, 0.9))


def several(module: nn.Module) -> list[Optimizer]:
    first, second, third, fourth = module.parameters()
    return [torch.optim.Muon([first, third], lr=0.01), torch.optim.NAdam([second, fourth], lr=0.02)]


def frozen_head(module: nn.Module) -> Optimizer:
    return torch.optim.SGD(list(module.parameters())[:2], lr=0.1, momentum=0.9, dampening=0.5)


OPTIMIZERS: list[Callable[[nn.Module], Any]] = [groups, several, frozen_head]


def plain(factory: Callable[[nn.Module], Any], schedule: Any = None, every: int = 1) -> torch.Tensor:
    """The weights of a plain loop; a scheduler steps after every `every` updates."""
    module, small = model(), task()
    made = factory(module)
    optimizers = made if isinstance(made, list) else [made]
    schedulers = [schedule(optimizer) for optimizer in optimizers] if schedule else []
    for number, batch in zip(range(STEPS), small.batches(0, 1, 0), strict=False):
        module.zero_grad()
        nn.functional.cross_entropy(module(batch.data[0]), batch.data[1]).backward()
        for optimizer in optimizers:
            optimizer.step()
        for scheduler in schedulers if (number + 1) % every == 0 else ():
            scheduler.step()
    return torch.cat([parameter.detach().reshape(-1) for parameter in module.parameters()])


def run(scheme: str, optimizer: Any, given: TorchTask | None = None, **more: Any) -> paceline.Result:
    settings = {"workers": 1, "steps": STEPS} | more
    return paceline.simulate(given or task(), scheme, optimizer=optimizer, **settings)


@pytest.mark.parametrize("factory", OPTIMIZERS)
@pytest.mark.parametrize("scheme", ["sgd", "allreduce", "sync", "async", "groups", "averaging"])
def test_one_worker_has_the_bits_of_a_plain_loop(scheme: str, factory: Callable[[nn.Module], Any]) -> None:
    more = {"window": 1} if scheme == "averaging" else {}
    assert torch.equal(run(scheme, factory, **more).vector, plain(factory))


@pytest.mark.parametrize("scheme", ["agn", "downpour", "dynsgd", "sagn", "averaging", "easgd", "aeasgd"])
def test_local_optimizers_train(scheme: str) -> None:
    result = run(scheme, groups, workers=3, steps=40)
    assert result.loss < task().evaluate(task().start(0))["loss"]
    assert json.loads(result.hyper["rule.grouped"])[0]["parameters"] == [0, 2]


def test_an_optimizer_of_the_callers_own_model() -> None:
    module = model()
    assert torch.equal(run("allreduce", groups(module), task(module)).vector, plain(groups))
    assert torch.equal(run("allreduce", several(module), task(module)).vector, plain(several))


def test_groups_are_cut_by_the_ranges_of_servers() -> None:
    assert torch.equal(run("sync", groups, servers=3).vector, plain(groups))
    with pytest.raises(UsageError, match="Muon needs whole parameters"):
        run("sync", several, servers=2)


SCHEDULES: dict[str, Any] = {
    "step": functools.partial(lr_scheduler.StepLR, step_size=3, gamma=0.5),
    "one-cycle": functools.partial(lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=STEPS + 1),
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n)),
    "warm-up": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4), lr_scheduler.CosineAnnealingLR(optimizer, 8)],
        milestones=[4],
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("scheme", ["allreduce", "async"])
def test_schedulers_have_the_bits_of_a_plain_loop(scheme: str, name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SequentialLR's own
        expected = plain(groups, SCHEDULES[name])
    assert torch.equal(run(scheme, groups, schedule=SCHEDULES[name]).vector, expected)


def test_a_scheduler_that_counts_epochs_or_samples() -> None:
    """Four batches of 16 are an epoch of 64 samples."""
    every = functools.partial(lr_scheduler.ExponentialLR, gamma=0.5)
    expected = plain(groups, every, every=4)
    assert torch.equal(run("async", groups, schedule=every, schedule_unit="epochs").vector, expected)
    table = run("async", groups, schedule=lambda one: lr_scheduler.ExponentialLR(one, 0.5), schedule_unit="epochs")
    assert torch.equal(table.vector, expected)
    by_two = run("allreduce", groups, schedule=every, schedule_unit="epochs", workers=2, steps=6)
    text = json.loads(by_two.hyper["rule.schedule"])
    assert (text["unit"], text["per"]) == ("epochs", 0.5)
    by_sample = run("async", groups, schedule="linear:1,over=640,warmup=64", schedule_unit="samples")
    by_update = run("async", groups, schedule="linear:1,over=40,warmup=4")
    assert torch.allclose(by_sample.vector, by_update.vector, atol=1e-6)


def test_a_rate_in_epochs_without_an_optimizer() -> None:
    by_epoch = paceline.simulate(task(), "async", workers=2, steps=STEPS, lr="linear:0.1,over=4,unit=epochs")
    by_update = paceline.simulate(task(), "async", workers=2, steps=STEPS, lr="linear:0.1,over=16")
    assert by_epoch.digest == by_update.digest
    assert by_epoch.hyper["lr"] == "linear:0.1,over=4,unit=epochs,per=0.25"


class Strange(Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "thing": object()})


@pytest.mark.parametrize(
    ("optimizer", "more", "said"),
    [
        (None, {"schedule": SCHEDULES["step"]}, "schedule= goes with optimizer="),
        (AdamW, {}, "must be an optimizer or a function of the model"),
        (lambda _: 3, {}, "optimizer must be of torch.optim, or a function of the model that makes one, not 3"),
        (
            lambda _: AdamW([nn.Parameter(torch.zeros(3))]),
            {},
            r"a parameter of shape \(3,\) that the model does not have",
        ),
        (groups, {"lr": 0.1}, "has options and rates of its own: omit lr"),
        (groups, {"rule": "adam"}, "has options and rates of its own: omit rule"),
        (lambda m: torch.optim.LBFGS(m.parameters()), {}, "closure"),
        (lambda m: Strange(m.parameters()), {}, "option thing is a object, which a plan cannot hold"),
        (groups, {"schedule": lambda o: lr_scheduler.ReduceLROnPlateau(o)}, "ReduceLROnPlateau looks at a metric"),
        (groups, {"schedule": lambda _: 3}, "must give a torch.optim.lr_scheduler, not a int"),
        (groups, {"schedule": 3}, "schedule must be a function of the optimizer"),
    ],
)
def test_what_cannot_be_is_told(optimizer: Any, more: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        run("allreduce", optimizer, **more)


def test_a_used_optimizer_and_a_task_without_a_model_are_refused() -> None:
    module = model()
    used = groups(module)
    module(INPUTS).sum().backward()
    used.step()
    with pytest.raises(UsageError, match="has made steps already"):
        run("allreduce", used, task(module))
    with pytest.raises(UsageError, match="task 'toy' has no model of torch"):
        paceline.simulate("toy", "allreduce", steps=3, optimizer=groups)


def test_a_class_that_other_processes_cannot_find_is_refused() -> None:
    class Local(AdamW):
        pass

    with pytest.raises(UsageError, match=r"other processes cannot find .*Local"):
        run("allreduce", lambda m: Local(m.parameters()))
