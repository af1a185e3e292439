"""Pairs of deaths: a process, and one inside a call, within some milliseconds of each other.

A process ("server:1 inside") is stopped, looked at, and killed only if it stands inside a call: any scheme can be had
that way. With one server the calls are performed by workers. The second death comes by a timer of the launcher's
process, so that it meets the launcher in whatever it does then.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from processes import Story, leaving_nothing, run

from paceline.hook import Hook, Session
from paceline.processes.roles.roles import Role
from paceline.processes.supervisor.patience import is_stopped
from paceline.processes.supervisor.status import Status
from paceline.processes.supervisor.supervisor import Supervisor

WITHIN = 0.15  # seconds between the two deaths, at most
TRIES = 10.0  # seconds to find a process inside a call


@dataclass
class Enough(Hook):
    """Ends the run when all deaths are behind it, however fast it is."""

    gate: Path
    roles = frozenset({"chief"})

    def before_step(self, session: Session) -> None:
        if self.gate.exists():
            session.stop("enough")


def kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        if pid:
            os.kill(pid, signal.SIGKILL)


def kill_inside_a_call(launcher: Supervisor, part: Role) -> bool:
    """Whether the process could be had inside a call."""
    until, pid = time.monotonic() + TRIES, pid_of(launcher, part)
    with suppress(ProcessLookupError):
        while time.monotonic() < until:
            os.kill(pid, signal.SIGSTOP)
            while not is_stopped(pid):
                if _is_dead(pid):
                    return False
            if launcher.recovery.torn(part):
                os.kill(pid, signal.SIGKILL)
                return True
            os.kill(pid, signal.SIGCONT)
            threading.Event().wait(0.001)
    return False


def pid_of(launcher: Supervisor, part: Role) -> int:
    board = launcher.board
    return int((board.server_pid if part.kind == "server" else board.pid)[part.index])


def _is_dead(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


class Pairs:
    """Deals out pairs such as ("worker:1", "server:0 inside"), each when all workers have made steps since the last."""

    def __init__(self, pairs: Sequence[tuple[str, str]], seed: int, gate: Path) -> None:
        self._todo, self._random, self._gate = list(pairs), random.Random(seed), gate
        self._launcher: Supervisor | None = None
        self._steps: list[int] = []
        self.torn = 0  # processes that were killed inside a call

    def launcher(self, *args: Any, **named: Any) -> Supervisor:
        self._launcher = Supervisor(*args, **named)
        return self._launcher

    def __call__(self, status: Status) -> None:
        launcher = self._launcher
        assert launcher is not None
        board = launcher.board
        steps = board.t.tolist()
        moved = all(now != then for now, then in zip(steps, self._steps or [0] * len(steps), strict=True))
        if not moved or not all(board.alive) or board.get("checkpoint") < 1:
            return
        if not self._todo:
            self._gate.touch()
            return
        first, second = self._todo.pop(0)
        self._steps = steps
        self._strike(launcher, first)
        self._after(self._random.random() * WITHIN, lambda: self._strike(launcher, second))

    def _strike(self, launcher: Supervisor, name: str) -> None:
        kind, _, index = name.removesuffix(" inside").partition(":")
        part = Role(kind, int(index or 0))
        if name.endswith(" inside"):
            self.torn += kill_inside_a_call(launcher, part)
        else:
            kill(pid_of(launcher, part))

    def close(self) -> None:
        """Let go of the launcher, and with it of the shared memory."""
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        self._launcher = None

    @staticmethod
    def _after(seconds: float, act: Callable[[], None]) -> None:
        signal.signal(signal.SIGALRM, lambda *_: act())
        signal.setitimer(signal.ITIMER_REAL, seconds)


def run_with_pairs(
    directory: Path, scheme: Any, pairs: Sequence[tuple[str, str]], seed: int, **settings: Any
) -> tuple[Story, Pairs]:
    gate = directory.with_suffix(".enough")
    dealer = Pairs(pairs, seed, gate)
    settings = {"workers": 3, "checkpoint_seconds": 0.1, "restarts": 20, "summaries": False} | settings
    with leaving_nothing():
        try:
            story = run(
                directory,
                "digits-mlp",
                scheme,
                seed=seed,
                watch=dealer,
                launcher=dealer.launcher,
                hooks=[Enough(gate)],
                **settings,
            )
        finally:
            dealer.close()
    return story, dealer
