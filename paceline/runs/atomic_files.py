"""Files and folders that are whole or not there at all, whatever breaks off the writing.

Both are written under a hidden name, brought to the disk, and only then given their own name.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

from paceline.errors import DataError, RunError
from paceline.fields import finite

LARGEST_JSON = 64 * 2**20  # bytes; no file that claims to be ours can fill the memory
NEW = ".new"  # the successor of a folder of the same name, until it has taken its place
_ASIDE = ".aside-"  # what is being written or deleted; after a crash the next writer removes it


@contextmanager
def writing(directory: Path) -> Iterator[Path]:
    """A hidden folder to write in, gone afterwards unless it was put in its place. One writer at a time."""
    directory.mkdir(parents=True, exist_ok=True)
    handle = os.open(directory, os.O_RDONLY)
    folder = directory / f"{_ASIDE}{uuid4().hex}"
    try:
        with suppress(OSError):  # some network file systems know no locks
            fcntl.flock(handle, fcntl.LOCK_EX)  # ends with the process, however that ends
        _finish_what_others_began(directory)
        folder.mkdir()
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(handle)


def put(folder: Path, name: str) -> Path:
    """Give a written folder its name. If there was one of that name, at every moment one of the two is there."""
    sync(folder)
    place = folder.with_name(name)
    if place.exists():
        successor = place.with_name(name + NEW)
        folder.rename(successor)
        sync(place.parent)
        _replace(place, successor)
    else:
        folder.rename(place)
    sync(place.parent)
    return place


def write_private(path: Path, text: str) -> None:
    """A small text that only this user may read."""
    aside = path.with_name(f"{_ASIDE}{uuid4().hex}")
    handle = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text)
    aside.rename(path)


def discard(path: Path) -> None:
    """Delete a folder; to others it is gone at once, not file by file."""
    aside = path.with_name(f"{_ASIDE}{uuid4().hex}")
    path.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)


def _finish_what_others_began(directory: Path) -> None:
    """Remove what dead writers left, and complete a replacement that was broken off."""
    for path in directory.glob(f"{_ASIDE}*"):
        shutil.rmtree(path, ignore_errors=True)
    for successor in directory.glob(f"*{NEW}"):
        _replace(successor.with_name(successor.name.removesuffix(NEW)), successor)


def _replace(place: Path, successor: Path) -> None:
    if place.exists():
        discard(place)
    successor.rename(place)


def sync(path: Path) -> None:
    """Return when the file, or the folder's list of names, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def json_bytes(content: Any) -> bytes:
    """A file of JSON. NaN and infinity become null."""
    return (json.dumps(finite(content), indent=1, allow_nan=False) + "\n").encode()


def write_json(path: Path, content: Any) -> None:
    """Write a file of JSON, or leave the one that is there as it is. NaN and infinity become null."""
    write_bytes(path, json_bytes(content))


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file, or leave the one that is there as it is."""
    aside = path.with_name(f"{_ASIDE}{path.name}")  # one writer per file: what a crash left is overwritten
    with failing_as(f"{path} could not be written"):
        try:
            aside.write_bytes(content)
            sync(aside)
            aside.replace(path)
            sync(path.parent)
        finally:
            aside.unlink(missing_ok=True)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of bounded size; DataError says what is wrong with it."""
    try:
        with path.open("rb") as stream:
            if os.fstat(stream.fileno()).st_size > LARGEST_JSON:
                raise ValueError(f"it has more than {LARGEST_JSON:,} bytes")
            text = stream.read()
        content = json.loads(text)
    except OSError as error:
        raise DataError(f"{path.name} cannot be read: {cause(error)}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path.name} is not what was written: {error}") from error
    if not isinstance(content, dict):
        raise DataError(f"{path.name} is not what was written: it holds a {type(content).__name__}")
    return content


@contextmanager
def failing_as(what: str) -> Iterator[None]:
    """What the system refuses inside becomes a RunError that says what could not be done, and why."""
    try:
        yield
    except OSError as error:
        raise RunError(f"{what}: {cause(error)}") from error


def cause(error: Exception) -> str:
    """What the system said, without its number and the path."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
