"""Every optimizer of torch.optim as a rule: the bits of a plain loop, with all of its state in cells."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import paceline
from paceline import TorchTask
from paceline.config import build
from paceline.errors import UnknownName, UsageError
from paceline.rules import OptimizerRule, Rule, optimizers, rules
from paceline.rules.optimizers import ParameterGroup
from paceline.state import State

# every class of torch.optim -> words of the command line, and the same for torch; None: the reason why not
TABLE: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]] = {
    "SGD": [
        ({"rule": "sgd"}, {}),
        ({"rule": "momentum", "rule.momentum": "0.8"}, {"momentum": 0.8}),
        ({"rule": "nesterov"}, {"momentum": 0.9, "nesterov": True}),
        (
            {"rule": "torch.optim:SGD", "rule.momentum": "0.9", "rule.dampening": "0.3"},
            {"momentum": 0.9, "dampening": 0.3},
        ),
    ],
    "Adagrad": [
        ({"rule": "adagrad"}, {}),
        ({"rule": "torch.optim:Adagrad", "rule.lr_decay": "0.1"}, {"lr_decay": 0.1}),
    ],
    "RMSprop": [
        ({"rule": "rmsprop"}, {}),
        (
            {"rule": "torch.optim:RMSprop", "rule.centered": "true", "rule.momentum": "0.5"},
            {"centered": True, "momentum": 0.5},
        ),
    ],
    "Adam": [
        ({"rule": "adam"}, {}),
        (
            {"rule": "torch.optim:Adam", "rule.amsgrad": "true", "rule.betas": "0.8,0.9"},
            {"amsgrad": True, "betas": (0.8, 0.9)},
        ),
        ({"rule": "torch.optim:Adam", "rule.fused": "true"}, {"fused": True}),
    ],
    "AdamW": [({"rule": "adamw"}, {}), ({"rule": "torch.optim:AdamW", "rule.foreach": "true"}, {"foreach": True})],
    "Adadelta": [({"rule": "adadelta", "rule.rho": "0.8"}, {"rho": 0.8})],
    "Adafactor": [({"rule": "adafactor", "rule.d": "1.5"}, {"d": 1.5})],
    "Adamax": [({"rule": "adamax", "rule.beta1": "0.8"}, {"betas": (0.8, 0.999)})],
    "ASGD": [({"rule": "asgd", "rule.t0": "3", "rule.lambd": "0.1"}, {"t0": 3.0, "lambd": 0.1})],
    "Muon": [({"rule": "muon", "rule.momentum": "0.9"}, {"momentum": 0.9})],
    "NAdam": [({"rule": "nadam", "rule.weight_decay": "0.1"}, {"weight_decay": 0.1})],
    "RAdam": [({"rule": "radam", "rule.beta2": "0.9"}, {"betas": (0.9, 0.9)})],
    "Rprop": [({"rule": "rprop"}, {})],
}
REFUSED = {"LBFGS": "closure", "SparseAdam": "dense gradients"}
CASES = [(name, words, options) for name, rows in TABLE.items() for words, options in rows]
SHARDED = [case for case in CASES if case[0] not in ("Adafactor", "Muon") and "rule.fused" not in case[1]]
LR = 0.02


def model(biases: bool = True) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4, bias=biases), nn.Tanh(), nn.Linear(4, 3, bias=biases))


def rule_of(words: dict[str, Any]) -> Rule:
    scheme: Any = build.scheme_of("allreduce", words)
    found: Rule = scheme.rule
    return found


def shapes(module: nn.Module) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(parameter.shape) for parameter in module.parameters())


def start(module: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in module.parameters()])


def gradients(size: int, number: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(size, generator=generator) for _ in range(number)]


def plain(name: str, options: dict[str, Any], number: int, biases: bool) -> list[torch.Tensor]:
    """The vectors of a plain loop after each step."""
    module = model(biases)
    optimizer = getattr(torch.optim, name)(module.parameters(), lr=LR, **options)
    vectors = []
    for g in gradients(start(module).numel(), number):
        for parameter, part in zip(module.parameters(), g.split([p.numel() for p in module.parameters()]), strict=True):
            parameter.grad = part.view_as(parameter).clone()
        optimizer.step()
        vectors.append(start(module))
    return vectors


def test_the_table_has_all_of_torch_optim() -> None:
    known = {name for name in dir(torch.optim) if isinstance(getattr(torch.optim, name), type)} - {"Optimizer"}
    assert known == set(TABLE) | set(REFUSED)
    assert {words["rule"] for _, words, _ in CASES if ":" not in words["rule"]} == set(rules())


@pytest.mark.parametrize(("name", "words", "options"), CASES)
def test_the_bits_of_a_plain_loop(name: str, words: dict[str, Any], options: dict[str, Any]) -> None:
    biases = name != "Muon"
    x = start(model(biases))
    rule = rule_of(words).fitted(shapes(model(biases)))
    state = State(x=x, **rule.cells(x))
    for g, expected in zip(gradients(x.numel(), 7), plain(name, options, 7, biases), strict=True):
        kept, version = g.clone(), state.x._version
        rule.apply(state, g, LR)
        assert torch.equal(g, kept)
        assert state.x._version > version
        assert torch.equal(state.x, expected)


@pytest.mark.parametrize(("name", "words", "options"), CASES)
def test_all_of_the_state_is_in_the_cells(name: str, words: dict[str, Any], options: dict[str, Any]) -> None:
    biases = name != "Muon"
    x = start(model(biases))
    rule = rule_of(words).fitted(shapes(model(biases)))
    first = State(x=x, **rule.cells(x))
    beginning = first.saved()
    gs, expected = gradients(x.numel(), 6), plain(name, options, 6, biases)
    for g in gs[:3]:
        rule.apply(first, g, LR)
    saved = first.saved()
    second = State(x=x, **rule.cells(x))
    second.restore(saved)
    for g, vector in zip(gs[3:], expected[3:], strict=True):
        rule_of(words).apply(second, g, LR)  # a rule that was never fitted: the cells know the shapes
        assert torch.equal(second.x, vector)
    first.restore(beginning)  # the run returns to its beginning, in the same process
    for g, vector in zip(gs, expected, strict=True):
        rule.apply(first, g, LR)
        assert torch.equal(first.x, vector)
    first.restore(saved)
    rule.apply(first, gs[3], LR)
    assert torch.equal(first.x, expected[3])


@pytest.mark.parametrize(("name", "words", "options"), SHARDED)
def test_a_sharded_vector_has_the_same_bits(name: str, words: dict[str, Any], options: dict[str, Any]) -> None:
    x = start(model())
    rule = rule_of(words).fitted(shapes(model()))
    assert rule.whole() is None
    whole = State(x=x, **rule.cells(x))
    edges = (0, 7, 30, x.numel())
    parts = []
    for low, high in itertools.pairwise(edges):
        cells = {n: whole.cell(n) for n in whole}
        vectors = whole.vectors()
        own = {n: cell[..., low:high] if n in vectors else cell.clone() for n, cell in cells.items()}
        parts.append((low, high, State.over(own, low)))
    for g, expected in zip(gradients(x.numel(), 5), plain(name, options, 5, True), strict=True):
        for low, high, part in parts:
            rule.apply(part, g[low:high], LR)
        assert torch.equal(whole.x, expected)
    numbers = [n for n in whole if n not in whole.vectors()]
    for name_of in numbers:  # a checkpoint has those of the first shard alone
        assert all(torch.equal(parts[0][2].cell(name_of), part.cell(name_of)) for _, _, part in parts)


@pytest.mark.parametrize(("name", "said"), REFUSED.items())
def test_optimizers_that_need_more_than_a_gradient_are_refused(name: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        OptimizerRule(path=f"torch.optim:{name}").cells(torch.zeros(4))


@pytest.mark.parametrize("rule", ["adafactor", "muon"])
def test_optimizers_of_whole_parameters_are_not_sharded(rule: str) -> None:
    with pytest.raises(UsageError, match=r"async takes one server: .* needs whole parameters, not ranges of them"):
        paceline.simulate("toy", "async", steps=3, servers=2, rule=rule)
    with pytest.raises(UsageError, match=r"cannot be sharded over 2 servers: .* needs whole parameters"):
        paceline.train("toy", "agn", steps=3, servers=2, **{"server.rule": rule})


def test_a_fused_optimizer_is_not_sharded() -> None:
    rule = rule_of({"rule": "torch.optim:Adam", "rule.fused": "true"})
    assert rule.whole() == "a fused Adam rounds the ends of a range otherwise than its middle"


def test_what_cannot_be_is_told() -> None:
    with pytest.raises(UsageError, match="the optimizer muon cannot be made: Muon only supports 2D parameters"):
        rule_of({"rule": "muon"}).cells(torch.zeros(4))
    with pytest.raises(UnknownName, match=r"no option of torch.optim:Adam 'amsgard'; did you mean 'amsgrad'"):
        rule_of({"rule": "torch.optim:Adam", "rule.amsgard": "true"})
    with pytest.raises(UsageError, match=r"'math:sqrt' is no optimizer"):
        rule_of({"rule": "math:sqrt"})
    with pytest.raises(UsageError, match="no module 'nowhere' for the optimizer"):
        rule_of({"rule": "nowhere:Lion"})
    with pytest.raises(UsageError, match="hogwild: the memory of the rule 'adadelta' begins with its first update"):
        paceline.simulate("toy", "hogwild", steps=3, rule="adadelta")
    with pytest.raises(UsageError, match="eps must be at least"):
        rule_of({"rule": "adadelta", "rule.eps": "0"})


class Counting(Optimizer):
    """An optimizer of another library: state in Python numbers, in new tensors, and in its group; changes gradients."""

    def __init__(self, params: Any, lr: float, decay: float = 0.5) -> None:
        super().__init__(params, {"lr": lr, "decay": decay, "k": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["k"] += 1
            for parameter in group["params"]:
                state = self.state[parameter]
                state["count"] = state.get("count", 0) + 1
                state["mean"] = state.get("mean", torch.zeros_like(parameter)) * group["decay"] + parameter.grad
                parameter.grad.mul_(0)
                parameter -= group["lr"] / (group["k"] + state["count"]) * state["mean"]


class Norms(Counting):
    """Scales each parameter's step by its length, as LARS does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter -= group["lr"] * parameter.norm() * parameter.grad


