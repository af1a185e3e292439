"""`paceline …` in processes of its own, as people and engines start it; and whether anything is left of them.

Every process of a test, down to the roles, inherits a variable with the test's own mark, by which it is found.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from processes import until

MARK = "PACELINE_TEST_MARK"
SECONDS = 120.0  # that a run may take; past them it hangs. Two cores may be busy with others
TASK = "digits-mlp"
TRAIN = ("train", TASK, "--scheme", "async", "lr=0.2", "--steps", "400", "--no-summaries")

# slow steps near the end until the gate is open: a role that is to be killed is, before the run is over
LINGER = """
import threading
from dataclasses import dataclass
from pathlib import Path
from paceline.hook import Hook

@dataclass
class Linger(Hook):
    gate: str = ""
    update: int = 200
    seconds: float = 0.05

    def before_step(self, session):
        if session.updates >= self.update and not Path(self.gate).exists():
            threading.Event().wait(self.seconds)
"""


class Shell:
    """One command."""

    def __init__(self, folder: Path, name: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.name, self._folder = name, folder
        with self._path("out").open("ab") as out, self._path("err").open("ab") as err:
            self.process = subprocess.Popen(
                command,
                cwd=folder,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
            )

    def _path(self, kind: str) -> Path:
        return self._folder / f"{self.name.replace(':', '-')}.{kind}"

    @property
    def out(self) -> str:
        return self._path("out").read_text()

    @property
    def err(self) -> str:
        return self._path("err").read_text()

    def ended(self, seconds: float = SECONDS) -> int:
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} runs after {seconds:g} s:\n{self.err}") from None


class Shells:
    """All commands of a test."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._mark = folder, uuid.uuid4().hex
        self.shells: list[Shell] = []
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("PACELINE_", "TF_CONFIG"))}
        path = f"{Path(sys.executable).parent}:{clean.get('PATH', '')}"
        self._environment = clean | {MARK: self._mark, "XDG_CONFIG_HOME": str(folder / "config"), "PATH": path}
        if "PACELINE_DATA" in os.environ:
            self._environment["PACELINE_DATA"] = os.environ["PACELINE_DATA"]

    def __call__(self, name: str, *words: str, **environment: str) -> Shell:
        """`paceline WORDS`."""
        return self.program(name, sys.executable, "-P", "-m", "paceline", *words, **environment)

    def program(self, name: str, *command: str, **environment: str) -> Shell:
        shell = Shell(self.folder, name, command, self._environment | environment)
        self.shells.append(shell)
        return shell

    def all_ended(self, *but: Shell) -> None:
        for shell in self.shells:
            if shell not in but:
                assert shell.ended() == 0, f"{shell.name}:\n{self.said()}"

    def said(self) -> str:
        return "\n".join(f"== {shell.name}\n{shell.err[-3000:]}{shell.out[-500:]}" for shell in self.shells)

    def processes(self, variable: str = "") -> dict[int, str]:
        """Processes that carry the mark (and this variable): pid and command line."""
        found = {}
        for place in Path("/proc").iterdir():
            if place.name.isdigit() and int(place.name) != os.getpid():
                with suppress(OSError):
                    variables = (place / "environ").read_bytes().split(b"\0")
                    if f"{MARK}={self._mark}".encode() in variables and (
                        not variable or variable.encode() in variables
                    ):
                        words = (place / "cmdline").read_bytes().rstrip(b"\0").replace(b"\0", b" ")
                        found[int(place.name)] = words.decode(errors="replace")
        return found

    def role(self, name: str) -> int | None:
        """The process that plays a role."""
        own = [number for number, words in self.processes().items() if words == f"paceline role {name}"]
        return own[0] if own else None

    def rank(self, variable: str) -> int:
        """The process that an engine has started as one of its ranks, not the role that it has forked; 0: none."""
        own = self.processes(variable)
        return next((number for number, words in own.items() if "paceline train" in words), 0)

    def kill_role(self, name: str) -> None:
        """kill -9; another process has taken its place when this returns."""
        until(lambda: self.role(name) is not None, SECONDS, f"{name} is there")
        number = self.role(name)
        assert number is not None
        os.kill(number, signal.SIGKILL)
        until(lambda: self.role(name) not in (None, number), SECONDS, f"{name} is back:\n{self.said()}")


@contextmanager
def shells(folder: Path) -> Iterator[Shells]:
    """Afterwards nothing may be left; whatever is, is ended."""
    made = Shells(folder)
    try:
        yield made
        until(lambda: not made.processes(), 20, f"all of them have gone: {made.processes()}")
    finally:
        for number in made.processes():
            with suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        for shell in made.shells:
            shell.process.wait()


def linger(folder: Path, update: int = 200, seconds: float = 0.05) -> tuple[Path, tuple[str, ...]]:
    """The gate, and the words of a command that wait for it."""
    (folder / "linger.py").write_text(LINGER)
    gate = folder / "gate"
    return gate, ("--hook", f"{folder}/linger.py:Linger:gate={gate},update={update},seconds={seconds}")


def updates_of(folder: Path) -> int:
    """How far the run has got, as its checkpoints say."""
    return max((int(path.name) for path in (folder / "checkpoints").glob("0*")), default=-1)


def result_of(run: Path) -> dict[str, Any]:
    """How a run ended."""
    told: dict[str, Any] = json.loads((run / "result.json").read_text())
    return told


def trained(run: Path, updates: int = 400, accuracy: float = 0.85) -> dict[str, Any]:
    """The result of a run that has done what was asked; async workers may be inside one more update."""
    result = result_of(run)
    assert "error" not in result, result["error"]
    assert result["updates"] == updates
    assert result["metrics"]["accuracy"] > accuracy
    return result


def free_ports(count: int) -> list[int]:
    """Ports that are free at this moment."""
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()
