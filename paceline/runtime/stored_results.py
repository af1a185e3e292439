"""Results that a step stores in cells of its worker at once: `w.x, w.v = await self.pull()`.

Such a result can be written where the cell is, instead of to other memory from which the assignment copies it. The
bytecode of the step says where a result is stored. Where the statement is another one, results are copied.
"""

from __future__ import annotations

import inspect
from collections.abc import Coroutine
from types import CodeType
from typing import Any

from torch import Tensor

from paceline.runtime.stored_names import stored_in
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
        names = stored_in(frame.f_code, frame.f_lasti, given)
        state = self._worker.state
        cells = tuple(state.cell(name) if name in state else None for name in names)
        return cells if any(cell is not None and cell.dim() for cell in cells) else ()
