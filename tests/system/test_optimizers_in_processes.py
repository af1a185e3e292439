"""Optimizers of torch in real processes: killed, resumed, repeated with the same bits, and in a script's own loop."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from attached import launch, same, weights
from processes import finished, run
from torch import nn
from torch.optim import Optimizer, lr_scheduler

from paceline import Result, TorchTask, replay, simulate
from paceline.config import build
from paceline.config.optimizer_argument import with_optimizer

__all__ = ["launch"]  # fixtures

STEPS = 60


def task() -> TorchTask:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(256, 6, generator=generator)
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 2))
    given = (inputs, (inputs[:, 0] > 0).long())
    return TorchTask(module, nn.CrossEntropyLoss(), train=given, batch=8, name="small")


def groups(module: nn.Module) -> Optimizer:
    matrices = [parameter for parameter in module.parameters() if parameter.dim() > 1]
    rest = [parameter for parameter in module.parameters() if parameter.dim() == 1]
    return torch.optim.RAdam([{"params": matrices, "weight_decay": 0.1}, {"params": rest, "lr": 0.005}], lr=0.01)


def several(module: nn.Module) -> list[Optimizer]:
    first, second, third, fourth = module.parameters()
    return [torch.optim.Muon([first, third], lr=0.01), torch.optim.Adafactor([second, fourth], lr=0.02)]


def hyper_of(scheme: str, optimizer: Callable[[nn.Module], Any], workers: int, **given: Any) -> dict[str, Any]:
    chosen = build.scheme_of(scheme, given)
    schedule = functools.partial(lr_scheduler.ExponentialLR, gamma=0.9)
    return given | with_optimizer(chosen, given, task(), workers, STEPS, optimizer, schedule, "epochs")


CASES: dict[str, tuple[Callable[[nn.Module], Any], int, dict[str, Any]]] = {
    "allreduce": (several, 0, {}),
    "averaging": (groups, 0, {"window": 2}),
    "sync": (groups, 2, {}),
    "async": (several, 1, {}),
    "agn": (groups, 2, {"window": 3, "server.rule": "adadelta", "server.lr": 1.0}),
    "aeasgd": (several, 1, {"window": 4}),
}


@pytest.mark.parametrize("scheme", CASES)
def test_killed_resumed_and_repeated(scheme: str, tmp_path: Path) -> None:
    optimizer, servers, given = CASES[scheme]
    hyper = hyper_of(scheme, optimizer, 2, **given)
    settings: dict[str, Any] = {"workers": 2, "servers": servers, "hyper": hyper, "checkpoint_steps": 15}
    kills = ("worker:1", "server:0") if servers else ("worker:1",)
    first = finished(run(tmp_path / "run", task(), scheme, kills=kills, steps=STEPS, **settings), STEPS)
    assert first.restarts == len(kills)
    again = finished(run(tmp_path / "run", task(), scheme, resume=True, steps=2 * STEPS, **settings), 2 * STEPS)
    told = replay(tmp_path / "run", task=task())
    assert told.match, told.difference
    assert told.digest == again.digest
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert plan["hyper"]["rule.grouped"] == hyper["rule.grouped"]
    if build.scheme_of(scheme, {}).exact(2) is None:
        calm = finished(run(tmp_path / "calm", task(), scheme, steps=STEPS, **settings), STEPS)
        assert calm.digest == virtual(scheme, hyper, servers).digest


def virtual(scheme: str, hyper: dict[str, Any], servers: int) -> Result:
    return simulate(task(), scheme, workers=2, servers=max(servers, 1), steps=STEPS, **hyper)


OWN = """
from torch.optim.lr_scheduler import StepLR

def groups(model):
    matrices, rest = [p for p in model.parameters() if p.dim() > 1], [p for p in model.parameters() if p.dim() == 1]
    return torch.optim.NAdam([{"params": matrices, "weight_decay": 0.1}, {"params": rest}], lr=0.01)

"""

ATTACHED = """
with attach(model, "allreduce", steps=30, optimizer=groups(model), schedule=lambda o: StepLR(o, 7)) as pace:
    for images, labels in pace.share(items):
        pace.step(F.cross_entropy(model(images), labels))
keep("0.weights", model)
"""

ALONE = """
optimizer = groups(model)
scheduler = StepLR(optimizer, 7)
for images, labels in items[:30]:
    optimizer.zero_grad()
    F.cross_entropy(model(images), labels).backward()
    optimizer.step()
    scheduler.step()
keep("plain.weights", model)
"""


@pytest.mark.parametrize("scheme", ["allreduce", "sync", "async"])
def test_a_scripts_own_optimizer_has_the_bits_of_its_loop(scheme: str, launch: Callable[..., Result]) -> None:
    result = launch(OWN + ATTACHED.replace("allreduce", scheme), workers=1)
    assert result.updates == 30
    plain: dict[str, Any] = {}
    exec(compile(Path("script.py").read_text().partition("with attach")[0] + ALONE, "plain", "exec"), plain)
    assert same(weights("0.weights"), weights("plain.weights"))


def test_a_scripts_own_optimizer_with_several_workers(launch: Callable[..., Result]) -> None:
    first = launch(OWN + ATTACHED, workers=2)
    assert launch(OWN + ATTACHED.replace("allreduce", "sync"), workers=2, servers=2).digest == first.digest