def test_an_optimizer_of_another_library() -> None:
    path = f"{__file__}:Counting"
    x = start(model())
    rule = rule_of({"rule": path, "rule.decay": "0.25"}).fitted(shapes(model()))
    assert rule.whole() is None
    assert rule_of({"rule": f"{__file__}:Norms"}).whole() == "Norms needs whole parameters, not ranges of them"
    module = model()
    theirs = Counting(module.parameters(), lr=LR, decay=0.25)
    state = State(x=x, **rule.cells(x))
    for number, g in enumerate(gradients(x.numel(), 6)):
        sizes = [parameter.numel() for parameter in module.parameters()]
        for parameter, part in zip(module.parameters(), g.split(sizes), strict=True):
            parameter.grad = part.view_as(parameter).clone()
        theirs.step()
        if number == 3:
            other = State(x=x, **rule.cells(x))
            other.restore(state.saved())
            state = other
        rule.apply(state, g, LR)
        assert torch.equal(state.x, start(module))
    assert build.scheme_of("async", build.hyper_of(build.scheme_of("async", {"rule": path, "rule.decay": 0.25}))) == (
        build.scheme_of("async", {"rule": path, "rule.decay": "0.25"})
    )


def test_rows_and_columns_of_a_matrix_are_kept_and_not_its_square() -> None:
    rule = rule_of({"rule": "adafactor"}).fitted(((30, 20), (20,)))
    cells = rule.cells(torch.zeros(620))
    assert (cells["adafactor_row_var"].shape, cells["adafactor_col_var"].shape) == ((30, 1), (20, 1))
    assert optimizers.shapes_in(cells["adafactor_shapes"]) == ((30, 20), (20,))


