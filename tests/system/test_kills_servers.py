"""Processes that die inside a call: what they were changing may be torn, so all go back to the last checkpoint.

With one server the calling worker performs the call, with several servers each of them performs its part.

Data: scikit-learn's digits.
"""

from __future__ import annotations

import os
import re
import signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from processes import Linger, Story, finished, leaving_nothing, run, until

from paceline import replay
from paceline.errors import RunError
from paceline.hook import Hook, Session
from paceline.processes.calls import late_copies
from paceline.processes.calls.late_copies import LateCopies
from paceline.processes.supervisor.status import Status
from paceline.scheme import Scheme, State, Vector, on_server
from paceline.schemes.async_ import AsyncSGD
from paceline.schemes.sync import SyncSGD

STEPS, EVERY = 400, 100


def die_if_told(victim: str, s: State) -> None:
    """Spoil half of x and be gone, if this process is the one that the file names; well between two checkpoints."""
    if not EVERY // 2 <= s.v % EVERY < EVERY - 20:
        return
    named = ""
    with suppress(FileNotFoundError):  # another server may be the victim, and take the file with it
        named = Path(victim).read_text()
    if named == str(os.getpid()):
        Path(victim).unlink()
        s.x[: len(s.x) // 2] = 1e6
        os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class FrailAsync(AsyncSGD, name="frail-async"):
    """Asynchronous SGD whose server dies inside a push."""

    victim: str = ""

    @on_server
    def push(self, s: State, g: Vector, v: int) -> None:
        die_if_told(self.victim, s)
        if v > s.v:
            Path(f"{self.victim}.future").touch()
        AsyncSGD.push.function(self, s, g, v)


@dataclass(frozen=True)
class FrailSync(SyncSGD, name="frail-sync"):
    """Synchronous SGD whose server dies inside a push."""

    victim: str = ""

    @on_server
    def push(self, s: State, g: Vector, v: int, rank: int) -> None:
        die_if_told(self.victim, s)
        SyncSGD.push.function(self, s, g, v, rank)


@dataclass(frozen=True)
class Doomed(AsyncSGD, name="doomed"):
    """Asynchronous SGD whose server dies inside every push."""

    @on_server
    def push(self, s: State, g: Vector, v: int) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class Frozen(AsyncSGD, name="frozen"):
    """Asynchronous SGD in which one process is stopped inside a push, once."""

    flag: str = ""

    @on_server
    def push(self, s: State, g: Vector, v: int) -> None:
        if s.v == EVERY + 50 and not Path(self.flag).exists():
            Path(self.flag).touch()
            s.x[: len(s.x) // 2] = 1e6
            os.kill(os.getpid(), signal.SIGSTOP)
        AsyncSGD.push.function(self, s, g, v)


class Marksman:
    """Names servers to die, one after another, once the first checkpoint on the way is there."""

    def __init__(
        self, victim: Path, servers: list[str], gate: Path, needed: str = "chief", after: Path | None = None
    ) -> None:
        self._victim, self._servers, self._gate = victim, list(servers), gate
        self._needed, self._after = needed, after
        self._server, self._aimed = "", 0

    def __call__(self, status: Status) -> None:
        pids = {role.name: role.pid for role in status.roles}
        if self._victim.exists():
            if pids[self._server] != self._aimed:  # it was seen before its predecessor was known to be dead
                self._aim(pids)
        elif not self._servers:
            seen = self._after is None or self._after.with_suffix(".over").exists()
            if seen and any(role.name == self._needed and role.step for role in status.roles):
                self._gate.touch()  # the run may end
        elif status.updates >= EVERY + 20 and (self._after is None or self._after.exists()):
            self._server = self._servers.pop(0)
            self._aim(pids)

    def _aim(self, pids: dict[str, int]) -> None:
        self._aimed = pids[self._server]
        aside = self._victim.with_suffix(".new")
        aside.write_text(str(self._aimed))
        aside.replace(self._victim)


def shoot(
    tmp_path: Path,
    scheme: type[Scheme],
    victims: list[str],
    needed: str = "chief",
    after: Path | None = None,
    **settings: Any,
) -> Story:
    victim, gate = tmp_path / "victim", tmp_path / "gate"
    settings = {"workers": 2, "steps": STEPS, "checkpoint_steps": EVERY} | settings
    hooks = [Linger(gate, EVERY + 10, 0.02), *settings.pop("hooks", ())]
    with leaving_nothing():
        return run(
            tmp_path / "run",
            "digits-mlp",
            scheme(victim=str(victim)),  # type: ignore[call-arg]
            watch=Marksman(victim, victims, gate, needed, after),
            hooks=hooks,
            **settings,
        )


@pytest.mark.parametrize(
    ("scheme", "number", "victims"),
    [
        (FrailAsync, 1, ["worker:1", "chief"]),
        (FrailSync, 1, ["worker:1"]),
        (FrailAsync, 2, ["server:0", "server:1"]),
        (FrailSync, 2, ["server:1", "server:0"]),
    ],
)
def test_all_go_back_to_the_last_checkpoint(
    scheme: type[Scheme], number: int, victims: list[str], tmp_path: Path
) -> None:
    story = shoot(tmp_path, scheme, victims, servers=number)
    result = finished(story, STEPS)
    pattern = re.compile(r"(server:\d|worker:1|chief) died inside a call: .* update (\d+) \((\d+) updates are lost")
    told = [match.groups() for match in map(pattern.match, story.said) if match]
    assert [victim for victim, _, _ in told] == victims
    assert all(int(step) >= EVERY for _, step, _ in told), "an older checkpoint than the newest one"
    assert result.rolled_back_updates == sum(int(lost) for _, _, lost in told) > 0
    assert result.restarts == len(victims)
    assert result.metrics["accuracy"] > 0.9  # nothing of the spoilt half is left


@dataclass
class SlowGradient(Hook):
    """One worker computes while the server dies and all others go back."""

    flag: Path

    def after_gradient(self, session: Session, loss: float) -> None:
        begun = session.updates
        if session.worker.rank == 1 and begun >= EVERY + 40 and not self.flag.exists():
            self.flag.touch()
            until(lambda: session.updates < begun, 20, "the return to the checkpoint")
            self.flag.with_suffix(".over").touch()


def test_a_gradient_of_the_course_that_was_given_up_enters_nothing(tmp_path: Path) -> None:
    slow = tmp_path / "slow"
    story = shoot(tmp_path, FrailAsync, ["chief"], after=slow, hooks=[SlowGradient(slow)])
    result = finished(story, STEPS)
    assert result.rolled_back_updates > 0
    assert not (tmp_path / "victim.future").exists()
    assert sum(result.staleness.histogram.values()) == STEPS


def test_a_worker_that_waits_in_a_hook_goes_back_with_the_others(tmp_path: Path) -> None:
    story = shoot(tmp_path, FrailAsync, ["chief"], "worker:1", hooks=["global-step-waiter:step=200"])
    result = finished(story, STEPS)
    assert result.rolled_back_updates > 0
    assert story.steps["worker:1"] > 0  # it did come


@pytest.mark.parametrize(
    ("servers", "first", "second"),
    [(1, "chief", "worker:1"), (1, "worker:1", "chief"), (1, "chief", "server:0"), (2, "server:0", "worker:1")],
)
def test_a_process_dies_while_all_go_back(servers: int, first: str, second: str, tmp_path: Path) -> None:
    """Its successor must not go on from cells of the course that was given up."""
    seen: dict[str, int] = {}

    def also(status: Status) -> None:
        marksman(status)
        pids = {role.name: role.pid for role in status.roles}
        if first in seen and pids[first] != seen[first] and second not in seen:
            seen[second] = pids[second]  # the first is just back: the others are on their way to the checkpoint
            os.kill(pids[second], signal.SIGKILL)
        seen.setdefault(first, pids[first])

    victim, gate = tmp_path / "victim", tmp_path / "gate"
    marksman = Marksman(victim, [first], gate)
    story = run(
        tmp_path / "run",
        "digits-mlp",
        FrailSync(victim=str(victim)),
        watch=also,
        hooks=[Linger(gate, EVERY + 10, 0.02)],
        workers=2,
        servers=servers,
        steps=STEPS,
        checkpoint_steps=EVERY,
        patience=5.0,
    )
    result = finished(story, STEPS)
    assert result.restarts == 2
    assert result.rolled_back_updates > 0


@pytest.mark.parametrize(("servers", "who"), [(1, "(chief|worker:1)"), (2, "server:[01]")])
def test_a_process_that_dies_inside_every_call_is_given_up(servers: int, who: str, tmp_path: Path) -> None:
    with leaving_nothing():
        story = run(tmp_path / "run", "digits-mlp", Doomed(), workers=2, servers=servers, steps=STEPS, restarts=2)
    assert isinstance(story.error, RunError)
    assert re.search(f"{who} died by signal SIGKILL 3 times in a row", str(story.error))
    assert "--restarts allows 2" in str(story.error)


def test_who_is_stopped_inside_a_call_is_found_and_killed(tmp_path: Path) -> None:
    scheme = Frozen(flag=str(tmp_path / "flag"))
    with leaving_nothing():
        story = run(
            tmp_path / "run", "digits-mlp", scheme, workers=2, steps=STEPS, checkpoint_steps=EVERY, patience=1.5
        )
    result = finished(story, STEPS)
    assert story.told("has been stopped for 1.5 s")
    assert story.told("died inside a call")
    assert (result.restarts, result.rolled_back_updates > 0) == (1, True)
    assert result.metrics["accuracy"] > 0.9


def test_a_worker_that_dies_while_it_copies_a_row_sends_all_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has released the server's lock: the others go on until one of them needs the row."""
    plain, mark, copied = LateCopies.perform, tmp_path / "struck", []

    def struck(self: LateCopies) -> None:
        if self._rows and b"worker:1" in Path("/proc/self/cmdline").read_bytes() and not mark.exists():
            copied.append(1)
            if len(copied) == 60:
                row, value = self._rows[0]
                row[: len(row) // 2] = value[: len(row) // 2]
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        plain(self)

    monkeypatch.setattr(LateCopies, "perform", struck)
    monkeypatch.setattr(late_copies, "SMALL", 0)
    with leaving_nothing():
        story = run(tmp_path / "run", "digits-mlp", "sync", workers=3, steps=STEPS, checkpoint_steps=EVERY)
    result = finished(story, STEPS)
    assert any(line.startswith("worker:1 died inside a call: returning to the checkpoint") for line in story.said)
    assert result.restarts == 1
    told = replay(tmp_path / "run")
    assert told.match, told.difference
