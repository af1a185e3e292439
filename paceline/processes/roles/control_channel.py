"""Messages of a role to its supervisor, errors among them: JSON lines over a socket pair."""

from __future__ import annotations

import _thread
import contextlib
import json
import linecache
import re
import socket
import traceback
from typing import Any

from paceline import errors, user_code
from paceline.errors import PacelineError, RunError, UsageError
from paceline.processes import resource_limits
from paceline.processes.line_buffer import LineBuffer
from paceline.processes.roles.roles import Role

LONGEST = 1 << 22  # bytes of one line


class Control:
    """A role's end."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = _thread.allocate_lock()  # a process may host several workers: lines must stay whole

    def fileno(self) -> int:
        return self._connection.fileno()

    def close(self) -> None:
        """Leave the channel to the role's own process: for a process that was forked from it."""
        self._connection.close()

    def send(self, message: dict[str, Any]) -> None:
        # if the supervisor is gone, the kernel is about to kill this process too
        with self._lock, contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._connection.sendall(json.dumps(message).encode() + b"\n")


class Listener:
    """The supervisor's end."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        connection.setblocking(False)
        self._buffer = LineBuffer(LONGEST)

    def messages(self) -> list[dict[str, Any]]:
        """The messages that have arrived, without waiting."""
        found: list[dict[str, Any]] = []
        with contextlib.suppress(BlockingIOError, ConnectionResetError):
            while data := self.connection.recv(1 << 16):
                found += self._whole(data)
        return found

    def wait(self) -> tuple[list[dict[str, Any]], bool]:
        """Wait for the next messages; False when the other end has closed."""
        try:
            data = self.connection.recv(1 << 16)
        except ConnectionResetError:  # the other end has closed, and has not read all that it was sent
            data = b""
        return self._whole(data), bool(data)

    def _whole(self, data: bytes) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._buffer.lines(data) if line]


def report_of(role: Role, error: BaseException, step: int | None) -> dict[str, Any]:
    """What the launcher is told of an error; `step`: of the worker that raised it."""
    own = isinstance(error, PacelineError)
    notes = list(getattr(error, "__notes__", ()))
    if not own:
        frames = traceback.extract_tb(error.__traceback__)
        told = {"at": user_code.last_frame(frames), "raised in": frames[-1] if frames else None}
        if told["at"] in (None, told["raised in"]):
            told = {"at": told["raised in"]}
        notes += [f"{word} {one.filename}:{one.lineno}: {one.line}" for word, one in told.items() if one is not None]
    notes.append(f"the full log is logs/{role.file}.log")
    return {
        "kind": type(error).__name__ if own else "RunError",
        "where": str(role) if step is None else f"{role}, step {step}",
        "text": text_of(error),
        "notes": notes,
    }


def text_of(error: BaseException) -> str:
    if isinstance(error, PacelineError):
        return str(error)
    return resource_limits.explained(error) or f"{type(error).__name__}: {error}"


def error_of(told: dict[str, Any]) -> PacelineError:
    """The error that a role has reported."""
    kind = getattr(errors, told["kind"], RunError)
    text = told["text"] if told["text"].startswith(told["where"]) else f"{told['where']}: {told['text']}"
    if kind is errors.UnknownName:  # it would write the text itself, and this one is written
        kind = UsageError
    error: PacelineError = kind(text) if issubclass(kind, PacelineError) else RunError(text)
    for note in told["notes"]:
        error.add_note(_with_source(note))
    return error


def _with_source(note: str) -> str:
    """A note of a line, with the line itself if this process knows it: those of a notebook are in no file."""
    place = re.fullmatch(r"at (.+):(\d+): ", note)
    return note + linecache.getline(place[1], int(place[2])).strip() if place else note
