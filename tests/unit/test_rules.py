"""The rules are torch.optim's: the same bits, with the memory in named cells."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from paceline.errors import UnknownName, UsageError
from paceline.rules import SGD, Adagrad, Adam, AdamW, Momentum, Nesterov, RMSprop, Rule, rules
from paceline.state import State

CASES: list[tuple[Rule, type[torch.optim.Optimizer], dict[str, Any]]] = [
    (SGD(), torch.optim.SGD, {}),
    (SGD(weight_decay=0.1), torch.optim.SGD, {"weight_decay": 0.1}),
    (Momentum(), torch.optim.SGD, {"momentum": 0.9}),
    (Momentum(momentum=0.5, weight_decay=0.1), torch.optim.SGD, {"momentum": 0.5, "weight_decay": 0.1}),
    (Nesterov(momentum=0.8), torch.optim.SGD, {"momentum": 0.8, "nesterov": True}),
    (Nesterov(weight_decay=0.1), torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    (Adagrad(), torch.optim.Adagrad, {}),
    (Adagrad(initial_accumulator_value=0.1), torch.optim.Adagrad, {"initial_accumulator_value": 0.1}),
    (Adagrad(lr_decay=0.3, weight_decay=0.1), torch.optim.Adagrad, {"lr_decay": 0.3, "weight_decay": 0.1}),
    (RMSprop(), torch.optim.RMSprop, {}),
    (
        RMSprop(alpha=0.9, momentum=0.5, weight_decay=0.1),
        torch.optim.RMSprop,
        {"alpha": 0.9, "momentum": 0.5, "weight_decay": 0.1},
    ),
    (Adam(), torch.optim.Adam, {}),
    (Adam(beta1=0.5, beta2=0.9, eps=1e-3), torch.optim.Adam, {"betas": (0.5, 0.9), "eps": 1e-3}),
    (Adam(weight_decay=0.1), torch.optim.Adam, {"weight_decay": 0.1}),
    (AdamW(), torch.optim.AdamW, {}),
    (AdamW(weight_decay=0.5), torch.optim.AdamW, {"weight_decay": 0.5}),
]


def gradients(number: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(17, generator=generator, dtype=dtype) for _ in range(number)]


def start(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.linspace(-2, 2, 17, dtype=dtype)


def test_every_rule_has_a_case() -> None:
    """Those that run an optimizer of torch itself have theirs in test_optimizers.py."""
    assert {type(rule) for rule, _, _ in CASES} == {rule for rule in rules().values() if rule.prepared}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("rule", "optimizer", "options"), CASES)
def test_the_same_bits_as_torch(rule: Rule, optimizer: Any, options: dict[str, Any], dtype: torch.dtype) -> None:
    state = State(x=start(dtype), **rule.cells(start(dtype)))
    parameter = torch.nn.Parameter(start(dtype))
    theirs = optimizer([parameter], lr=0.05, foreach=False, **options)
    for g in gradients(7, dtype):
        kept = g.clone()
        rule.apply(state, g, 0.05)
        assert torch.equal(g, kept)  # a gradient crosses by value
        parameter.grad = g.clone()
        theirs.step()
        assert torch.equal(state.x, parameter.detach())
    assert not torch.equal(state.x, start(dtype))


@pytest.mark.parametrize(("rule", "optimizer", "options"), CASES)
def test_the_memory_is_all_in_the_cells(rule: Rule, optimizer: Any, options: dict[str, Any]) -> None:
    """Restored cells in a fresh state go on with the same bits: nothing is remembered anywhere else."""
    first = State(x=start(), **rule.cells(start()))
    for g in gradients(3):
        rule.apply(first, g, 0.05)
    second = State(x=start(), **rule.cells(start()))
    second.restore(first.saved())
    for g in gradients(6)[3:]:
        rule.apply(first, g, 0.05)
        rule.apply(second, g, 0.05)
    assert torch.equal(first.x, second.x)
    assert all(name.startswith(f"{rule.name}_") for name in rule.cells(start()))


def test_a_rule_may_have_a_rate_of_its_own() -> None:
    ours, own = State(x=start()), State(x=start())
    (g,) = gradients(1)
    SGD().apply(ours, g, 0.5)
    SGD(lr=0.5).apply(own, g, 99.0)
    assert torch.equal(ours.x, own.x)


def test_another_cell_than_x() -> None:
    state = State(x=start(), z=start())
    (g,) = gradients(1)
    SGD().apply(state, g, 0.5, at="z")
    assert torch.equal(state.x, start())
    assert torch.equal(state.z, start() - 0.5 * g)


def test_nothing_is_recorded_for_autograd() -> None:
    state = State(x=start(), **Adam().cells(start()))
    with torch.enable_grad():
        Adam().apply(state, gradients(1)[0].requires_grad_(), 0.1)
    assert not state.x.requires_grad


def test_a_window_of_sgd_is_the_sum_of_the_raw_gradients() -> None:
    state = State(x=start())
    window = SGD().window(state, 0.1)
    assert window.sum.tolist() == [0.0] * 17
    gs = gradients(3)
    window.step(gs[0])
    assert torch.equal(window.sum, gs[0])
    window.step(gs[1])
    window.step(gs[2])
    assert torch.equal(window.sum, (gs[0] + gs[1]) + gs[2])
    expected = start()
    for g in gs:
        expected = expected - 0.1 * g
    assert torch.allclose(state.x, expected)


def test_a_windows_sum_keeps_no_hold_of_the_gradient() -> None:
    state = State(x=start())
    window = SGD().window(state, 0.1)
    (g,) = gradients(1)
    window.step(g)
    g += 1
    assert not torch.equal(window.sum, g)


@pytest.mark.parametrize("rule", [Adam(), Momentum(), SGD(weight_decay=0.1), Adam(lr=0.3)])
def test_a_window_of_another_rule_is_its_way_in_units_of_the_rate(rule: Rule) -> None:
    state = State(x=start(), **rule.cells(start()))
    window = rule.window(state, 0.1)
    for g in gradients(4):
        window.step(g)
    rate = 0.1 if rule.lr is None else rule.lr
    assert torch.equal(window.sum, (start() - state.x) / rate)
    assert torch.allclose(start() - rate * window.sum, state.x, atol=1e-6)


def test_a_window_at_rate_0_moves_nothing() -> None:
    state = State(x=start(), **Adam().cells(start()))
    window = Adam().window(state, 0.0)
    window.step(gradients(1)[0])
    assert window.sum.tolist() == [0.0] * 17


def test_rules_by_name() -> None:
    assert Rule.from_name("adam") == Adam()
    names = {name.lower() for name in dir(torch.optim) if isinstance(getattr(torch.optim, name), type)}
    assert set(rules()) == (names - {"optimizer", "lbfgs", "sparseadam"}) | {"momentum", "nesterov"}
    with pytest.raises(UnknownName, match=r"no rule 'adm'; did you mean 'adam'\?"):
        Rule.from_name("adm")
    with pytest.raises(UsageError, match="no rule 'zzzz'; there are: adadelta, adafactor, adagrad, adam, "):
        Rule.from_name("zzzz")


@pytest.mark.parametrize(
    ("rule", "wrong"),
    [
        (SGD, {"lr": -1.0}),
        (SGD, {"weight_decay": -0.1}),
        (Momentum, {"momentum": 1.1}),
        (Adam, {"beta1": -0.1}),
        (Adam, {"beta2": 1.5}),
        (Adam, {"eps": 0.0}),
        (RMSprop, {"alpha": 2.0}),
        (Adagrad, {"initial_accumulator_value": -1.0}),
        (Adagrad, {"lr": math.nan}),
    ],
)
def test_values_of_a_rule_are_bounded(rule: type[Rule], wrong: dict[str, float]) -> None:
    (name,) = wrong
    with pytest.raises(UsageError, match=f"{rule.name}: {name} must be "):
        rule(**wrong)
