"""Performs one call on the server's state, and checks what the scheme's method does."""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor

from paceline.errors import SchemeError
from paceline.ops import Call, mapped, tensors
from paceline.runtime.staleness import StalenessLedger
from paceline.scheme import Scheme
from paceline.state import State

CROSSING = (Tensor, int, float, str, bool, type(None))  # what can cross to another process, and tuples of it


class CallPerformer:
    """Performs calls and changes of membership on a state, one at a time, in whatever order it is given them."""

    def __init__(self, scheme: Scheme, state: State, workers: int, ledger: StalenessLedger | None = None) -> None:
        self.scheme = scheme
        self.state = state
        self.ledger = ledger or StalenessLedger.fresh(workers, map(scheme.holder, range(workers)))
        self.calls = 0
        state.keep_ledger(self.ledger)
        self._own = {_place(state.cell(name)) for name in state}
        self._vector, self._version = state.x, state.cell("v").numpy()
        self._x: int = state.x.data_ptr()

    def carry_out(self, rank: int, call: Call[Any]) -> Any:
        """Perform a call; gives what the method gave, which may be a cell of the state itself."""
        before = self.writes() if call.method.reads else None
        given = versions(call)
        result, _, _ = self.change(rank, call)
        check_unchanged(call, given)
        if before is not None and before != self.writes():
            raise SchemeError(f"{call.method.name}() is declared reads=True and changed a cell; remove reads=True")
        self._check_crossing(call, result)
        return result

    def change(self, rank: int, call: Call[Any]) -> tuple[Any, int, int]:
        """Perform a call, checking only that v rises by one exactly when x changes. Gives what the method gave, v, and
        by how much it has risen. What it touches is little: on one machine other workers wait meanwhile, and the caches
        of this one hold the gradient that it has computed."""
        scheme, state, vector, version = self.scheme, self.state, self._vector, self._version
        self.ledger.caller = holder = scheme.holder(rank)
        writes, before = vector._version, version.item()
        result = call.method.function(scheme.rates_at(state), state, *call.args)
        now = version.item()
        rise = now - before
        if rise != (vector._version != writes):
            raise _wrong_rise(call.method.name, vector._version != writes, rise)
        self.calls += 1
        if result is not None and self._gives_x(result):
            self.ledger.pulled(holder, now)
        return result, now, rise

    def writes(self) -> list[int]:
        """How often each cell has been written, in the order of the cells."""
        return [self.state.changes(name) for name in self.state]

    def _member(self, event: Literal["left", "joined"], rank: int, quorum: bool) -> None:
        if event == "left":
            self.ledger.gone(self.scheme.holder(rank))
        if quorum:
            state = self.state
            before, version = state.x._version, state.v
            getattr(self.scheme.rates_at(state), event)(state, rank)
            rise = state.v - version
            if rise != (state.x._version != before):
                raise _wrong_rise(event, state.x._version != before, rise)

    def _check_crossing(self, call: Call[Any], values: Any) -> None:
        """Only tensors, numbers, strings and tuples of them can cross to another process."""
        for value in values if isinstance(values, tuple) else (values,):
            if isinstance(value, tuple):
                self._check_crossing(call, value)
            elif not isinstance(value, CROSSING):
                raise SchemeError(
                    f"{call.method.name}(): a {type(value).__name__} cannot cross between processes; "
                    "only tensors, numbers, strings and tuples of them do"
                )

    def _gives_x(self, result: Any) -> bool:
        return self._x in [tensor.data_ptr() for tensor in tensors(result)]

    def _by_value(self, result: Any, call: Call[Any]) -> Any:
        """The result with copies of tensors that lie in the server's memory or in that of an argument."""

        def own(tensor: Tensor) -> Tensor:
            return tensor.clone() if self.shared(tensor, call) else tensor

        return mapped(own, result)

    def shared(self, tensor: Tensor, call: Call[Any]) -> bool:
        """Whether a tensor of a result lies in the server's memory or in that of an argument."""
        place = _place(tensor)
        return place in self._own or any(place == _place(arg) for arg in tensors(call.args))


def versions(call: Call[Any]) -> list[tuple[Tensor, int]]:
    """The tensors among a call's arguments, with torch's counts of their changes."""
    return [(tensor, tensor._version) for tensor in tensors(call.args)]


def check_unchanged(call: Call[Any], given: list[tuple[Tensor, int]]) -> None:
    """Refuse a method that has changed an argument since `versions` gave this."""
    for arg, version in given:
        if arg._version != version:
            named = zip(call.method.parameters, call.args, strict=False)
            name = next(name for name, value in named if any(arg is part for part in tensors(value)))
            raise SchemeError(
                f"{call.method.name}() changed its argument {name!r} in place; arguments cross by value: "
                f"write '{name} = {name} * …' instead"
            )


def _wrong_rise(name: str, changed: bool, rise: int) -> SchemeError:
    what = "changed x" if changed else "did not change x"
    return SchemeError(
        f"{name}() {what} and raised s.v by {rise}; v counts the changes of x: put 's.v += 1' where x changes"
    )


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
