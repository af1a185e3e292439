"""Runs of real processes that are killed on the way, and what must be left of them: nothing.

The launcher runs inside the test's own process; its roles are forks. `watch` is called several times a second: there
faults are dealt out and standstills are measured, without any sleeping.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.api.execute import execute
from paceline.config.validate import planned
from paceline.hook import Hook, Session
from paceline.processes.supervisor.status import RoleStatus, Status
from paceline.processes.supervisor.supervisor import Supervisor
from paceline.result import Result
from paceline.runs import checkpoint
from paceline.runs.run_directory import RunDirectory

BACK = 10.0  # seconds within which a killed role must be at work again
Kill = str | tuple[str, signal.Signals]  # a role's name, and a signal other than SIGKILL
LIMIT = 60.0  # seconds that a run may stand still, without progress and without CPU time; past them it hangs
LONGEST = 600.0  # seconds that any run may take, however busy the machine is
LINGER = 0.05  # seconds of a step near the goal, while faults are still to come


@dataclass
class Linger(Hook):
    """Slow steps near the goal until every fault has been dealt out: the run cannot be over before them."""

    gate: Path
    update: int
    seconds: float = LINGER

    def before_step(self, session: Session) -> None:
        if session.updates >= self.update and not self.gate.exists():
            threading.Event().wait(self.seconds)


@dataclass
class Fault:
    """One role that was killed: when, and how long it took until it worked again."""

    name: str
    pid: int
    step: int
    at: float
    back: float | None = None


@dataclass
class Story:
    """What was seen of a run."""

    directory: RunDirectory
    result: Result | None = None
    error: BaseException | None = None
    said: list[str] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    standstill: dict[str, float] = field(default_factory=dict)  # of each worker while nobody had killed it
    falls: list[int] = field(default_factory=list)  # whenever updates fell: how far they stayed above the checkpoint
    steps: dict[str, int] = field(default_factory=dict)  # how far each role had got at the end
    seconds: float = 0.0

    def told(self, *words: str) -> bool:
        """Whether one message holds all these words."""
        return any(all(word in text for word in words) for text in self.said)

    def logs(self) -> str:
        return "\n".join(f"== {log.name}\n{log.read_text()[-2000:]}" for log in sorted(self.directory.logs.iterdir()))


class Watch:
    """Kills roles one after another, each at a random moment after the last one is back, and notes who stands still."""

    def __init__(self, story: Story, kills: Sequence[Kill], seed: int, first: int, gap: float, done: Path) -> None:
        self._story, self._todo, self._random, self._done = story, list(kills), random.Random(seed), done
        self._first, self._gap = first, gap
        self._due: float | None = None
        self._seen: dict[str, tuple[int, float]] = {}  # worker -> its step, and since when
        self._updates = self._saved = 0
        if not self._todo:
            done.touch()

    def __call__(self, status: Status) -> None:
        now = time.monotonic()
        roles = {role.name: role for role in status.roles}
        self._story.steps = {role.name: role.step for role in status.roles}
        self._note_updates(status.updates)
        for fault in self._story.faults:
            # a worker that died inside a call has made all return to a checkpoint: to an earlier step
            fault.step = min(fault.step, roles[fault.name].step)
            if fault.back is None and at_work(roles[fault.name], fault):
                fault.back = now - fault.at
        down = {fault.name for fault in self._story.faults if fault.back is None}
        for role in status.roles:
            if role.name.startswith(("chief", "worker")):
                self._note_step(role, now, killed=role.name in down)
        self._deal(status, roles, now, waiting=bool(down))

    def _note_step(self, role: RoleStatus, now: float, killed: bool) -> None:
        step, since = self._seen.get(role.name, (0, now))
        if killed or role.state in ("ending", "done"):
            self._seen[role.name] = (role.step, now)
        elif role.step != step:
            if step > 0:
                worst = self._story.standstill.get(role.name, 0.0)
                self._story.standstill[role.name] = max(worst, now - since)
            self._seen[role.name] = (role.step, now)
        else:
            self._seen[role.name] = (step, since)

    def _note_updates(self, updates: int) -> None:
        if updates < self._updates:
            self._story.falls.append(updates - self._saved)
        self._updates = updates
        self._saved = max(checkpoint.steps(self._story.directory.checkpoints), default=0)

    def _deal(self, status: Status, roles: dict[str, RoleStatus], now: float, waiting: bool) -> None:
        if not self._todo:
            if not waiting:
                self._done.touch()
            return
        if waiting or status.updates < self._first:
            self._due = None
        elif self._due is None:
            self._due = now + self._gap * self._random.random()
        elif now >= self._due:
            kill = self._todo.pop(0)
            name, number = (kill, signal.SIGKILL) if isinstance(kill, str) else kill
            role = roles[name]
            assert role.pid > 0, f"{name} has no process"
            self._story.faults.append(Fault(role.name, role.pid, role.step, now))
            self._due = None
            with suppress(ProcessLookupError):
                os.kill(role.pid, number)


def at_work(role: RoleStatus, fault: Fault) -> bool:
    """Another process plays this role, and has got further with it."""
    if role.pid == fault.pid or role.state in ("starting", "restarting"):
        return False
    return role.step > fault.step or not role.name.startswith(("chief", "worker"))


class Standstill:
    """Whether a run hangs. It does not while roles proceed, nor while they use CPU time: on a busy machine a process
    may take minutes to start."""

    def __init__(self) -> None:
        self._began = self._moved = self._looked = time.monotonic()
        self._seen: Any = None
        self._used = 0.0

    def check(self, status: Status) -> None:
        now, roles = time.monotonic(), [(role.name, role.state, role.pid, role.step) for role in status.roles]
        if (status.updates, roles) != self._seen:
            self._seen, self._moved = (status.updates, roles), now
        elif now > self._moved + LIMIT / 10 and now > self._looked + LIMIT / 10:  # rarely: it reads all of /proc
            self._looked, used = now, cpu_seconds(os.getpid())
            if used > self._used + 0.1:
                self._moved = now
            self._used = used
        hangs = now > self._moved + LIMIT or now > self._began + LONGEST
        assert not hangs, f"the run hangs at update {status.updates}: {roles}"


def cpu_seconds(pid: int) -> float:
    """CPU time of all descendants of a process."""
    found = 0.0
    for child in children(pid):
        with suppress(OSError):
            fields = Path(f"/proc/{child}/stat").read_text(errors="replace").rpartition(")")[2].split()
            found += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        found += cpu_seconds(child)
    return found


def run(
    directory: Path,
    task: Any,
    scheme: Any,
    *,
    kills: Sequence[Kill] = (),
    seed: int = 0,
    first: int = 20,
    gap: float = 0.1,
    watch: Callable[[Status], None] | None = None,
    resume: bool = False,
    hooks: Sequence[Any] = (),
    launcher: Callable[..., Supervisor] = Supervisor,
    said: list[str] | None = None,
    **settings: Any,
) -> Story:
    """Run a plan to its end, whatever that is. `kills`: one after another, once `first` updates are made."""
    steps = settings.get("steps")
    gate = directory.parent / f"{directory.name}.gate"
    if kills and steps:
        hooks = [*hooks, Linger(gate, steps - min(200, steps // 2))]
    plan, chosen, objects = planned(task, scheme, hooks=hooks, seed=seed, **settings)
    place = RunDirectory.open(directory) if resume else RunDirectory.create(directory, "run")
    plan = dataclasses.replace(plan, directory=str(place.path), title="test")
    place.write_plan(dataclasses.asdict(dataclasses.replace(plan, hooks=[])))
    story, began = Story(place, said=[] if said is None else said), time.monotonic()
    look = Watch(story, kills, seed, first, gap, gate)

    standstill = Standstill()

    def looking(status: Status) -> None:
        standstill.check(status)
        look(status)
        if watch is not None:
            watch(status)

    try:
        tell = lambda _, text: story.said.append(text)  # noqa: E731
        story.result = execute(plan, chosen, objects, tell=tell, watch=looking, launcher=launcher)
    except (Exception, KeyboardInterrupt) as error:
        story.error = error.with_traceback(None)  # whose frames hold the launcher, and with it the shared memory
    story.seconds = time.monotonic() - began
    return story


def finished(story: Story, updates: int, *, over: int = 0) -> Result:
    """The result of a run that ended by itself with the asked number of updates, each fault behind it."""
    assert story.error is None, f"{story.error}\n{story.said}\n{story.logs()}"
    assert story.result is not None
    assert updates <= story.result.updates <= updates + over, story.said
    saved = checkpoint.newest(story.directory.checkpoints, lambda _: None)
    assert saved is not None
    assert saved.step == story.result.updates
    for fault in story.faults:
        assert fault.back is not None, f"{fault.name} did not come back: {story.said}"
        assert fault.back < BACK, f"{fault.name} was back after {fault.back:.1f} s"
    return story.result


# what is left


def children(of: int | None = None) -> list[int]:
    """Processes whose parent is this one (or that one), the dead among them that nobody has waited for."""
    parent, found = of or os.getpid(), []
    for place in Path("/proc").iterdir():
        if place.name.isdigit():
            with suppress(OSError):
                if int((place / "stat").read_text(errors="replace").rpartition(")")[2].split()[1]) == parent:
                    found.append(int(place.name))
    return found


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


def resident() -> int:
    """Bytes of memory that this process holds by itself; what it shares with files does not count."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * (int(fields["RssAnon"].split()[0]) + int(fields["RssShmem"].split()[0]))


def shared_files() -> set[str]:
    """Shared memory that has a name, as far as it can be ours. torch's names have the process that made them: one that
    lives and is not this one may belong to another test, beside this one."""
    found = set()
    for path in Path("/dev/shm").iterdir():
        maker = re.match(r"torch_(\d+)_", path.name)
        if maker is not None and int(maker[1]) != os.getpid() and Path("/proc", maker[1]).exists():
            continue
        if "paceline" in path.name or "torch" in path.name:
            found.add(path.name)
    return found


@contextmanager
def leaving_nothing() -> Iterator[None]:
    """Whatever happens inside leaves no child, no descriptor and no shared file behind."""
    before = set(children()), descriptors(), shared_files()
    yield
    gc.collect()  # a mapping of shared memory holds a descriptor
    assert set(children()) <= before[0]
    assert descriptors() <= before[1]
    assert shared_files() <= before[2]


def until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    """Wait for something outside any run; fails after so many seconds."""
    deadline, pause = time.monotonic() + seconds, threading.Event()
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {seconds:g} s"
        pause.wait(0.02)
