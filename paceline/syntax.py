"""Source text as a syntax tree, in one thread at a time: Python 3.11 counts the depth of `ast.parse` for all threads
together, and raises a SystemError when two are in it at once."""

from __future__ import annotations

import ast
import threading

_ONE = threading.RLock()  # reentrant: the garbage collector may run code inside


def parsed(text: str) -> ast.Module:
    """The tree of a module, class or function."""
    with _ONE:
        return ast.parse(text)


def parsed_expression(text: str) -> ast.expr:
    """The tree of one expression."""
    with _ONE:
        return ast.parse(text, mode="eval").body