def test_groups_have_options_of_their_own() -> None:
    module, whole = model(), start(model())
    given = [
        ParameterGroup("torch.optim:Muon", (("lr", 0.1),), (0, 2)),
        ParameterGroup("torch.optim:AdamW", (("lr", 0.01), ("weight_decay", 0.5), ("betas", (0.8, 0.9))), (1,)),
        ParameterGroup("torch.optim:AdamW", (("lr", 0.02),), (3,)),
    ]
    rule = OptimizerRule(path="torch.optim:Muon", grouped=optimizers.written(given)).fitted(shapes(module))
    assert ParameterGroup.read(optimizers.written(given)) == tuple(given)
    p = list(module.parameters())
    theirs: list[Optimizer] = [
        torch.optim.Muon([p[0], p[2]], lr=0.1),
        torch.optim.AdamW(
            [{"params": [p[1]], "lr": 0.01, "weight_decay": 0.5, "betas": (0.8, 0.9)}, {"params": [p[3]], "lr": 0.02}]
        ),
    ]
    state = State(x=whole, **rule.cells(whole))
    for g in gradients(whole.numel(), 5):
        for parameter, part in zip(p, g.split([one.numel() for one in p]), strict=True):
            parameter.grad = part.view_as(parameter).clone()
        for one in theirs:
            one.step()
        rule.apply(state, g, 99.0)
        assert torch.equal(state.x, start(module))
    assert rule.whole() == "Muon needs whole parameters, not ranges of them"


