"""What other packages register as members: their entry points. No part of paceline is imported here."""

import os
import sys
from collections.abc import Iterable
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from pkgutil import iter_modules

Seen = tuple[tuple[str, int], ...]  # folders, and when each has changed


def groups() -> frozenset[str]:
    """The groups in which packages register members."""
    return frozenset(_entries(_seen(sys.path)))


def entries(group: str) -> tuple[EntryPoint, ...]:
    """The entry points of a group."""
    return _entries(_seen(sys.path)).get(group, ())


def modules(folders: Iterable[str]) -> tuple[str, ...]:
    """The modules of a package, by its `__path__`."""
    return _modules(_seen(folders))


def _seen(folders: Iterable[str]) -> Seen:
    found = []
    for folder in folders:
        try:
            found.append((folder, os.stat(folder or ".").st_mtime_ns))  # noqa: PTH116
        except OSError:
            found.append((folder, 0))
    return tuple(found)


@lru_cache(maxsize=2)
def _entries(_: Seen) -> dict[str, tuple[EntryPoint, ...]]:
    """All entry points. To read the metadata of every package takes 10 ms: it is done again after a folder changed."""
    every = entry_points()
    return {group: tuple(every.select(group=group)) for group in every.groups if group.startswith("paceline.")}


@lru_cache(maxsize=32)
def _modules(seen: Seen) -> tuple[str, ...]:
    return tuple(info.name for info in iter_modules([folder for folder, _ in seen]))
