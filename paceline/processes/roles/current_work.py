"""What a worker does at this moment besides its steps, for the people who watch: it evaluates, or torch compiles."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from paceline.processes.memory.board import COMPILING, STEPPING, Board


@contextmanager
def busy(board: Board, rank: int, work: int) -> Iterator[None]:
    """Show on the board what the worker does inside."""
    before, board.work[rank] = board.work[rank], work
    try:
        yield
    finally:
        board.work[rank] = before


def show_compilation(board: Board, rank: int) -> None:
    """From now on show when torch.compile works, if the program has loaded it by now."""
    loaded = sys.modules.get("torch._dynamo.callback")
    handler = getattr(loaded, "callback_handler", None)
    if handler is None or not hasattr(handler, "register_start_callback"):
        return  # this is no public part of torch

    def show(work: int) -> None:
        board.work[rank] = work

    handler.register_start_callback(lambda *_: show(COMPILING))
    handler.register_end_callback(lambda *_: show(STEPPING))
