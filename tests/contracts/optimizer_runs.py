"""Rules under schemes in the simulator, and what must hold of each pair."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import nn

from paceline import Result, TorchTask, simulate
from paceline.config import build
from paceline.rules import rules

STEPS = 12
RATES = {"adadelta": 1.0, "rprop": 0.001, "sgd": 0.1, "asgd": 0.1, "adagrad": 0.05}
SERVED = ("sync", "async", "groups", "sync-repeat")
LOCAL = ("agn", "adag", "dynsgd", "downpour", "downpour-easy", "sagn", "aeasgd")
ALIKE = ("allreduce", "averaging", "easgd", "sgd")
EXACT = ("sync", "sagn", "allreduce", "averaging", "easgd")
FEW = ("hogwild", "aeamsgd", "sync-rates", "gap-aware", "rescaled")  # take a few rules only
OWN = ("dana", "ormo")  # have an update of their own, and no rule
ONCE = (  # with one rule: they apply it as those above do
    *("ace", "dc-asgd", "delay-adaptive", "drop-stale", "k-async", "k-batch-async", "k-batch-sync", "k-sync", "m-sync"),
    *("malenia", "mindflayer", "rennala", "ringleader", "ringmaster", "softsync", "ssp"),
    *("async-diloco", "decoupled-diloco", "diloco", "fedasync", "fedavg", "fedbuff", "fedopt", "fedprox", "halos"),
    *("local-sgd", "slowmo", "sparseloco", "streaming-diloco"),
    *("ad-psgd", "d-psgd", "daso", "gosgd", "hierarchical", "noloco", "sgp"),
)


def pairs(schemes: tuple[str, ...], *, quick: bool) -> list[tuple[str, str]]:
    """Every scheme with every rule; the quick ones are every rule in one scheme, and one rule in every scheme."""
    found = [(scheme, rule) for scheme in schemes for rule in sorted(rules())]
    return [pair for pair in found if ("sync" in pair or "nadam" in pair) == quick]


@functools.cache
def task() -> TorchTask:
    """Without biases: Muon takes matrices only."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(64, 6, generator=generator)
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 5, bias=False), nn.Tanh(), nn.Linear(5, 2, bias=False))
    given = (inputs, (inputs[:, 0] > 0).long())
    return TorchTask(module, nn.CrossEntropyLoss(), train=given, batch=8, name="small")


def run(scheme: str, rule: str, **more: Any) -> Result:
    settings: dict[str, Any] = {"workers": 1 if scheme == "sgd" else 3, "steps": STEPS, "compute": "exponential:1.0"}
    settings |= {"lr": RATES.get(rule, 0.02), "rule": rule, "warn": lambda _: None}
    return simulate(task(), scheme, **settings | more)


def trains_and_repeats_after_deaths(scheme: str, rule: str) -> None:
    assert run(scheme, rule, steps=40).loss < task().evaluate(task().start(0))["loss"]
    faults = ["kill:0@step=3,back=1"]
    served = bool(build.scheme_of(scheme, {}).methods)
    if served:
        faults.append("kill:server:0@call=9,back=1")  # inside a call: all return to a checkpoint
    struck = run(scheme, rule, faults=faults, checkpoint_steps=4)
    assert struck.updates == STEPS
    assert math.isfinite(struck.loss)
    assert struck.digest == run(scheme, rule, faults=faults, checkpoint_steps=4).digest


def a_death_changes_no_bit_of_an_exact_run(scheme: str, rule: str) -> None:
    settings: dict[str, Any] = {"workers": 2, "exact": True, "micro": 4, "feed": "slice"}
    calm = run(scheme, rule, **settings)
    struck = run(scheme, rule, faults=["kill:0@step=5,back=1"], checkpoint_steps=4, **settings)
    assert struck.digest == calm.digest
    made = build.scheme_of(scheme, {"rule": rule})
    if made.methods and made.indivisible() is None:
        assert run(scheme, rule, **settings, servers=2).digest == calm.digest