def test_a_run_of_a_network_is_a_plain_loop() -> None:
    generator = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(64, 5, generator=generator), torch.randint(3, (64,), generator=generator)
    task = TorchTask(model(), nn.CrossEntropyLoss(), train=(inputs, targets), batch=16, name="small")
    for scheme, servers in (("allreduce", 1), ("sync", 2), ("async", 1)):
        run = paceline.simulate(
            task, scheme, workers=1, steps=12, servers=servers if scheme == "sync" else 1, lr=0.01, rule="nadam"
        )
        module = model()
        optimizer = torch.optim.NAdam(module.parameters(), lr=0.01)
        for batch, _ in zip(task.batches(0, 1, 0), range(12), strict=False):
            optimizer.zero_grad()
            nn.functional.cross_entropy(module(batch.data[0]), batch.data[1]).backward()
            optimizer.step()
        assert torch.equal(run.vector, start(module))
    assert math.isfinite(run.loss)


class TestSeparate:
    """Optimizers that are stepped in turns: a gradient of zeros is none."""

    GROUPS = (ParameterGroup("torch.optim:Adam", (), (0, 1)), ParameterGroup("torch.optim:Rprop", (), (2, 3)))

    def rule(self) -> Rule:
        words = {"rule": "torch.optim:Adam", "rule.grouped": optimizers.written(self.GROUPS), "rule.separate": True}
        return rule_of(words).fitted(shapes(model()))

    def gradients(self) -> list[torch.Tensor]:
        size, first = sum(math.prod(shape) for shape in shapes(model())), 24  # numbers of the first two parameters
        found = [torch.randn(size, generator=torch.Generator().manual_seed(seed)) for seed in range(12)]
        for turn, g in enumerate(found):
            (g[first:] if turn % 3 < 2 else g[:first]).zero_()  # the second optimizer begins with the third step
        return found

    def test_each_has_the_bits_of_its_own_loop_also_after_a_return(self) -> None:
        module = model()
        parameters = list(module.parameters())
        plain = [torch.optim.Adam(parameters[:2], lr=0.001), torch.optim.Rprop(parameters[2:], lr=0.01)]
        rule, start = self.rule(), torch.cat([p.detach().reshape(-1) for p in parameters])
        state = State(x=start.clone(), **rule.cells(start))
        saved: list[dict[str, Any]] = []
        for turn, g in enumerate(self.gradients()):
            for parameter, part in zip(parameters, g.split([p.numel() for p in parameters]), strict=True):
                parameter.grad = part.view(parameter.shape).clone()
            plain[turn % 3 == 2].step()
            if turn == 1:  # the second one has not begun; go on, and return
                saved.append({name: cell.clone() for name, cell in state.saved().items()})
                for later in self.gradients()[1:5]:
                    rule.apply(state, later, LR)
                state.restore(saved[0])
            rule.apply(state, g, LR)
        assert torch.equal(state.x, torch.cat([p.detach().reshape(-1) for p in parameters]))

    def test_it_needs_whole_parameters(self) -> None:
        assert "stepped in turns" in str(self.rule().whole())
