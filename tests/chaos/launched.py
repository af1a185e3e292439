"""A trial's run: its launcher in a session of its own, and somebody outside who deals out the blows."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import sys
import threading
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from linger import Linger
from processes import children
from trials import SPAN, Blow, Trial

from paceline import signals
from paceline.api.execute import execute
from paceline.config.validate import planned
from paceline.processes.supervisor.supervisor import Supervisor
from paceline.runs.run_directory import RunDirectory

LIMIT = 100.0  # seconds after which a run hangs
SIGNALS = {
    "kill": signal.SIGKILL,
    "stop": signal.SIGSTOP,
    "continue": signal.SIGCONT,
    "terminate": signal.SIGTERM,
    "interrupt": signal.SIGINT,
}


@dataclass
class Ended:
    """What came of a run."""

    place: Path
    code: int | None  # None: it hung and was killed
    seconds: float
    text: str  # what the launcher's process has said
    dealt: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)  # processes


def run(trial: Trial, place: Path) -> Ended:
    """Fork a launcher, deal out the blows, wait for the end."""
    gate, output, began = place.with_suffix(".gate"), place.with_suffix(".out"), time.monotonic()
    sys.stdout.flush()
    handled, handles = os.pipe()
    pid = os.fork()
    if not pid:
        os._exit(_launch(trial, place, gate, output, handles))
    os.close(handles)
    os.read(handled, 1)  # until then signals would meet a copy of this process
    os.close(handled)
    began = time.monotonic()
    dealt: list[str] = []
    code = _deal(trial.blows, pid, began, dealt)
    gate.touch()
    while code is None and time.monotonic() < began + LIMIT:
        code = _ended(pid, 0.05)
    if code is None:
        dealt.append(f"it hangs: {_standing(pid)}")
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    left = _left(pid)
    for one in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(one.split()[0]), signal.SIGKILL)
    return Ended(place, code, time.monotonic() - began, output.read_text(errors="replace"), dealt, left)


def _launch(trial: Trial, place: Path, gate: Path, output: Path, handles: int) -> int:
    """In the forked process: be the launcher. Gives the exit code, as the command would. `handles`: a pipe that is
    written to when signals are handled."""
    os.setsid()
    try:
        signals.raise_while_working()  # as the command does
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.write(handles, b"!")
        os.close(handles)
        settings = dict(trial.settings)
        goal = settings["steps"]
        hooks = [Linger(str(gate), max(goal - 100, goal // 2))] if trial.ends == "goal" else []
        plan, chosen, objects = planned(settings.pop("task"), trial.scheme, hooks=hooks, hyper=trial.hyper, **settings)
        made = RunDirectory.create(place, "run")
        plan = dataclasses.replace(plan, directory=str(made.path), title=trial.seed)
        made.write_plan(dataclasses.asdict(plan))
        say = lambda _, text: print(text, flush=True)  # noqa: E731
        execute(plan, chosen, objects, tell=say, watch=lambda _: None, launcher=_counting)
    except (KeyboardInterrupt, signals.Interrupted):
        if (place / "plan.json").exists():
            RunDirectory(place).write_interrupted()  # as the command does
        return signals.EXIT_CODE
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        return 1
    finally:
        sys.stdout.flush()
    return 0


def _counting(*given: Any, **rest: Any) -> Supervisor:
    made = Supervisor(*given, **rest)
    signals.count_from_now_on(made.asked)
    return made


def _deal(blows: list[Blow], pid: int, began: float, dealt: list[str]) -> int | None:
    """Deal them out at their times; gives the launcher's exit code if it ends meanwhile."""
    for blow in blows:
        while (left := began + blow.at - time.monotonic()) > 0:
            if (code := _ended(pid, min(left, 0.05))) is not None:
                return code
        target = _found(blow.whom, pid)
        dealt.append(f"{time.monotonic() - began:.3f} {blow.what} {blow.whom}{'' if target else ' (not there)'}")
        if target:
            with contextlib.suppress(ProcessLookupError):
                (os.killpg if blow.whom == "group" else os.kill)(target, SIGNALS[blow.what])
    while time.monotonic() < began + SPAN:
        if (code := _ended(pid, 0.05)) is not None:
            return code
    return None


def _ended(pid: int, seconds: float) -> int | None:
    """The exit code of a process if it ends within this time."""
    until = time.monotonic() + seconds
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() >= until:
            return None
        threading.Event().wait(0.002)


def title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def _found(whom: str, pid: int) -> int:
    if whom in ("launcher", "group"):
        return pid
    return next((one for one in children(pid) if title(one) == f"paceline role {whom}"), 0)


def _left(session: int) -> list[str]:
    """Processes of a session that live on; the kernel may need a moment to end those of a killed launcher."""
    until = time.monotonic() + 5
    while found := _of_session(session):
        if time.monotonic() > until:
            break
        threading.Event().wait(0.02)
    return found


def _of_session(session: int) -> list[str]:
    found = []
    for place in Path("/proc").iterdir():
        if place.name.isdigit():
            with contextlib.suppress(OSError):
                state, _, _, home = (place / "stat").read_text(errors="replace").rpartition(")")[2].split()[:4]
                if int(home) == session and state not in "ZX":
                    found.append(f"{place.name} {title(int(place.name))}")
    return found


def _standing(pid: int) -> str:
    """Where the processes of a run stand."""
    rows = []
    for one in [pid, *children(pid)]:
        with contextlib.suppress(OSError):
            rows.append(f"{title(one)}: {Path(f'/proc/{one}/wchan').read_text()}")
    return "; ".join(rows)
