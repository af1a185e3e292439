"""Rules under schemes in the simulator, and what must hold of each pair."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from paceline import Result, TorchTask, simulate
from paceline.config import build, discovery
from paceline.rules import Rule, rules

STEPS = 12
RATES = {"adadelta": 1.0, "rprop": 0.001, "sgd": 0.1, "asgd": 0.1, "adagrad": 0.05}
OUTER_RATES = {"sgd": 0.5, "momentum": 0.1, "nesterov": 0.1} | {key: RATES[key] for key in ("adadelta", "rprop")}
EXACT = ("sync", "sagn", "allreduce", "averaging", "easgd")
FEW = ("hogwild", "aeamsgd", "sync-rates", "gap-aware", "rescaled")  # take a few rules only
QUICK = (  # with one rule in `make test`; every other scheme in `make test-long`
    *("sync", "async", "groups", "sync-repeat", "agn", "adag", "dynsgd", "downpour", "downpour-easy", "sagn", "aeasgd"),
    *("allreduce", "averaging", "easgd", "sgd"),
)
ONE = "nadam"  # an optimizer of torch itself: the rule that every scheme is run with outside of the matrix


def sides(scheme: str) -> list[str]:
    """The hyper-parameters of a scheme that are update rules: the workers', the server's, the outer one."""
    made = build.scheme_of(scheme, {})
    return [name for name, value in vars(made).items() if isinstance(value, Rule)]


def with_side(side: str) -> list[str]:
    """Every scheme found that has a rule on this side, and takes any rule there."""
    return [scheme for scheme in sorted(discovery.schemes()) if side in sides(scheme) and scheme not in FEW]


def in_make_test(scheme: str, rule: str) -> bool:
    """Every rule in one scheme, and one rule in a few schemes."""
    return scheme == "sync" or (scheme in QUICK and rule == ONE)


def pairs(schemes: Iterable[str], *, quick: bool) -> list[tuple[str, str]]:
    """Schemes with every rule: the pairs of `make test`, or those of the matrix."""
    found = [(scheme, rule) for scheme in schemes for rule in sorted(rules())]
    if quick:
        return [pair for pair in found if in_make_test(*pair)]
    return [(scheme, rule) for scheme, rule in found if scheme != "sync" and rule != ONE]


@functools.cache
def task() -> TorchTask:
    """Without biases: Muon takes matrices only."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(64, 6, generator=generator)
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 5, bias=False), nn.Tanh(), nn.Linear(5, 2, bias=False))
    given = (inputs, (inputs[:, 0] > 0).long())
    return TorchTask(module, nn.CrossEntropyLoss(), train=given, batch=8, name="small")


def run(scheme: str, rule: str, side: str = "rule", **more: Any) -> Result:
    settings: dict[str, Any] = {"workers": 1 if scheme == "sgd" else 3, "steps": STEPS, "compute": "exponential:1.0"}
    settings |= {side: rule, "warn": lambda _: None}
    if side == "rule":
        settings["lr"] = RATES.get(rule, 0.02)
    elif side == "outer":
        settings |= {"lr": 0.05, "outer_lr": OUTER_RATES.get(rule, 0.02)}
    else:
        settings |= {"lr": 0.05, f"{side}.lr": OUTER_RATES.get(rule, 0.02)}
    return simulate(task(), scheme, **settings | more)


def trains_and_repeats_after_deaths(scheme: str, rule: str, side: str = "rule") -> None:
    assert run(scheme, rule, side, steps=40).loss < task().evaluate(task().start(0))["loss"]
    faults = ["kill:0@step=3,back=1"]
    served = bool(build.scheme_of(scheme, {}).methods)
    if served:
        faults.append("kill:server:0@call=9,back=1")  # inside a call: all return to a checkpoint
    struck = run(scheme, rule, side, faults=faults, checkpoint_steps=4)
    assert struck.updates == STEPS
    assert math.isfinite(struck.loss)
    assert struck.digest == run(scheme, rule, side, faults=faults, checkpoint_steps=4).digest


def a_death_changes_no_bit_of_an_exact_run(scheme: str, rule: str) -> None:
    settings: dict[str, Any] = {"workers": 2, "exact": True, "micro": 4, "feed": "slice"}
    calm = run(scheme, rule, **settings)
    struck = run(scheme, rule, faults=["kill:0@step=5,back=1"], checkpoint_steps=4, **settings)
    assert struck.digest == calm.digest
    made = build.scheme_of(scheme, {"rule": rule})
    if made.methods and made.indivisible() is None:
        assert run(scheme, rule, **settings, servers=2).digest == calm.digest
