"""The shared secret: a process that knows it may join. It is never part of a message, a log line or a command line."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path

from paceline.errors import UsageError
from paceline.runs import atomic_files

SHORTEST, LONGEST = 16, 1024  # bytes
VALUE, FILE = "PACELINE_SECRET", "PACELINE_SECRET_FILE"


def fresh() -> bytes:
    return os.urandom(32)


def parse(text: str, where: str = "the secret") -> bytes:
    """The secret of its hexadecimal text; `where` is what an error calls it."""
    digits = text.strip()
    advice = "`openssl rand -hex 32` makes a good one"
    if not re.fullmatch(r"(?:[0-9a-fA-F]{2})*", digits):
        raise UsageError(f"{where} is not written in pairs of hexadecimal digits; {advice}")
    if not SHORTEST <= (size := len(digits) // 2) <= LONGEST:
        raise UsageError(f"{where} has {size} bytes; {SHORTEST} to {LONGEST} are allowed: {advice}")
    return bytes.fromhex(digits)


def write(path: Path, secret: bytes) -> None:
    """Write the secret's file, or replace it."""
    try:
        atomic_files.write_bytes(path, f"{secret.hex()}\n".encode(), private=True)
    except OSError as error:
        raise UsageError(f"the secret's file {path} cannot be written: {error.strerror}") from error


def read(path: Path) -> bytes:
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # do not wait for a pipe of that name
    except OSError as error:
        raise UsageError(f"the secret's file {path} cannot be read: {error.strerror}") from error
    try:
        _refuse_if_shared(path, os.fstat(handle))  # of the open file: another file may have its name by now
        content = os.read(handle, 4 * LONGEST)
    finally:
        os.close(handle)
    return parse(content.decode("ascii", errors="replace"), f"the secret in {path}")


def of_environment(env: Mapping[str, str]) -> bytes | None:
    """The secret of the variables. An empty variable is refused: it was meant to hold a secret."""
    if VALUE in env:
        return parse(env[VALUE], VALUE)
    if FILE in env:
        if not env[FILE]:
            raise UsageError(f"{FILE} is empty; it must name the file that holds the secret, or not be set")
        return read(Path(env[FILE]))
    return None


def of_user() -> bytes:
    """The secret of this user, made at the first call."""
    home = os.environ.get("XDG_CONFIG_HOME", "")
    folder = (Path(home) if Path(home).is_absolute() else Path.home() / ".config") / "paceline"
    path = folder / "secret"
    if not path.exists():
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            atomic_files.write_if_missing(path, f"{fresh().hex()}\n".encode())
        except OSError as error:
            raise UsageError(
                f"the user's secret {path} cannot be made: {error.strerror}; set {VALUE} or {FILE} instead"
            ) from error
    return read(path)


def _refuse_if_shared(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise UsageError(f"{path} is not a plain file; the secret must be in one")
    if status.st_uid != os.geteuid():
        raise UsageError(
            f"the secret's file {path} belongs to another user (number {status.st_uid}), who could know or change it; "
            f"make one of your own: openssl rand -hex 32 > FILE, chmod 600 FILE, {FILE}=FILE"
        )
    if status.st_mode & 0o077:
        raise UsageError(
            f"the secret's file {path} is open to others (mode {stat.S_IMODE(status.st_mode):04o}); "
            f"chmod 600 {path}, and make a new secret if another user may have read it"
        )
