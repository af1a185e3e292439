"""The `KEY=VALUE` words of `train` and `simulate`: hyper-parameters of the scheme and options of the task."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from paceline.config import build
from paceline.config.options import declared
from paceline.errors import UsageError


def split(words: list[str], function: Callable[..., Any], *options: type) -> tuple[dict[str, Any], dict[str, Any]]:
    """Hyper-parameters and options of the task. A word that is an argument of `function` is refused: people mean the
    flag, which one of the dataclasses `options` declares."""
    given = build.pairs(words)
    task_options = {key.removeprefix("task."): value for key, value in given.items() if key.startswith("task.")}
    hyper = {key: value for key, value in given.items() if not key.startswith("task.")}
    flags = {one.argument: one.flag for cls in options for one in declared(cls).values()}
    for key in hyper.keys() & inspect.signature(function).parameters.keys():
        flag = flags.get(key) or f"--{key.replace('_', '-')}"
        raise UsageError(f"{key!r} is not a hyper-parameter; if you mean the option, write {flag}")
    return hyper, task_options
