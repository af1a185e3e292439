"""Results that a step stores in cells of its worker at once: `w.x, w.v = await self.pull()`.

Such a result can be written where the cell is, instead of to other memory from which the assignment copies it. The
statement is found in the source of the step. Where there is no source, or the statement is another one, results are
copied.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Coroutine
from types import CodeType
from typing import Any

from torch import Tensor

from paceline.worker import Worker

Places = tuple[Tensor | None, ...]
"""Of a result, or of each item of one that is a tuple: the cell that it is stored in; None: it is stored elsewhere."""


class StoredResults:
    """Of one worker. `places` is asked at an await."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._known: dict[tuple[CodeType, int], Places] = {}

    def places(self, coroutine: Coroutine[Any, Any, Any]) -> Places:
        """The cells that the awaited result will be stored in; empty: none."""
        frame = coroutine.cr_frame  # type: ignore[attr-defined]
        site = frame.f_code, frame.f_lasti
        found = self._known.get(site)
        if found is None:
            found = self._known[site] = self._found(coroutine)
        return found

    def _found(self, coroutine: Any) -> Places:
        if inspect.iscoroutine(coroutine.cr_await):  # the step is at an await of another coroutine, which has its own
            return ()
        frame = coroutine.cr_frame
        given = {name for name, value in frame.f_locals.items() if value is self._worker}
        names = stored_in(frame.f_code, frame.f_lineno, given)
        state = self._worker.state
        cells = tuple(state.cell(name) if name in state else None for name in names)
        return cells if any(cell is not None and cell.dim() for cell in cells) else ()


def stored_in(code: CodeType, line: int, workers: set[str]) -> tuple[str, ...]:
    """The names of the attributes of a worker that the await in a line is stored in, by the places of its result. Empty
    if that is not all that the statement does. `workers`: names of variables that hold the worker."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(code)))
    except (OSError, TypeError, SyntaxError):
        return ()
    line += 1 - code.co_firstlineno
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.stmt | ast.Await) and _has(node, line)]
    assigned = [node for node in nodes if isinstance(node, ast.Assign) and isinstance(node.value, ast.Await)]
    if len(assigned) != 1 or sum(isinstance(node, ast.Await) for node in nodes) != 1 or len(assigned[0].targets) != 1:
        return ()
    target = assigned[0].targets[0]
    found = [_stored(one, workers) for one in (target.elts if isinstance(target, ast.Tuple) else [target])]
    return () if None in found else tuple(name or "" for name in found)


def _has(node: ast.stmt | ast.Await, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or node.lineno)


def _stored(target: ast.expr, workers: set[str]) -> str | None:
    """The attribute of a worker that a target is; "" for a variable; None: the target may do something else."""
    if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id in workers:
        return target.attr
    return "" if isinstance(target, ast.Name) and target.id not in workers else None
