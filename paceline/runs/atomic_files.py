"""Atomic writes: a file or folder is whole or missing, even after a crash.

Both are written under a hidden name, synced to the disk, and then renamed.
"""

from __future__ import annotations

import fcntl
import hashlib
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

LARGEST_JSON = 64 * 2**20  # bytes: a damaged or foreign file must not fill the memory
NEW = ".new"  # suffix of a new folder until it has replaced the old one of the same name
_ASIDE = ".aside-"  # prefix of what is being written or deleted; after a crash the next writer deletes it


@contextmanager
def writing(directory: Path) -> Iterator[Path]:
    """A hidden folder to write in, deleted afterwards unless `put` renamed it. One writer at a time."""
    directory.mkdir(parents=True, exist_ok=True)
    handle = os.open(directory, os.O_RDONLY)
    folder = directory / f"{_ASIDE}{uuid4().hex}"
    try:
        with suppress(OSError):  # some network file systems have no locks
            fcntl.flock(handle, fcntl.LOCK_EX)  # released when the process ends
        _clean_up(directory)
        folder.mkdir()
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(handle)


def put(folder: Path, name: str) -> Path:
    """Rename a written folder to `name`. An older one is replaced; at every moment one of the two exists."""
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


def discard(path: Path) -> None:
    """Delete a folder. It is renamed first, so that no reader finds it half deleted."""
    aside = path.with_name(f"{_ASIDE}{uuid4().hex}")
    path.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)


def _clean_up(directory: Path) -> None:
    """Delete what killed writers left, and complete a replacement that a crash interrupted."""
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


def sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def is_locked(path: Path) -> bool:
    """Whether a living process holds the lock of a file; False where the file system has no locks."""
    with suppress(OSError), path.open("rb") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def json_bytes(content: Any) -> bytes:
    """The content of a JSON file. NaN and infinity become null."""
    return (json.dumps(finite(content), indent=1, allow_nan=False) + "\n").encode()


def write_json(path: Path, content: Any) -> None:
    """Replace a JSON file, or leave the old one as it is. NaN and infinity become null."""
    with failing_as(f"{path} could not be written"):
        write_bytes(path, json_bytes(content))


def write_bytes(path: Path, content: bytes, *, private: bool = False, durable: bool = True) -> None:
    """Replace a file, or leave the old one as it is.

    private: only this user may read the file, and several processes may write it at the same time;
    durable: return when the file is on the disk.
    """
    with _written_aside(path, content, private=private, durable=durable) as aside:
        aside.replace(path)
        if durable:
            sync(path.parent)


def write_if_missing(path: Path, content: bytes) -> None:
    """Write a private file unless it exists. If several processes do so at the same time, one of them writes it."""
    with _written_aside(path, content, private=True) as aside, suppress(FileExistsError):
        path.hardlink_to(aside)  # unlike a rename it never replaces a file


@contextmanager
def _written_aside(path: Path, content: bytes, *, private: bool, durable: bool = True) -> Iterator[Path]:
    """A hidden file beside `path`, deleted afterwards unless it was renamed."""
    # a file that has one writer has one name: what a crash left is overwritten
    aside = path.with_name(f"{_ASIDE}{uuid4().hex if private else path.name}")
    flags, mode = (os.O_EXCL, 0o600) if private else (os.O_TRUNC, 0o666)
    try:
        handle = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | flags, mode)
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            if durable:
                os.fsync(handle)
        yield aside
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
    """Turn an OSError inside into a RunError that says what failed, and why."""
    try:
        yield
    except OSError as error:
        raise RunError(f"{what}: {cause(error)}") from error


def cause(error: Exception) -> str:
    """The text of an error, without the number and the path of an OSError."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
