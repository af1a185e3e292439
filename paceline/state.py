"""The state of a server or of a worker: named tensors."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from paceline.errors import SchemeError

if TYPE_CHECKING:
    from paceline.runtime.staleness import StalenessLedger

Vector = Tensor
"""A tensor with one dimension: all parameters of a model in a row, or a gradient of the same length."""
Cell = Tensor | float | int | bool


class State:
    """Cells with names: `State(x=x0, count=0)`. The layout is fixed; assignment copies in place.

    A tensor cell reads as the tensor itself, so `s.x += e` changes it in place. A number cell (made from a Python
    number) is a tensor without dimensions that reads and writes as a number. A state with `x` also has `v`, the version
    of x: 0 at the start, one more each time that x changes.
    """

    # tensor cells are in __dict__ too: reading one must cost next to nothing
    __slots__ = (
        "__dict__",
        "_before",
        "_cells",
        "_ledger",
        "_numbers",
        "_rows",
        "_write_later",
        "_writes",
        "bound_tools",
        "first_coordinate",
    )
    _cells: dict[str, Tensor]
    _numbers: dict[str, np.ndarray[Any, Any]]
    _rows: dict[str, np.ndarray[Any, Any]]  # cells with one dimension, as `entry` and `write` have used them
    _writes: dict[str, int]  # of numbers; of tensors those that torch has not counted
    _before: Mapping[str, Callable[[], None]]  # by name: called before the cell is used
    _write_later: Callable[[Tensor, Tensor], bool] | None  # takes a row and its new value, if it will be written later
    _ledger: StalenessLedger | None
    bound_tools: dict[Any, Any]  # objects that work on these cells, such as optimizers; not saved
    first_coordinate: int  # where x begins in the whole vector: not at 0 in a shard

    def __init__(self, **cells: Cell) -> None:
        if "x" in cells:
            cells.setdefault("v", 0)
        made = {name: _tensor(name, value) for name, value in cells.items()}
        self._adopt(made)

    def _adopt(self, cells: dict[str, Tensor]) -> None:
        store = object.__setattr__
        store(self, "_cells", cells)
        # numpy reads and writes a single number several times faster than torch, in the same memory
        store(self, "_numbers", {name: cell.numpy() for name, cell in cells.items() if cell.dim() == 0})
        store(self, "_writes", dict.fromkeys(cells, 0))
        store(self, "_rows", {})
        store(self, "_before", {})
        store(self, "_write_later", None)
        store(self, "_ledger", None)
        store(self, "bound_tools", {})
        store(self, "first_coordinate", 0)
        self.__dict__.update({name: cell for name, cell in cells.items() if cell.dim()})

    @classmethod
    def over(cls, cells: dict[str, Tensor], first: int = 0) -> State:
        """A state of these tensors themselves: nothing is copied. `first`: where x begins in the whole vector."""
        state = cls.__new__(cls)
        state._adopt(cells)
        object.__setattr__(state, "first_coordinate", first)
        return state

    def on(self, device: torch.device) -> State:
        """A state with the tensors of this one on another device; single numbers stay where the CPU reads them."""
        return State.over(
            {name: cell.to(device) if cell.dim() else cell for name, cell in self._cells.items()}, self.first_coordinate
        )

    def __getattr__(self, name: str) -> Any:
        number = self._numbers.get(name)
        if number is not None:
            return number.item()
        try:
            cell = self._cells[name]
        except KeyError:
            raise AttributeError(self._unknown(name)) from None
        if name in self._before:
            self._before[name]()
        return cell

    def __setattr__(self, name: str, value: Any) -> None:
        number = self._numbers.get(name)
        if number is not None:
            number[()] = value if type(value) is int else _fitting(name, value, number.dtype.kind == "f")
            self._writes[name] += 1
            return
        cell = self._cells.get(name)
        if cell is None:
            raise SchemeError(self._unknown(name))
        if value is cell:  # the end of `s.x += e`: the tensor has already changed in place
            return
        if name in self._before:
            self._before[name]()
        if isinstance(value, Tensor):
            if value.shape != cell.shape:
                shapes = f"shape {tuple(cell.shape)}, the value {tuple(value.shape)}"
                raise SchemeError(f"cell {name!r} has {shapes}")
            if value.is_floating_point() and not cell.is_floating_point():
                raise SchemeError(_truncates(name))
            cell.copy_(value)
        else:
            cell.fill_(_fitting(name, value, cell.is_floating_point()))

    def _unknown(self, name: str) -> str:
        near = difflib.get_close_matches(name, self._cells, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"cells are: {', '.join(self._cells)}"
        return f"no cell {name!r} in this state; {hint} (cells are declared in server() or worker())"

    def __iter__(self) -> Iterator[str]:
        return iter(self._cells)

    def __contains__(self, name: object) -> bool:
        return name in self._cells

    def cell(self, name: str) -> Tensor:
        """The tensor behind a cell, numbers included."""
        if name in self._before:
            self._before[name]()
        return self._cells[name]

    def entry(self, name: str, index: int) -> Any:
        """`s.name[index]` of a cell that is a row of numbers, as a Python number."""
        row = self._rows.get(name)
        return self._row(name)[index].item() if row is None else row.item(index)

    def write(self, name: str, index: int, value: Tensor | float) -> None:
        """`s.name[index] = value`, for one number of a row or one row of a matrix. Where the server's memory is shared,
        the caller may copy a row after the call: other calls need not wait for it. Who uses the cell next does."""
        row = self._rows.get(name)
        if row is None:
            row = self._row(name)
        if isinstance(row, Tensor):
            if row.dim() > 1 and isinstance(value, Tensor):
                self._write_row(name, row[index], value)
                return
            self.cell(name)[index] = value
            return
        row[index] = value if type(value) is int else _fitting(name, value, row.dtype.kind == "f")
        self._writes[name] += 1

    def _row(self, name: str) -> Any:
        """A cell for `entry` and `write`. Numpy reads and writes a single number several times faster than torch."""
        cell = self._cells.get(name)
        if cell is None:
            raise SchemeError(self._unknown(name))
        if cell.dim() != 1 or cell.device.type != "cpu" or name in self._before:
            return cell if cell.dim() > 1 else self.cell(name)
        row = self._rows[name] = cell.numpy()
        return row

    def _write_row(self, name: str, row: Tensor, value: Tensor) -> None:
        if value.shape != row.shape:
            raise SchemeError(f"a row of {name!r} has shape {tuple(row.shape)}, the value {tuple(value.shape)}")
        if self._write_later is not None and self._write_later(row, value):
            self._writes[name] += 1
        else:
            row.copy_(value)

    def watch(
        self, before: Mapping[str, Callable[[], None]], write_later: Callable[[Tensor, Tensor], bool] | None = None
    ) -> None:
        """Call what `before` has for a cell before the cell is used; have rows written later, by `write_later`."""
        object.__setattr__(self, "_before", before)
        object.__setattr__(self, "_write_later", write_later)
        for name in before:
            self.__dict__.pop(name, None)  # so that __getattr__ is asked

    def changes(self, name: str) -> int:
        """The number of writes to a cell: equal numbers mean that it has not changed."""
        writes = self._writes[name]
        return writes if name in self._numbers else self._cells[name]._version + writes

    def saved(self) -> dict[str, Tensor]:
        """A copy of every cell, by name."""
        return {name: cell.clone() for name, cell in self._cells.items()}

    def restore(self, saved: Mapping[str, Tensor]) -> None:
        """Restore cells that `saved` gave; the layout must be the same."""
        missing, foreign = self._cells.keys() - saved.keys(), saved.keys() - self._cells.keys()
        if missing or foreign:
            raise SchemeError(f"saved state does not fit: missing {sorted(missing)}, unknown {sorted(foreign)}")
        for name, value in saved.items():
            setattr(self, name, value)

    def vectors(self, uncut: frozenset[str] = frozenset()) -> set[str]:
        """The cells that are sharded as x is: floating, with a last dimension as long as x, and not in `uncut`."""
        length = self._cells["x"].shape[-1]
        return {
            name
            for name, cell in self._cells.items()
            if cell.dim() and cell.is_floating_point() and cell.shape[-1] == length and name not in uncut
        }

    def part(self, low: int, high: int, *, last: bool, uncut: frozenset[str] = frozenset()) -> State:
        """Coordinates low..high of every vector cell, as views; only the last part writes numbers to this state."""
        vectors = self.vectors(uncut)
        cells = {
            name: cell[..., low:high] if name in vectors else cell if last else cell.clone()
            for name, cell in self._cells.items()
        }
        view = State.over(cells, self.first_coordinate + low)
        if last:
            object.__setattr__(view, "_ledger", self._ledger)
            object.__setattr__(view, "_writes", self._writes)  # guards that wait for these cells see its writes
        return view

    def under(self, prefix: str) -> State:
        """The cells whose names begin with a prefix, as a state of their own with the names that follow it: a scheme
        with two rules gives each its cells. It has this state's v."""
        key = "under", prefix
        found: State | None = self.bound_tools.get(key)
        if found is None:
            cells = {name.removeprefix(prefix): cell for name, cell in self._cells.items() if name.startswith(prefix)}
            found = self.bound_tools[key] = State.over({**cells, "v": self._cells["v"]}, self.first_coordinate)
        return found

    def keep_ledger(self, ledger: StalenessLedger) -> None:
        """Let `admit` and `refuse` write into this ledger."""
        object.__setattr__(self, "_ledger", ledger)

    def admit(self, v: int) -> int:
        """Count a gradient that was computed at version v and enters x now; gives its staleness."""
        staleness: int = self.v - v
        if self._ledger is not None:
            self._ledger.admit(staleness)
        return staleness

    def lend(self, v: int) -> None:
        """Note the version that the caller works on from now, if a call returns something else than x itself."""
        if self._ledger is not None:
            self._ledger.pulled(self._ledger.caller, v)

    def refuse(self) -> None:
        """Count a gradient that came too late and is not used."""
        if self._ledger is not None:
            self._ledger.refuse()

    def __repr__(self) -> str:
        shown = (
            f"{name}={getattr(self, name)!r}" if cell.numel() <= 8 else f"{name}: {tuple(cell.shape)}"
            for name, cell in self._cells.items()
        )
        return f"State({', '.join(shown)})"


