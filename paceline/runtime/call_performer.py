"""Performs one call on the server's state, and checks what the scheme's method does."""

from __future__ import annotations

from collections.abc import Callable
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
        self._x: int = state.x.data_ptr()

    def carry_out(self, rank: int, call: Call[Any]) -> Any:
        """Perform a call; gives what the method gave, which may be a cell of the state itself."""
        self.ledger.caller = holder = self.scheme.holder(rank)
        before = self.writes() if call.method.reads else None
        versions = [(a, a._version) for a in tensors(call.args)]
        scheme = self.scheme.rates_at(self.state)
        result = self._changing(call.method.name, lambda: call.method.function(scheme, self.state, *call.args))
        for arg, version in versions:
            if arg._version != version:
                named = zip(call.method.parameters, call.args, strict=False)
                name = next(name for name, value in named if any(arg is part for part in tensors(value)))
                raise SchemeError(
                    f"{call.method.name}() changed its argument {name!r} in place; arguments cross by value: "
                    f"write '{name} = {name} * …' instead"
                )
        if before is not None and before != self.writes():
            raise SchemeError(f"{call.method.name}() is declared reads=True and changed a cell; remove reads=True")
        self.calls += 1
        self._check_crossing(call, result)
        if self._gives_x(result):
            self.ledger.pulled(holder, self.state.v)
        return result

    def writes(self) -> list[int]:
        """How often each cell has been written, in the order of the cells."""
        return [self.state.changes(name) for name in self.state]

    def _member(self, event: Literal["left", "joined"], rank: int, quorum: bool) -> None:
        if event == "left":
            self.ledger.gone(self.scheme.holder(rank))
        if quorum:
            self._changing(event, lambda: getattr(self.scheme.rates_at(self.state), event)(self.state, rank))

    def _changing(self, name: str, change: Callable[[], Any]) -> Any:
        """Run a change of the state, and check that v rises by one exactly when x changes."""
        state = self.state
        before, version = state.x._version, state.v
        result = change()
        changed, rise = state.x._version != before, state.v - version
        if rise != int(changed):
            what = "changed x" if changed else "did not change x"
            raise SchemeError(
                f"{name}() {what} and raised s.v by {rise}; v counts the changes of x: put 's.v += 1' where x changes"
            )
        return result

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
        return any(tensor.data_ptr() == self._x for tensor in tensors(result))

    def _by_value(self, result: Any, call: Call[Any]) -> Any:
        """The result with copies of tensors that lie in the server's memory or in that of an argument."""

        def own(tensor: Tensor) -> Tensor:
            return tensor.clone() if self.shared(tensor, call) else tensor

        return mapped(own, result)

    def shared(self, tensor: Tensor, call: Call[Any]) -> bool:
        """Whether a tensor of a result lies in the server's memory or in that of an argument."""
        place = _place(tensor)
        return place in self._own or any(place == _place(arg) for arg in tensors(call.args))


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
