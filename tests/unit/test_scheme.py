"""What a scheme class may look like, and what calling a server method makes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.errors import SchemeError, UsageError
from paceline.fields import Bound, Count, Fraction, Rate
from paceline.ops import Call
from paceline.rules import SGD, Adam, Momentum, Rule
from paceline.scheme import Scheme, State, Vector, fields, on_server
from paceline.worker import Worker


@dataclass(frozen=True)
class Sample(Scheme, name="sample"):
    lr: Rate = 0.1
    rule: Rule = SGD()
    need: Count | None = None
    share: Fraction = 0.5
    rates: tuple[Rate, ...] = ()

    @on_server
    def push(self, s: State, g: Vector, v: int, rank: int = 7) -> None:
        """Takes a gradient."""

    @on_server(when=lambda self, s, r: s.v >= r and not s.closed)
    def pull(self, s: State, r: int) -> Vector:
        x: Vector = s.x
        return x


def test_a_server_method_that_is_async_is_refused() -> None:
    async def pull(self: Any, s: State) -> None: ...

    with pytest.raises(SchemeError, match=r"pull is 'async def' under @on_server; .* plain 'def' .* when="):
        on_server(pull)
    with pytest.raises(SchemeError, match="'async def' under @on_server"):
        on_server(when=lambda self, s: True)(pull)

    async def pulls(self: Any, s: State) -> Any:
        yield 1

    with pytest.raises(SchemeError, match="'async def' under @on_server"):
        on_server(pulls)


def test_only_plain_methods_go_to_the_server() -> None:
    with pytest.raises(SchemeError, match="takes a plain method"):
        on_server(property(lambda self: 1))  # type: ignore[call-overload]


def test_a_guarded_method_is_atomic() -> None:
    def add(self: Any, s: State) -> None: ...

    with pytest.raises(SchemeError, match=r"add: a guarded method is atomic; drop when= or atomic=False"):
        on_server(when=lambda self, s: True, atomic=False)(add)
    with pytest.raises(SchemeError, match=r"add: reads=True is atomic; drop it or atomic=False"):
        on_server(reads=True, atomic=False)(add)


def test_keyword_only_arguments_are_refused() -> None:
    def push(self: Any, s: State, *, v: int) -> None: ...

    with pytest.raises(SchemeError, match="'v' is a keyword only"):
        on_server(push)


def test_an_augmented_await_is_refused_with_its_line() -> None:
    with pytest.raises(SchemeError) as caught:

        @dataclass(frozen=True)
        class Wrong(Scheme):
            async def step(self, w: Worker) -> None:
                w.x -= await w.grad()  # THE LINE

    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    here = 1 + next(n for n, line in enumerate(lines) if line.endswith("# THE LINE"))
    text = str(caught.value)
    assert f"Wrong.step, line {here}: 'w.x -= await w.grad()' reads w.x before the wait" in text
    assert "write 'd = await …' first" in text


def test_an_augmented_await_is_refused_in_every_coroutine() -> None:
    with pytest.raises(SchemeError, match=r"Wrong\.helper, line \d+: 'total \+= 2 \* await w.grad\(\)'"):

        @dataclass(frozen=True)
        class Wrong(Scheme):
            async def helper(self, w: Worker) -> Vector:
                total = torch.zeros(1)
                for _ in range(3):
                    total += 2 * await w.grad()
                return total


def test_an_await_of_its_own_is_fine() -> None:
    @dataclass(frozen=True)
    class Right(Scheme):
        async def step(self, w: Worker) -> None:
            g = await w.grad()
            w.x -= g

    assert Right().methods == {}


def test_a_scheme_must_be_a_frozen_dataclass() -> None:
    class Plain(Scheme): ...

    @dataclass
    class Thawed(Scheme):
        lr: Rate = 0.1

    @dataclass(frozen=True)
    class Parent(Scheme):
        lr: Rate = 0.1

    class Child(Parent):
        other: Rate = 0.1

    for wrong in (Plain, Thawed, Child):
        with pytest.raises(SchemeError, match=r"must be a frozen dataclass: put @dataclass\(frozen=True\) above it"):
            fields(wrong)
        with pytest.raises(SchemeError, match="frozen dataclass"):
            wrong().__post_init__()
    assert [field.name for field, _ in fields(Parent)] == ["lr"]


def test_a_name_is_given_or_the_files() -> None:
    @dataclass(frozen=True)
    class Unnamed(Scheme): ...

    assert Sample.name == "sample"
    assert Unnamed.name == "test-scheme"  # this file's


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"lr": -0.1}, "sample: lr must be at least 0, not -0.1"),
        ({"lr": math.nan}, "sample: lr must be at least 0, not nan"),
        ({"need": 0}, "sample: need must be at least 1, not 0"),
        ({"share": 1.5}, "sample: share must be from 0 to 1, not 1.5"),
        ({"rates": (0.1, -1.0)}, "sample: rates must be at least 0, not -1"),
        ({"rule": "adm"}, "no rule 'adm'; did you mean 'adam'?"),
    ],
)
def test_values_are_held_to_their_bounds(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        Sample(**wrong)
    assert str(caught.value) == message


def test_bounds_include_their_ends() -> None:
    assert Sample(lr=0, need=1, share=1.0, rates=(0.0,)).need == 1
    assert (str(Bound(1)), str(Bound(0, 1))) == ("at least 1", "from 0 to 1")


def test_a_number_without_a_bound_may_not_be_nan() -> None:
    @dataclass(frozen=True)
    class Loose(Scheme, name="loose"):
        shift: float = 0.0

    assert Loose(-3.0).shift == -3.0
    with pytest.raises(UsageError, match="loose: shift must be a number, not nan"):
        Loose(math.nan)


def test_a_rule_may_be_given_by_its_name() -> None:
    assert Sample(rule="adam").rule == Adam()  # type: ignore[arg-type]
    assert Sample(rule=Momentum(momentum=0.5)).rule == Momentum(momentum=0.5)


def test_a_call_is_data() -> None:
    g = torch.zeros(3)
    call = Sample().push(g, 4, 2)
    assert isinstance(call, Call)
    assert call.method is Sample.push
    assert call.args == (g, 4, 2)
    assert str(call) == "push(g=<3 numbers>, v=4, rank=2)"
    assert Sample.push.__doc__ == "Takes a gradient."


def test_keywords_and_defaults_become_positions() -> None:
    g = torch.zeros(3)
    assert Sample().push(g, v=4).args == (g, 4, 7)
    assert Sample().push(rank=1, v=4, g=g).args == (g, 4, 1)
    with pytest.raises(TypeError, match="missing a required argument: 'v'"):
        Sample().push(g)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="unexpected keyword argument 'version'"):
        Sample().push(g, 4, version=3)  # type: ignore[call-arg]


def test_the_guards_text_is_that_of_the_source() -> None:
    assert Sample.pull.guard_text() == "s.v >= r and (not s.closed)"
    assert Sample.push.guard_text() == "no guard"

    def ready(self: Any, s: State) -> bool:
        return True

    class Named:
        @on_server(when=ready)
        def pull(self, s: State) -> None: ...

    assert Named.pull.guard_text() == "ready"


def test_methods_are_inherited_and_overridden() -> None:
    @dataclass(frozen=True)
    class Child(Sample, name="child"):
        @on_server
        def push(self, s: State, g: Vector) -> None: ...

    assert set(Child.methods) == {"push", "pull"}
    assert Child.methods["push"] is not Sample.methods["push"]
    assert Child.methods["pull"] is Sample.methods["pull"]


def test_defaults_of_a_scheme() -> None:
    @dataclass(frozen=True)
    class Bare(Scheme): ...

    x0 = torch.arange(3.0)
    bare = Bare()
    assert bare.server(x0, 2).x.tolist() == bare.worker(x0, 2).x.tolist() == [0.0, 1.0, 2.0]
    assert bare.model(bare.server(x0, 2)).tolist() == [0.0, 1.0, 2.0]
    assert bare.holder(5) == 5
    assert list(bare.warnings(4, 1.0)) == []


@pytest.mark.parametrize("name", ["t", "rank", "mean", "grad", "loss", "rng"])
def test_a_workers_cell_may_not_hide_the_workers_own(name: str) -> None:
    state = State(x=torch.zeros(2), **{name: 0})
    with pytest.raises(SchemeError, match=f"a worker's cell cannot be called '{name}'"):
        Worker(0, 1, state)


def test_the_worker_passes_cells_through() -> None:
    w = Worker(1, 3, State(x=torch.zeros(2), n=0), seed=5)
    w.n += 2
    w.x += 1
    w.t = 9
    assert (w.state.n, w.state.x.tolist(), w.t) == (2, [1.0, 1.0], 9)
    assert w.grad().x is w.x
    assert w.mean(w.x, among=range(2)).among == (0, 1)
    with pytest.raises(SchemeError, match="no cell 'm'"):
        w.m = 3
    draws = [torch.rand(1, generator=Worker(rank, 3, State(x=torch.zeros(1)), seed=5).rng).item() for rank in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]
