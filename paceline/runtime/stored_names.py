"""What the bytecode after an await stores the awaited result in.

The bytecode and not the source: it is what will be executed, also after somebody has edited the file, and `ast.parse`
fails in Python 3.11 when two threads are in it at once.
"""

from __future__ import annotations

import dis
from types import CodeType

_NOTHING_DONE = {"END_SEND", "NOP", "CACHE", "EXTENDED_ARG", "RESUME"}
_LOADS = {"LOAD_FAST", "LOAD_FAST_BORROW", "LOAD_FAST_CHECK", "LOAD_DEREF"}
_STORES = {"STORE_FAST", "STORE_DEREF", "STORE_NAME", "STORE_GLOBAL"}
_LOAD, _STORE = "LOAD_FAST", "STORE_FAST"

_One = tuple[str, str | int]
"""An instruction: its name, and the variable, attribute or number that it is about."""


def stored_in(code: CodeType, at: int, workers: set[str]) -> tuple[str, ...]:
    """The names of the attributes of a worker that the result of an await is stored in, by the places of the result; ""
    for a variable. Empty if that is not all that the statement does.

    `at`: the offset of the instruction that the coroutine is suspended at; `workers`: names of variables that hold the
    worker."""
    following = _after_the_await(code, at)
    count = 1
    if following and following[-1][0] == "UNPACK_SEQUENCE":
        count = int(following.pop()[1])
    found: list[str] = []
    while len(found) < count:
        name, about = following.pop() if following else ("", "")
        if name == _STORE and about not in workers:
            found.append("")
        elif name == _LOAD and about in workers and following and following[-1][0] == "STORE_ATTR":
            found.append(str(following.pop()[1]))
        else:
            return ()
    attributes = [name for name in found if name]
    return tuple(found) if len(set(attributes)) == len(attributes) else ()


def _after_the_await(code: CodeType, at: int) -> list[_One]:
    """The instructions that take the result, the last one first."""
    awaiting: int | None = None  # where the await ends
    found: list[_One] = []
    for one in dis.get_instructions(code):
        if one.offset <= at:
            awaiting = int(one.argval) if one.opname == "SEND" else awaiting
        elif awaiting is None:
            break
        elif one.offset >= awaiting and one.opname not in _NOTHING_DONE:
            found += _plain(one)
    return found[::-1]


def _plain(one: dis.Instruction) -> list[_One]:
    """An instruction by the names of Python 3.11: later ones do two things at once."""
    if one.opname == "STORE_FAST_LOAD_FAST":
        return [(_STORE, one.argval[0]), (_LOAD, one.argval[1])]
    if one.opname == "STORE_FAST_STORE_FAST":
        return [(_STORE, name) for name in one.argval]
    name = _LOAD if one.opname in _LOADS else _STORE if one.opname in _STORES else one.opname
    return [(name, one.argval)]
