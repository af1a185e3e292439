"""Which cells a step stores the result of an await in: as its bytecode says, and only where nothing else is done."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.ops import Mean, Op, Sleep
from paceline.runtime.stored_results import StoredResults
from paceline.scheme import State
from paceline.worker import Worker

Step = Callable[[Worker, Worker], Any]


def some() -> Op[Any]:
    return Sleep(0.0)


async def one(w: Worker, other: Worker) -> None:
    w.x = await some()


async def pair(w: Worker, other: Worker) -> None:
    w.x, w.v = await some()


async def of_several_lines(w: Worker, other: Worker) -> None:
    (
        w.v,
        w.x,
    ) = await some()


async def beside_a_variable(w: Worker, other: Worker) -> None:
    first, w.x = await some()
    assert first


async def of_another_worker(w: Worker, other: Worker) -> None:
    other.x = await some()


async def an_item(w: Worker, other: Worker) -> None:
    w.x[0], w.y = await some()


async def changed_first(w: Worker, other: Worker) -> None:
    w.x = 2 * await some()


async def added(w: Worker, other: Worker) -> None:
    w.x += await some()


async def twice(w: Worker, other: Worker) -> None:
    w.y = w.x = await some()


async def the_last_of_two(w: Worker, other: Worker) -> None:
    w.x, w.x = await some()


async def another_worker_by_that_name(w: Worker, other: Worker) -> None:
    w, w.x = await some()


async def a_variable(w: Worker, other: Worker) -> None:
    x = await some()
    w.x = x


async def a_number(w: Worker, other: Worker) -> None:
    w.v = await some()


async def two_in_a_line(w: Worker, other: Worker) -> None:
    w.x = await some(); w.v = await some()  # noqa: E702 # fmt: skip


async def inner(w: Worker) -> Tensor:
    w.y = await some()
    return torch.ones(3)


async def of_an_inner_coroutine(w: Worker, other: Worker) -> None:
    w.x = await inner(w)


def places(step: Step) -> list[str | None]:
    """The names of the cells, asked at the first await."""
    w, other = (Worker(rank, 2, State(x=torch.zeros(3), y=torch.zeros(3))) for rank in range(2))
    coroutine = step(w, other)
    coroutine.send(None)
    stored = StoredResults(w)
    found = stored.places(coroutine)
    assert stored.places(coroutine) is found
    coroutine.close()
    cells = {id(w.state.cell(name)): name for name in w.state}
    return [None if cell is None else cells[id(cell)] for cell in found]


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (one, ["x"]),
        (pair, ["x", "v"]),
        (of_several_lines, ["v", "x"]),
        (beside_a_variable, [None, "x"]),
        *[(step, []) for step in (of_another_worker, an_item, changed_first, added, twice, the_last_of_two)],
        *[(step, []) for step in (another_worker_by_that_name, a_variable, a_number)],
        (two_in_a_line, ["x"]),
        (of_an_inner_coroutine, []),
    ],
    ids=lambda value: value.__name__ if inspect.isfunction(value) else "",
)
def test_cells_of_a_statement(step: Step, expected: list[str | None]) -> None:
    assert places(step) == expected


def test_no_source_is_needed() -> None:
    space: dict[str, Any] = {"some": some}
    exec("async def step(w, other):\n    w.y = await some()", space)
    assert places(space["step"]) == ["y"]


def test_a_cell_that_is_stored_in_by_hand_is_not_copied() -> None:
    w = Worker(0, 1, State(x=torch.zeros(3)))
    cell = w.state.cell("x")
    op = Mean(w.x, into=(cell,))
    w.x = op.into[0]
    assert cell._version == 0
