"""Checks that every launcher must pass. They are plain functions: call them in your tests on a launcher of your own.

    from paceline.testing import launchers

    @pytest.mark.parametrize("check", launchers.CHECKS)
    def test_my_launcher(check, tmp_path):
        check(MyLauncher(), tmp_path)

`check_exit_code` really launches a job, so the engine must be installed, or a program that stands in for it must be on
PATH. `launcher.example` gives the values of --engine; AssertionError says which promise is broken.
"""

from __future__ import annotations

import base64
import inspect
import os
import re
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from paceline.errors import UnknownName
from paceline.launcher import Job, Launcher

SECRET = bytes(range(100, 132))
TASKS = ("chief", "worker:0", "worker:1", "server:0")
CODES = (0, 3)  # a run that has ended well, and one whose data are missing: neither is restarted
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGCHLD)


def check_declaration(launcher: Launcher, directory: Path) -> None:
    """Name, docstring and keys can be shown by `paceline list` and `paceline show`."""
    assert re.fullmatch(r"[a-z][a-z0-9-]*", launcher.name), f"{launcher.name!r} is no name for --on"
    assert (inspect.getdoc(launcher) or "").strip(), "the class has no docstring"
    for key, text in launcher.keys.items():
        assert re.fullmatch(r"[a-z][a-z0-9-]*", key), f"{key!r} is no key for --engine"
        assert text.strip(), f"the key {key} has no help"
        assert "\n" not in text, f"the help of {key} has several lines"
    assert launcher.example.keys() <= launcher.keys.keys(), "the example has keys that are not declared"


def check_unknown_keys(launcher: Launcher, directory: Path) -> None:
    """An unknown key of --engine is refused, with the known key that was probably meant."""
    for key in (*launcher.keys, "no-such-key"):
        refusal = _refusal(launcher, _job(directory, {f"{key}x": "1"}))
        assert refusal, f"the unknown key {key}x was accepted"
        meant = re.search(r"did you mean '(.*)'\?", refusal)
        assert meant is None or meant[1] in launcher.keys, f"{refusal}: there is no such key"
        assert meant is not None or key not in launcher.keys, f"{refusal}: it does not suggest {key}"
    assert not _refusal(launcher, _job(directory, launcher.example))


def check_declared_keys(launcher: Launcher, directory: Path) -> None:
    """`shown` reads no key of --engine that is not declared."""
    options = _Noted(launcher.example)
    launcher.shown(_job(directory, options))
    undeclared = options.read - launcher.keys.keys()
    assert not undeclared, f"`keys` lacks {', '.join(sorted(undeclared))}"


def check_shown(launcher: Launcher, directory: Path) -> None:
    """`shown` describes the command of the tasks, is repeatable, and has no side effects."""
    job = _job(directory, launcher.example)
    before = _state(directory)
    text = launcher.shown(job)
    assert _state(directory) == before, "shown changed files, the environment or signal handlers"
    assert launcher.shown(job) == text, "shown gives another text the second time"
    for word in job.command:
        assert word in text, f"shown does not have {word!r} of the tasks' command"


def check_secret(launcher: Launcher, directory: Path) -> None:
    """The secret is not in the text of `shown`."""
    _refuse_secret(launcher.shown(_job(directory, launcher.example)), "the text of shown")


def check_exit_code(launcher: Launcher, directory: Path) -> None:
    """`launch` returns the exit code of the chief, and leaves the secret only where no other user can read it."""
    for code in CODES:
        said: list[str] = []
        place = directory / f"run-{code}"
        place.mkdir()
        command = ("/bin/sh", "-c", f"exit {code}")
        job = Job(command, ("chief",), place, place.name, launcher.example, secret=SECRET, say=said.append)
        launcher.check(job)
        found = launcher.launch(job)
        assert found == code, f"the chief ended with {code}, launch returned {found}; it said: {said}"
        _refuse_secret("\n".join(said), "what launch said")
        for path in place.rglob("*"):
            if path.is_file() and path.stat().st_mode & 0o077:
                _refuse_secret(path.read_text(encoding="utf-8", errors="replace"), f"{path}, which others can read,")


CHECKS: tuple[Callable[[Launcher, Path], None], ...] = (
    check_declaration,
    check_unknown_keys,
    check_declared_keys,
    check_shown,
    check_secret,
    check_exit_code,
)


def _job(directory: Path, options: Mapping[str, str]) -> Job:
    command = ("paceline", "train", "toy", "--steps", "7", "--dir", str(directory))
    return Job(command, TASKS, directory, directory.name, options, secret=SECRET, say=lambda text: None)


def _refusal(launcher: Launcher, job: Job) -> str:
    try:
        launcher.check(job)
    except UnknownName as error:
        return str(error)
    return ""


class _Noted(Mapping[str, str]):
    """Options that note which keys are asked for."""

    def __init__(self, options: Mapping[str, str]) -> None:
        self._options, self.read = options, set[str]()

    def __getitem__(self, key: str) -> str:
        self.read.add(key)
        return self._options[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._options)

    def __len__(self) -> int:
        return len(self._options)


def _state(directory: Path) -> tuple[object, ...]:
    """What a dry run must not change: files of the run directory and of the working directory, environment, signals."""
    files = {path: path.stat().st_mtime_ns for path in directory.rglob("*")}
    return files, sorted(os.listdir()), dict(os.environ), [signal.getsignal(number) for number in SIGNALS]  # noqa: PTH208


def _refuse_secret(text: str, where: str) -> None:
    forms = (SECRET.hex(), base64.b64encode(SECRET).decode().rstrip("="), repr(SECRET)[2:-1], SECRET.decode("latin-1"))
    assert not any(form in text for form in forms), f"the secret is in {where}"
