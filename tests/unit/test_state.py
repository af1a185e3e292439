"""Cells: assigned in place, of a fixed layout, never silently cut."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from paceline.errors import SchemeError
from paceline.runtime.staleness import StalenessLedger
from paceline.state import Reading, State, mean_of, sum_of


@pytest.fixture
def state() -> State:
    return State(x=torch.arange(4.0), count=2, share=0.5, open=True, whose=torch.zeros(3, dtype=torch.int64))


def test_assignment_copies_in_place(state: State) -> None:
    cell, address = state.x, state.x.data_ptr()
    value = torch.ones(4)
    state.x = value
    assert state.x is cell
    assert cell.data_ptr() == address
    assert cell.tolist() == [1.0] * 4
    value += 5  # the value was copied, not kept
    assert state.x.tolist() == [1.0] * 4
    state.x += 2
    assert cell.tolist() == [3.0] * 4
    state.x = 0
    assert cell.tolist() == [0.0] * 4


def test_what_it_is_made_of_is_copied() -> None:
    x0 = torch.zeros(3)
    first, second = State(x=x0), State(x=x0)
    first.x += 1
    assert x0.tolist() == second.x.tolist() == [0.0] * 3


def test_a_state_with_x_has_a_version() -> None:
    assert State(x=torch.zeros(2)).v == 0
    assert State(x=torch.zeros(2), v=7).v == 7
    assert "v" not in State(count=1)


def test_numbers_read_and_write_as_numbers(state: State) -> None:
    state.count += 3
    state.share *= 0.5
    state.open = False
    assert (state.count, state.share, state.open) == (5, 0.25, False)
    assert [type(value) for value in (state.count, state.share, state.open)] == [int, float, bool]
    assert state.cell("count").dtype == torch.int64
    assert state.cell("share").dtype == torch.float64
    state.count = torch.tensor(9)
    assert state.count == 9
    big = 2**53 + 1  # a float could not hold it
    state.count = big
    assert state.count == big


@pytest.mark.parametrize("value", [2.5, torch.tensor(2.5), np.float32(2.5), np.float64(2.5), float("nan")])
def test_integer_numbers_refuse_fractions(state: State, value: object) -> None:
    with pytest.raises(SchemeError, match=r"cell 'count' holds integers .* declare it as a float \(count=0.0\)"):
        state.count = value
    assert state.count == 2


def test_integer_numbers_take_whole_floats(state: State) -> None:
    state.count = 4.0
    assert state.count == 4
    with pytest.raises(SchemeError, match="holds integers"):
        state.count /= 8


@pytest.mark.parametrize("value", [0.5, np.float32(0.5), torch.tensor([0.5, 1.0, 1.0])])
def test_integer_vectors_refuse_fractions(state: State, value: object) -> None:
    with pytest.raises(SchemeError, match="cell 'whose' holds integers"):
        state.whose = value
    assert state.whose.tolist() == [0, 0, 0]


def test_the_layout_is_fixed(state: State) -> None:
    with pytest.raises(SchemeError, match=r"no cell 'cuont' in this state; did you mean 'count'\?"):
        state.cuont = 3
    with pytest.raises(AttributeError, match="did you mean 'share'"):
        _ = state.shar
    with pytest.raises(SchemeError, match="cells are: x, count, share, open, whose, v"):
        state.zzz = 1
    with pytest.raises(SchemeError, match=r"cell 'x' has shape \(4,\), the value \(3,\)"):
        state.x = torch.zeros(3)
    assert list(state) == ["x", "count", "share", "open", "whose", "v"]


@pytest.mark.parametrize("name", ["saved", "part", "admit", "_cells", "cell"])
def test_names_of_the_state_itself_are_no_cells(name: str) -> None:
    with pytest.raises(SchemeError, match=f"a cell cannot be called '{name}'"):
        State(**{name: 1})


def test_saved_and_restored(state: State) -> None:
    saved = state.saved()
    x, address = state.x, state.x.data_ptr()
    state.x += 1
    state.count = 77
    state.whose[1] = 5
    assert saved["x"].tolist() == [0.0, 1.0, 2.0, 3.0]
    state.restore(saved)
    assert state.x is x
    assert x.data_ptr() == address
    assert (x.tolist(), state.count, state.whose.tolist()) == ([0.0, 1.0, 2.0, 3.0], 2, [0, 0, 0])


def test_restore_refuses_another_layout(state: State) -> None:
    saved = state.saved()
    saved["other"] = saved.pop("share")
    with pytest.raises(SchemeError, match=r"missing \['share'\], unknown \['other'\]"):
        state.restore(saved)


def test_changes_are_counted(state: State) -> None:
    for name, change in (
        ("x", lambda: state.x.add_(1)),
        ("x", lambda: setattr(state, "x", torch.ones(4))),
        ("whose", lambda: state.whose.__setitem__(0, 1)),
        ("count", lambda: setattr(state, "count", state.count)),
    ):
        before = {cell: state.changes(cell) for cell in state}
        change()
        assert [cell for cell in state if state.changes(cell) != before[cell]] == [name]


def test_parts_are_views_and_only_the_last_writes_numbers() -> None:
    state = State(x=torch.zeros(5), memory=torch.zeros(2, 5), few=torch.zeros(3), count=0)
    first, last = state.part(0, 2, last=False), state.part(2, 5, last=True)
    first.x += 1
    first.memory += 1
    first.few += 1
    first.count += 1
    last.x += 2
    assert state.x.tolist() == [1, 1, 2, 2, 2]
    assert state.memory.tolist() == [[1, 1, 0, 0, 0]] * 2
    assert (state.few.tolist(), state.count) == ([0, 0, 0], 0)
    before = state.changes("count")
    last.few += 1
    last.count += 1
    assert (state.few.tolist(), state.count) == ([1, 1, 1], 1)
    assert state.changes("count") > before  # so that guards that read it are asked again


def test_only_the_last_part_counts_in_the_ledger() -> None:
    state, ledger = State(x=torch.zeros(4)), StalenessLedger.fresh(1, [0])
    state.keep_ledger(ledger)
    state.v = 3
    assert state.part(0, 2, last=False).admit(1) == 2
    assert ledger.histogram() == {}
    assert state.part(2, 4, last=True).admit(1) == 2
    assert ledger.histogram() == {2: 1}


def test_a_guard_reads_only(state: State) -> None:
    reading = Reading(state)
    assert reading.count == 2
    assert float(reading.x.sum()) == 6.0
    assert reading.cells() == {"count": state.changes("count"), "x": state.changes("x")}
    with pytest.raises(SchemeError, match="a guard wrote cell 'count'; guards must be pure"):
        reading.count = 3
    with pytest.raises(SchemeError, match="did you mean 'count'"):
        _ = reading.coun


def test_a_guard_that_changes_in_place_is_caught_even_if_it_reads_again(state: State) -> None:
    reading = Reading(state)
    reading.x.add_(1)
    with pytest.raises(SchemeError, match="a guard changed cell 'x' in place"):
        reading.cells()
    reading = Reading(state)
    reading.x.add_(1)
    _ = reading.x
    with pytest.raises(SchemeError, match="a guard changed cell 'x' in place"):
        reading.cells()


def test_the_repr_shows_what_is_short(state: State) -> None:
    assert repr(State(count=1)) == "State(count=1)"
    assert "x: (100,)" in repr(State(x=torch.zeros(100)))


def test_sums_are_added_in_the_order_given() -> None:
    big, small = torch.tensor([1e8]), torch.tensor([1.0])
    vectors = [big, small, small, -big]
    assert sum_of(vectors).item() == float(((big + small) + small) - big)
    assert sum_of([big, -big, small, small]).item() == 2.0
    assert big.item() == 1e8  # the first one is not changed


def test_means_with_weights() -> None:
    a, b = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 6.0])
    assert mean_of([a, b]).tolist() == [2.0, 4.0]
    assert mean_of([a, b], [1.0, 1.0]).tolist() == [2.0, 4.0]
    assert mean_of([a, b], [3.0, 1.0]).tolist() == [1.5, 3.0]
    third = torch.tensor([0.1, 0.7])
    assert torch.equal(mean_of([third, a, b], [7.0, 0.0, 0.0]), third)
    assert mean_of([third, a], [1.0, 0.0]) is not third
    with pytest.raises(SchemeError, match="all 0"):
        mean_of([a, b], [0.0, 0.0])


def test_the_ledger_counts() -> None:
    ledger = StalenessLedger.fresh(3, range(3))
    for caller, staleness in ((0, 0), (1, 2), (2, 2), (0, 10_000)):
        ledger.caller = caller
        ledger.admit(staleness)
    ledger.refuse()
    assert ledger.histogram() == {0: 1, 2: 2, 255: 1}  # the last bin counts "this or more"
    assert (ledger.cells.admitted, ledger.cells.total, ledger.cells.largest) == (4, 10_004, 10_000)
    assert ledger.mean() == 2501.0
    assert ledger.outstanding(9) == 0
    ledger.pulled(1, 7)
    ledger.pulled(2, 4)
    assert ledger.outstanding(9) == 2 + 5
    ledger.gone(2)
    assert ledger.outstanding(9) == 2
    other = StalenessLedger.fresh(3, range(3))
    other.restore(ledger.saved())
    assert other.histogram() == ledger.histogram()
    assert other.outstanding(9) == 2
