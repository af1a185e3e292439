"""The scheduler: one call at a time, guards asked as seldom as possible, everything by value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from paceline.errors import SchemeError
from paceline.runtime.call_scheduler import CallScheduler
from paceline.scheme import Scheme, State, Vector, on_server

asked: list[Any] = []  # every evaluation of a guard


def noted(answer: bool, what: Any) -> bool:
    asked.append(what)
    return answer


@dataclass(frozen=True)
class Sample(Scheme, name="sample"):
    def server(self, x0: Vector, workers: int) -> State:
        return State(x=x0, level=0, gate=0, tokens=0, other=0, log=torch.full((16,), -1), got=0)

    @on_server(when=lambda self, s, r: noted(s.level >= r, r))
    def wait(self, s: State, r: int) -> int:
        return self._note(s, r)

    @on_server(when=lambda self, s, who: s.tokens > 0)
    def take(self, s: State, who: int) -> int:
        s.tokens -= 1
        return self._note(s, who)

    @on_server(when=lambda self, s: s.level > 0 and s.gate > 0)
    def both(self, s: State) -> str:
        return "both"

    @on_server(when=lambda self, s, v: noted(bool(s.x[0] >= v[0]), "x"))
    def reach(self, s: State, v: Vector) -> Vector:
        x: Vector = s.x
        return x

    @on_server
    def put(self, s: State, cell: str, value: int) -> None:
        setattr(s, cell, value)

    @on_server
    def push(self, s: State, g: Vector) -> None:
        s.x -= g
        s.v += 1

    @on_server
    def pull(self, s: State) -> tuple[Vector, tuple[Vector, int]]:
        return s.x, (s.x[1:], s.v)

    @on_server
    def echo(self, s: State, g: Vector, more: tuple[Vector, ...] = ()) -> tuple[Vector, Vector]:
        return g, (more[0] if more else g[:1])

    @on_server
    def forgetful(self, s: State, g: Vector) -> None:
        s.x -= g

    @on_server
    def boastful(self, s: State) -> None:
        s.v += 1

    @on_server
    def double(self, s: State, g: Vector) -> None:
        s.x -= g
        s.v += 2

    @on_server
    def spoil(self, s: State, a: int, g: Any) -> None:
        (g[0] if isinstance(g, tuple) else g).mul_(2)

    @on_server
    def give(self, s: State, what: str) -> Any:
        return {"list": [1], "dict": {}, "scheme": self, "nested": (1, ([],))}[what]

    @on_server(when=lambda self, s: setattr(s, "level", 3) is None)
    def writes(self, s: State) -> None: ...

    @on_server(when=lambda self, s: bool(s.log.fill_(7)[0]))
    def writes_in_place(self, s: State) -> None: ...

    @on_server(atomic=False)
    def add(self, s: State, g: Vector, level: int) -> Vector:
        s.x += g
        s.level = level
        s.v += 1
        x: Vector = s.x
        return x

    def left(self, s: State, rank: int) -> None:
        s.level += 1

    def joined(self, s: State, rank: int) -> None:
        s.gate += 1

    @staticmethod
    def _note(s: State, what: int) -> int:
        s.log[s.got] = what
        s.got += 1
        return what


scheme = Sample()


@pytest.fixture
def scheduler() -> CallScheduler:
    asked.clear()
    return CallScheduler(scheme, scheme.server(torch.zeros(4), 4), 4)


def log(scheduler: CallScheduler) -> list[int]:
    kept: list[int] = scheduler.state.log[: scheduler.state.got].tolist()
    return kept


def who(answers: Any) -> list[int]:
    return [answer.rank for answer in answers]


def test_a_call_without_a_guard_is_performed_at_once(scheduler: CallScheduler) -> None:
    (answer,) = scheduler.submit(2, scheme.push(torch.ones(4)), ticket="mine")
    assert answer == (2, "mine", None)
    assert scheduler.state.x.tolist() == [-1.0] * 4
    assert (scheduler.state.v, scheduler.calls) == (1, 1)


def test_waiting_calls_are_performed_in_the_order_of_arrival(scheduler: CallScheduler) -> None:
    for rank, level in ((3, 2), (1, 1), (0, 2), (2, 1)):
        assert scheduler.submit(rank, scheme.wait(level), ticket=rank) == []
    assert who(scheduler.submit(0, scheme.put("level", 2))) == [0, 3, 1, 0, 2]
    assert log(scheduler) == [2, 1, 2, 1]


def test_a_guard_can_close_again_between_two_calls(scheduler: CallScheduler) -> None:
    for rank in range(4):
        scheduler.submit(rank, scheme.take(rank))
    assert who(scheduler.submit(0, scheme.put("tokens", 2))) == [0, 0, 1]
    assert log(scheduler) == [0, 1]
    assert who(scheduler.submit(0, scheme.put("tokens", 1))) == [0, 2]
    assert log(scheduler) == [0, 1, 2]
    assert scheduler.waits(3) is not None
    assert scheduler.waits(2) is None


def test_a_guard_that_reads_further_cells_later(scheduler: CallScheduler) -> None:
    """`a and b` reads b only once a is true: from then on both are watched."""
    assert scheduler.submit(1, scheme.both()) == []
    assert who(scheduler.submit(0, scheme.put("level", 1))) == [0]
    assert who(scheduler.submit(0, scheme.put("gate", 1))) == [0, 1]


def test_a_guard_is_asked_again_only_when_a_cell_that_it_read_has_changed(scheduler: CallScheduler) -> None:
    scheduler.submit(1, scheme.wait(5))
    assert asked == [5]
    for _ in range(10):
        scheduler.submit(0, scheme.put("other", 1))
        scheduler.submit(0, scheme.push(torch.ones(4)))
    assert asked == [5]
    scheduler.submit(0, scheme.put("level", 1))
    scheduler.submit(0, scheme.put("level", 2))
    assert asked == [5] * 3
    assert who(scheduler.submit(0, scheme.put("level", 5))) == [0, 1]
    assert len(asked) == 4
    scheduler.submit(0, scheme.put("level", 0))  # nobody waits any more: nobody is asked
    assert len(asked) == 4


def test_guards_over_tensors_are_asked_when_the_tensor_changes(scheduler: CallScheduler) -> None:
    scheduler.submit(1, scheme.reach(torch.full((4,), 2.0)))
    scheduler.submit(2, scheme.reach(torch.full((4,), 1.0)))
    assert len(asked) == 2
    scheduler.submit(0, scheme.put("level", 1))
    assert len(asked) == 2
    assert who(scheduler.submit(0, scheme.push(torch.full((4,), -1.0)))) == [0, 2]
    assert who(scheduler.submit(0, scheme.push(torch.full((4,), -1.0)))) == [0, 1]


def test_equal_arguments_share_one_evaluation(scheduler: CallScheduler) -> None:
    """A thousand waiting callers cost what one does."""
    for rank in range(1000):
        assert scheduler.submit(rank % 4, scheme.wait(3), ticket=rank) == []
    assert asked == [3]
    for level in (1, 2):
        scheduler.submit(0, scheme.put("level", level))
    assert asked == [3] * 3
    scheduler.state.log = -1
    scheduler.state.restore(
        {**scheduler.state.saved()}
    )  # a restore writes every cell: asked once more, not a thousand times
    scheduler.submit(0, scheme.put("other", 1))
    assert len(asked) == 4


def test_a_thousand_are_released_by_one_change() -> None:
    @dataclass(frozen=True)
    class Barrier(Scheme, name="barrier"):
        @on_server(when=lambda self, s, r: noted(s.v >= r, r))
        def pull(self, s: State, r: int) -> Vector:
            x: Vector = s.x
            return x

        @on_server
        def push(self, s: State, g: Vector) -> None:
            s.x -= g
            s.v += 1

    asked.clear()
    barrier = Barrier()
    scheduler = CallScheduler(barrier, barrier.server(torch.zeros(2), 1000), 1000)
    for rank in range(1000):
        scheduler.submit(rank, barrier.pull(1))
    answers = scheduler.submit(0, barrier.push(torch.ones(2)))
    assert who(answers) == [0, *range(1000)]
    assert len(asked) == 2


@pytest.mark.parametrize("method", ["writes", "writes_in_place"])
def test_a_guard_that_writes_is_refused(scheduler: CallScheduler, method: str) -> None:
    with pytest.raises(SchemeError, match="guards must be pure"):
        scheduler.submit(0, getattr(scheme, method)())


def test_results_cross_by_value(scheduler: CallScheduler) -> None:
    ((_, _, (x, (part, v))),) = scheduler.submit(0, scheme.pull())
    x += 5
    part += 7
    assert scheduler.state.x.tolist() == [0.0] * 4
    assert v == 0
    scheduler.submit(0, scheme.push(torch.ones(4)))
    assert x.tolist() == [5.0] * 4


def test_what_comes_back_of_an_argument_is_a_copy(scheduler: CallScheduler) -> None:
    g, other = torch.zeros(4), torch.zeros(2)
    ((_, _, (same, first)),) = scheduler.submit(0, scheme.echo(g))
    ((_, _, (_, nested)),) = scheduler.submit(0, scheme.echo(g, (other,)))
    g += 1
    other += 1
    assert same.tolist() == [0.0] * 4
    assert first.tolist() == [0.0]
    assert nested.tolist() == [0.0] * 2


def test_what_is_kept_of_an_argument_is_a_copy(scheduler: CallScheduler) -> None:
    g = torch.ones(4)
    scheduler.submit(0, scheme.push(g))
    g += 5
    assert scheduler.state.x.tolist() == [-1.0] * 4


@pytest.mark.parametrize("nested", [False, True])
def test_an_argument_changed_in_place_is_refused(scheduler: CallScheduler, nested: bool) -> None:
    g = torch.ones(4)
    with pytest.raises(SchemeError, match=r"spoil\(\) changed its argument 'g' in place; .* 'g = g \* …'"):
        scheduler.submit(0, scheme.spoil(1, (g, 3) if nested else g))


def test_x_and_its_version_change_together(scheduler: CallScheduler) -> None:
    with pytest.raises(SchemeError, match=r"forgetful\(\) changed x and raised s.v by 0; .* put 's.v \+= 1'"):
        scheduler.submit(0, scheme.forgetful(torch.ones(4)))
    with pytest.raises(SchemeError, match=r"boastful\(\) did not change x and raised s.v by 1"):
        scheduler.submit(0, scheme.boastful())
    with pytest.raises(SchemeError, match=r"double\(\) changed x and raised s.v by 2"):
        scheduler.submit(0, scheme.double(torch.ones(4)))


def test_only_plain_things_cross(scheduler: CallScheduler) -> None:
    for arg, kind in (([1], "list"), ({}, "dict"), ((1, ({},)), "dict"), (b"", "bytes"), (object(), "object")):
        with pytest.raises(SchemeError, match=rf"spoil\(\): a {kind} cannot cross between processes"):
            scheduler.submit(0, scheme.spoil(1, arg))
    for what, kind in (("list", "list"), ("dict", "dict"), ("scheme", "Sample"), ("nested", "list")):
        with pytest.raises(SchemeError, match=rf"give\(\): a {kind} cannot cross"):
            scheduler.submit(0, scheme.give(what))


def test_who_leaves_waits_no_longer(scheduler: CallScheduler) -> None:
    scheduler.submit(1, scheme.take(1))
    scheduler.submit(2, scheme.take(2))
    scheduler.submit(1, scheme.wait(9))
    scheduler.left(1)
    assert scheduler.waits(1) is None
    assert who(scheduler.submit(0, scheme.put("tokens", 2))) == [0, 2]
    assert log(scheduler) == [2]
    assert scheduler.state.tokens == 1
    assert who(scheduler.submit(0, scheme.put("level", 9))) == [0]


def test_leaving_and_coming_may_release_others(scheduler: CallScheduler) -> None:
    scheduler.submit(1, scheme.wait(1))
    scheduler.submit(2, scheme.both())
    assert who(scheduler.left(3)) == [1]
    assert who(scheduler.joined(3)) == [2]
    assert scheduler.left(3, quorum=False) == []
    assert (scheduler.state.level, scheduler.state.gate) == (1, 1)


def test_who_left_and_came_back_may_wait_again(scheduler: CallScheduler) -> None:
    scheduler.submit(1, scheme.wait(5), ticket="old")
    scheduler.left(1, quorum=False)
    scheduler.submit(1, scheme.wait(5), ticket="new")
    answers = scheduler.submit(0, scheme.put("level", 5))
    assert [answer.ticket for answer in answers] == [None, "new"]


def test_leaving_is_held_to_the_law_of_x_too() -> None:
    @dataclass(frozen=True)
    class Wrong(Scheme, name="wrong"):
        @on_server
        def pull(self, s: State) -> None: ...

        def left(self, s: State, rank: int) -> None:
            s.x += 1

    scheduler = CallScheduler(Wrong(), Wrong().server(torch.zeros(2), 2), 2)
    with pytest.raises(SchemeError, match=r"left\(\) changed x and raised s.v by 0"):
        scheduler.left(1)


def test_why_a_call_waits(scheduler: CallScheduler) -> None:
    scheduler.submit(1, scheme.take(4))
    call = scheduler.waits(1)
    assert call is not None
    assert scheduler.explain(call) == "take(who=4): guard 's.tokens > 0' is false with tokens = 0"
    scheduler.submit(2, scheme.both())
    both = scheduler.waits(2)
    assert both is not None
    assert scheduler.explain(both) == "both(): guard 's.level > 0 and s.gate > 0' is false with level = 0"


def test_the_pieces_of_a_call_that_is_not_atomic(scheduler: CallScheduler) -> None:
    g = torch.arange(4.0)
    first, _ = scheduler.perform_part(1, scheme.add(g, 3), (0, 2, 4))
    assert first.tolist() == [0.0, 1.0]
    assert scheduler.state.x.tolist() == [0.0, 1.0, 0.0, 0.0]
    assert (scheduler.state.level, scheduler.state.v, scheduler.calls) == (0, 0, 0)
    second, _ = scheduler.perform_part(1, scheme.add(g, 3), (2, 4, 4))
    assert second.tolist() == [2.0, 3.0]
    assert (scheduler.state.x.tolist(), scheduler.state.level, scheduler.state.v, scheduler.calls) == (
        g.tolist(),
        3,
        1,
        1,
    )
    second += 100
    assert scheduler.state.x.tolist() == g.tolist()


def test_the_last_piece_wakes_who_waited_for_it(scheduler: CallScheduler) -> None:
    scheduler.submit(2, scheme.wait(3))
    assert scheduler.perform_part(1, scheme.add(torch.ones(4), 3), (0, 2, 4))[1] == []
    assert who(scheduler.perform_part(1, scheme.add(torch.ones(4), 3), (2, 4, 4))[1]) == [2]


def test_the_ledger_follows_who_holds_which_version(scheduler: CallScheduler) -> None:
    for _ in range(3):
        scheduler.submit(0, scheme.push(torch.ones(4)))
    assert scheduler.ledger.outstanding(3) == 4 * 3  # all began with version 0
    scheduler.submit(1, scheme.pull())
    assert scheduler.ledger.outstanding(3) == 3 * 3
    scheduler.left(2)
    assert scheduler.ledger.outstanding(3) == 2 * 3