class Reading:
    """A state as a guard sees it: remembers the cells that it reads and refuses writes, because guards must be pure."""

    __slots__ = ("_read", "_state")
    _read: dict[str, int]
    _state: State

    def __init__(self, state: State) -> None:
        object.__setattr__(self, "_state", state)
        object.__setattr__(self, "_read", {})

    def __getattr__(self, name: str) -> Any:
        if name not in self._state:
            raise SchemeError(self._state._unknown(name))
        self._read.setdefault(name, self._state.changes(name))  # as it was before the guard did anything
        return getattr(self._state, name)

    def __setattr__(self, name: str, value: object) -> None:
        raise SchemeError(f"a guard wrote cell {name!r}; guards must be pure: write in the method itself")

    def cells(self) -> dict[str, int]:
        """The cells that were read, each with its write count; fails if the guard changed one in place."""
        for name, count in self._read.items():
            if self._state.changes(name) != count:
                raise SchemeError(f"a guard changed cell {name!r} in place; guards must be pure")
        return self._read


def sum_of(vectors: Sequence[Vector]) -> Vector:
    """The sum, added in the order given, as in every reduction of this package."""
    total = vectors[0] + vectors[1] if len(vectors) > 1 else vectors[0].clone()
    for vector in vectors[2:]:
        total += vector
    return total


