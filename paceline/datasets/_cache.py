"""Where fetched data sets are kept, uncompressed and checked."""

from __future__ import annotations

import os
import tempfile
from itertools import count
from pathlib import Path


def folder(name: str) -> Path:
    """The cache of one data set: below PACELINE_CACHE, else the user's cache folder."""
    root = os.environ.get("PACELINE_CACHE")
    if root:
        return Path(root).expanduser() / name
    user = os.environ.get("XDG_CACHE_HOME")
    return (Path(user) if user else Path.home() / ".cache") / "paceline" / name


def write(place: Path, content: bytes) -> None:
    """The whole file or nothing, whatever happens: written aside, then renamed."""
    place.parent.mkdir(parents=True, exist_ok=True)
    handle, aside = tempfile.mkstemp(prefix=f".{place.name}.", dir=place.parent)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        Path(aside).replace(place)
    except BaseException:
        Path(aside).unlink(missing_ok=True)
        raise


def set_aside(place: Path) -> Path:
    """Rename a damaged file, so that it can be looked at and is in nobody's way."""
    names = (place.with_name(f"{place.name}.damaged{number or ''}") for number in count())
    kept = next(name for name in names if not name.exists())
    place.replace(kept)
    return kept
