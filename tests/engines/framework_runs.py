"""Runs of real processes of a task file, and what must hold of them in every framework."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from beds.short_windows import short

import paceline
from paceline.processes.supervisor.status import Status
from paceline.result import Result


def trained(place: Path, task: Any, scheme: str = "async", **settings: Any) -> tuple[Result, list[str]]:
    """The result of a run, and what it said."""
    said: list[str] = []
    common = {"workers": 2, "lr": 0.1, "summaries": False, "watch": lambda _: None}
    result = paceline.train(task, scheme, directory=place, say=said.append, **common | settings)
    return result, said


class Killing:
    """Kills a worker by SIGKILL when the run has made some updates, and notes when another process has its role."""

    def __init__(self, role: str, after: int) -> None:
        self._role, self._after = role, after
        self.pid, self.back = 0, False

    def __call__(self, status: Status) -> None:
        role = next(one for one in status.roles if one.name == self._role)
        if not self.pid and status.updates >= self._after and role.pid:
            self.pid = role.pid
            os.kill(role.pid, signal.SIGKILL)
        self.back = self.back or bool(self.pid and role.pid not in (0, self.pid))


# updates that take longer than a worker needs to come back
UPDATES = {"async": 1500, "sync": 1500, "averaging": 600, "agn": 600}


def holds_in_processes(folder: Path, task: str, scheme: str) -> None:
    """A killed worker comes back; the run is resumed; its record repeats to the same bits; exact runs do not depend on
    the number of processes; the evaluator keeps the best."""
    kill, updates, hyper = Killing("worker:1", 60), UPDATES[scheme], short(scheme)
    settings = {"steps": updates, "evaluator": True, "checkpoint_steps": updates // 3, "lr": 0.1 if not hyper else 0.05}
    first, said = trained(folder / "killed", task, scheme, watch=kill, **settings, **hyper)
    assert not [text for text in said if "--start exec" in text]  # the launcher was clean: its roles were forked
    assert kill.back
    assert first.updates == updates
    assert first.restarts == 1
    assert first.metrics["accuracy"] > 0.6
    assert paceline.evaluate(folder / "killed", "best")["accuracy"] > 0.6
    again, _ = trained(folder / "killed", task, scheme, resume=True, **settings | hyper | {"steps": updates + 100})
    assert again.updates == updates + 100
    repeated = paceline.replay(folder / "killed")
    assert repeated.match, repeated.difference
    assert repeated.updates == updates + 100
    digests = {
        trained(folder / f"exact{n}", task, "sync", workers=n, steps=20, exact=True, micro=4)[0].digest for n in (1, 2)
    }
    assert len(digests) == 1