def mean_of(vectors: Sequence[Vector], weights: Sequence[float] | None = None) -> Vector:
    """The (weighted) mean, added in the order given.

    Vectors of weight 0 are omitted, so a mean with a single nonzero weight is that vector, bit for bit.
    """
    if weights is None or all(weight == 1.0 for weight in weights):
        total = sum_of(vectors)
        return total.div_(len(vectors)) if total.is_floating_point() else total / len(vectors)
    counted = [(vector, weight) for vector, weight in zip(vectors, weights, strict=True) if weight]
    if not counted:
        raise SchemeError("the weights of a mean are all 0")
    if len(counted) == 1:
        return counted[0][0].clone()
    return sum_of([vector * weight for vector, weight in counted]) / sum(weight for _, weight in counted)


def mean_into(out: Vector | None, vectors: Sequence[Vector], weights: Sequence[float] | None = None) -> Vector:
    """`mean_of` with the same bits, without temporary vectors where possible. `weights`: None if all are 1.
    `out`: where to write it; None: to new memory."""
    if weights is not None and any(weight != 1.0 for weight in weights) and (len(vectors) > 1 or not weights[0]):
        found = mean_of(vectors, weights)
        return found if out is None else out.copy_(found)
    if len(vectors) == 1:
        return vectors[0].clone() if out is None else out.copy_(vectors[0])
    out = torch.add(vectors[0], vectors[1], out=out)
    for vector in vectors[2:]:
        out += vector
    return out.div_(_number(len(vectors)))


@cache
def _number(number: int) -> Tensor:
    """A tensor of no dimension: an operation takes it in half the time that it takes to make one of a number."""
    return torch.tensor(number, dtype=torch.float64)


def _tensor(name: str, value: Cell) -> Tensor:
    if hasattr(State, name):
        raise SchemeError(f"a cell cannot be called {name!r}: that is a name of State itself")
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, bool):
        return torch.tensor(value)
    return torch.tensor(value, dtype=torch.int64 if isinstance(value, int) else torch.float64)


def _fitting(name: str, value: Any, floating: bool) -> float | int | bool:
    number: float | int | bool = value.item() if isinstance(value, Tensor | np.generic) else value
    if not floating and isinstance(number, float) and not number.is_integer():
        raise SchemeError(_truncates(name))
    return number


def _truncates(name: str) -> str:
    return f"cell {name!r} holds integers and would cut the fraction off; declare it as a float ({name}=0.0)"
