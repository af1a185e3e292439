"""Runs on the hosts of a bed: they go on until they are told, and meanwhile roles are found, watched and killed."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from beds.hosts import Host, Running, until

from paceline.runs import checkpoint
from paceline.runs.run_directory import RunDirectory

LIMIT = 120.0  # seconds that anything may take on a busy machine
COMMAND = [sys.executable, "-P", "-m", "paceline", "train", "digits-mlp", "--scheme", "async", "lr=0.1"]
LEAST = 600  # updates, after which something has been learnt
_ROLE = re.compile(r"paceline role (\S+)")

_HOOK = """
import threading
from dataclasses import dataclass
from pathlib import Path
from paceline.hook import Hook, Session

@dataclass
class UntilTold(Hook):
    folder: str

    def after_step(self, session: Session) -> None:
        if not session.worker.rank:
            Path(self.folder, "progress.new").write_text(str(session.updates))
            Path(self.folder, "progress.new").replace(Path(self.folder, "progress"))  # never half written
        if session.updates >= {least} and Path(self.folder, "enough").exists():
            session.stop("enough")
        threading.Event().wait(0.002)
"""


def options(place: Path) -> list[str]:
    """What a run needs that is to be told when it is enough."""
    (place / "told.py").write_text(_HOOK.format(least=LEAST))
    hook = ["--hook", f"{place}/told.py:UntilTold:folder={place}", "--steps", "1000000"]
    return [*hook, "--checkpoint-seconds", "1", "--patience", "8", "--dir", str(place / "run")]


@dataclass
class Story:
    """A run in `place`, begun by `process`, whose roles are on `hosts`."""

    place: Path
    hosts: Mapping[str, Host]
    process: Running
    output: Path

    @property
    def folder(self) -> Path:
        return self.place / "run"

    @property
    def progress(self) -> int:
        """Updates so far, as the chief has told last; -1: nothing yet."""
        try:
            return int((self.place / "progress").read_text())
        except (OSError, ValueError):
            return -1

    def step(self, role: str) -> int:
        """How far a role is, as the hub has written it down; -1: nobody knows."""
        told = RunDirectory(self.folder).status() or {}
        return next((int(one["step"]) for one in told.get("roles", ()) if one["name"] == role), -1)

    def roles(self) -> dict[str, tuple[str, int]]:
        """The host and process of each role that is there."""
        found = {}
        for name, host in self.hosts.items():
            for pid, words in host.processes().items():
                if match := _ROLE.fullmatch(words):
                    found[match[1]] = (name, pid)
        return found

    def stands(self) -> dict[str, str]:
        """Where each role is."""
        return {role: host for role, (host, _) in self.roles().items()}

    def task(self, role: str) -> int:
        """The process of which a role is a child: hub or agent."""
        stat = Path(f"/proc/{self.roles()[role][1]}/stat").read_text()
        return int(stat.rpartition(")")[2].split()[1])

    def until(self, condition: Callable[[], bool], what: str) -> None:
        def holds() -> bool:
            assert self.process.poll() is None, f"it ended before: {what}"
            return condition()

        try:
            until(holds, LIMIT, what)
        except AssertionError as error:
            raise AssertionError(f"{error}: {self.told()}") from None

    def until_it_gets_on(self) -> None:
        before = self.progress
        self.until(lambda: self.progress not in (before, -1), f"progress after update {before}")

    def until_it_stands(self) -> None:
        """No progress for three seconds: somebody is waited for."""
        pause = threading.Event()
        for _ in range(int(LIMIT)):
            before = self.progress
            pause.wait(3)
            if self.progress == before:
                return
        raise AssertionError(f"it does not stand still: {self.told()}")

    def until_it_trains(self, roles: int) -> None:
        before = self.progress
        self.until(lambda: len(self.roles()) == roles and self.progress not in (before, -1), f"{roles} roles train")

    def until_saved(self) -> None:
        """One more checkpoint, begun and written after this moment."""
        for _ in range(2):
            known = self._checkpoints()
            self.until(lambda known=known: bool(self._checkpoints() - known), "one more checkpoint")

    def kill(self, role: str) -> None:
        """kill -9; another process plays the role, and the run gets on."""
        _, pid = self.roles()[role]
        os.kill(pid, signal.SIGKILL)
        self.until(lambda: self.roles().get(role, ("", pid))[1] != pid, f"another {role}")
        self.until_it_gets_on()

    def enough(self) -> dict[str, Any]:
        """Tell it so; it must end by itself, in order, and have learnt something."""
        (self.place / "enough").touch()
        assert self.process.wait(LIMIT) == 0, self.told()
        result: dict[str, Any] = json.loads((self.folder / "result.json").read_text())
        assert result["updates"] >= LEAST
        assert result["metrics"]["accuracy"] > 0.85
        return result

    def told(self) -> str:
        logs = [f"== {log.name}\n{log.read_text()[-2000:]}" for log in sorted((self.folder / "logs").glob("*"))]
        return "\n".join([self.output.read_text(), *logs])

    def _checkpoints(self) -> set[int]:
        return set(checkpoint.steps(self.folder / "checkpoints"))
