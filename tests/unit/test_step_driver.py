"""From one await to the next: what a step may await, and whose grad mode is whose."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.errors import SchemeError, UsageError
from paceline.ops import Grad, Sleep
from paceline.runtime.step_driver import StepDriver
from paceline.scheme import Scheme, State, on_server
from paceline.worker import Worker

Step = Callable[[Worker], Any]


def driver(step: Step, rank: int = 0) -> StepDriver:
    @dataclass(frozen=True)
    class Mine(Scheme, name="mine"):
        def step(self, w: Worker) -> Any:
            return step(w)

    worker = Worker(rank, 2, State(x=torch.zeros(3), done=0))
    return StepDriver(Mine(), worker)


def begun(step: Step, rank: int = 0) -> StepDriver:
    made = driver(step, rank)
    made.begin()
    return made


def line_of(mark: str) -> str:
    """`file:line` of the line of this file that ends with that remark."""
    path = Path(__file__)
    lines = path.read_text(encoding="utf-8").splitlines()
    return f"{path.name}:{1 + next(n for n, text in enumerate(lines) if text.endswith(f'# {mark}'))}"


def test_a_step_goes_from_await_to_await() -> None:
    got = []

    async def step(w: Worker) -> None:
        got.append(await w.grad(w.x + 1))
        got.append(await w.sleep(2.0))

    run = driver(step)
    assert not run.running
    run.begin()
    assert run.running
    first = run.advance(None)
    assert isinstance(first, Grad)
    assert first.x.tolist() == [1.0] * 3
    second = run.advance("a gradient")
    assert isinstance(second, Sleep)
    assert run.awaits == 2
    assert run.advance("a rest") is None
    assert got == ["a gradient", "a rest"]
    assert not run.running


@pytest.mark.parametrize("started", [False, True])
def test_a_method_of_another_scheme(started: bool) -> None:
    @dataclass(frozen=True)
    class Other(Scheme, name="other"):
        @on_server
        def pull(self, s: State) -> None: ...

    async def step(w: Worker) -> None:
        await (w.start(Other().pull()) if started else Other().pull())

    with pytest.raises(SchemeError, match=r"worker:0 called pull\(\), which is not a method of its own scheme"):
        begun(step).advance(None)


def test_grad_mode_stays_with_its_step() -> None:
    """The trap: `await` inside enable_grad or no_grad must not leak to the next worker."""
    seen: dict[str, list[bool]] = {"a": [], "b": []}

    def step_of(name: str, inside: Callable[[], Any]) -> Step:
        async def step(w: Worker) -> None:
            seen[name].append(torch.is_grad_enabled())
            with inside():
                seen[name].append(torch.is_grad_enabled())
                await w.grad()
                seen[name].append(torch.is_grad_enabled())
                await w.grad()
                seen[name].append(torch.is_grad_enabled())
            await w.grad()
            seen[name].append(torch.is_grad_enabled())

        return step

    assert torch.is_grad_enabled()
    a, b = begun(step_of("a", torch.enable_grad)), begun(step_of("b", torch.no_grad))
    for _ in range(4):
        for run in (a, b):
            run.advance(None)
            assert torch.is_grad_enabled()  # ours, as it was
    assert seen == {"a": [False, True, True, True, False], "b": [False, False, False, False, False]}


@pytest.mark.parametrize("outside", [True, False])
def test_an_abandoned_step_leaves_no_grad_mode_behind(outside: bool) -> None:
    async def step(w: Worker) -> None:
        with torch.enable_grad():
            await w.grad()

    with torch.set_grad_enabled(outside):
        run = begun(step)
        run.advance(None)
        run.close()
        assert torch.is_grad_enabled() is outside
    assert not run.running


def test_a_failing_step_leaves_no_grad_mode_behind() -> None:
    async def step(w: Worker) -> None:
        torch.set_grad_enabled(False)
        await w.grad()
        raise ValueError("oh")

    run = begun(step)
    run.advance(None)
    with pytest.raises(ValueError, match="oh"):
        run.advance(None)
    assert torch.is_grad_enabled()


def test_the_next_step_begins_without_grad() -> None:
    modes = []

    async def step(w: Worker) -> None:
        modes.append(torch.is_grad_enabled())
        torch.set_grad_enabled(True)
        await w.sleep(0)

    run = driver(step)
    for _ in range(2):
        run.begin()
        run.advance(None)
        assert run.advance(None) is None
    assert modes == [False, False]


class Yielding:
    def __await__(self) -> Generator[str, None, None]:
        yield "something"


async def foreign_int(w: Worker) -> None:
    await 5  # type: ignore[misc]  # int


async def foreign_sleep_0(w: Worker) -> None:
    await asyncio.sleep(0)  # sleep 0


async def foreign_sleep_1(w: Worker) -> None:
    await asyncio.sleep(1)  # sleep 1


async def foreign_future(w: Worker) -> None:
    loop = asyncio.new_event_loop()
    future = loop.create_future()
    loop.close()
    await future  # future


async def numbers() -> AsyncIterator[int]:
    yield 1


async def foreign_generator(w: Worker) -> None:
    await numbers()  # type: ignore[misc]  # generator


async def foreign_awaitable(w: Worker) -> None:
    await Yielding()  # awaitable


async def below(w: Worker) -> None:
    await asyncio.sleep(0)


async def foreign_below(w: Worker) -> None:
    await below(w)  # below


@pytest.mark.parametrize(
    ("step", "mark", "named"),
    [
        (foreign_int, "int", "object int can't be used in 'await' expression"),
        (foreign_sleep_0, "sleep 0", "awaited 'sleep"),
        (foreign_sleep_1, "sleep 1", "asyncio does not run here (no running event loop)"),
        (foreign_future, "future", "awaited 'Future'"),
        (foreign_generator, "generator", "object async_generator can't be used in 'await' expression"),
        (foreign_awaitable, "awaitable", "awaited 'Yielding.__await__'"),
        (foreign_below, "below", "awaited 'below -> sleep"),
    ],
)
@pytest.mark.filterwarnings("ignore:coroutine 'sleep' was never awaited")
def test_a_foreign_await_is_refused_by_name_and_line(step: Step, mark: str, named: str) -> None:
    run = begun(step, rank=1)
    with pytest.raises(SchemeError) as caught:
        run.advance(None)
    text = str(caught.value)
    assert text.startswith(f"worker:1, step 0, {line_of(mark)}: ")
    assert named in text
    assert "a step may await only w.grad, w.mean, w.meet, w.swap, w.send, w.receive, w.sleep, w.start," in text


def test_a_step_that_is_not_async_is_refused() -> None:
    def step(w: Worker) -> None: ...

    with pytest.raises(SchemeError, match=r"Mine\.step must be 'async def'"):
        begun(step)


def test_errors_in_a_step_say_where() -> None:
    async def step(w: Worker) -> None:
        await w.grad()
        raise ZeroDivisionError("oh")  # raised here

    run = begun(step, rank=1)
    run._worker.t = 12
    run.advance(None)
    with pytest.raises(ZeroDivisionError, match="oh") as caught:
        run.advance(None)
    assert caught.value.__notes__ == [f"in worker:1, step 12 at {line_of('raised here')}"]


def test_our_own_errors_in_a_step_say_where() -> None:
    async def step(w: Worker) -> None:
        await w.grad()
        raise UsageError("not like this")  # ours

    run = begun(step)
    run.advance(None)
    with pytest.raises(UsageError, match="not like this") as caught:
        run.advance(None)
    assert caught.value.__notes__ == [f"in worker:0, step 0 at {line_of('ours')}"]


def test_the_line_at_which_a_step_waits() -> None:
    async def inner(w: Worker) -> None:
        await w.sleep(1)  # innermost

    async def step(w: Worker) -> None:
        await w.grad()  # outer
        await inner(w)

    run = begun(step)
    run.advance(None)
    assert run.line() == line_of("outer")
    run.advance(None)
    assert run.line() == line_of("innermost")
    run.advance(None)
    assert run.line() == "its end"


def test_closing_runs_the_steps_own_clean_up() -> None:
    done = []

    async def step(w: Worker) -> None:
        try:
            await w.grad()
        finally:
            done.append("closed")

    run = begun(step)
    run.advance(None)
    run.close()
    run.close()
    assert done == ["closed"]
