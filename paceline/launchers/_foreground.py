"""An engine's command as a child of this process: it shares our output, gets Ctrl-C from us, and ends when we end.

Some engines end all processes as soon as one dies. Then the run is restarted from its newest checkpoint.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path

from paceline import signals
from paceline.errors import UsageError
from paceline.launcher import Job
from paceline.network.secure import secret
from paceline.processes.line_buffer import LineBuffer
from paceline.processes.parent_death import die_with_parent
from paceline.runs import checkpoint

FINAL = (0, 2, 3, 130)  # done, wrong usage, data missing, interrupted: a restart would end the same way
LOOK = 0.1  # seconds between two looks for a signal
PAUSE = 1.0  # seconds before a restart: processes that hold ports and the lock of the run directory are ending


def seats(hosts: Sequence[str], tasks: int) -> list[str]:
    """The host of each task: spread evenly, the first hosts take one more; a host named twice counts twice."""
    if len(hosts) > tasks:
        raise UsageError(f"there are more hosts ({len(hosts)}) than tasks ({tasks}): omit some")
    each, more = divmod(tasks, len(hosts))
    return [host for place, host in enumerate(hosts) for _ in range(each + (place < more))]


def roles(tasks: Sequence[str]) -> str:
    """PACELINE_PLACEMENT: the role of each task, in the order in which the engine numbers them."""
    return ",".join(task.partition(":")[0] for task in tasks)


def as_script(environment: Mapping[str, str], command: Sequence[str]) -> str:
    """Environment and command as a shell script."""
    lines = [f"export {key}={shlex.quote(value)}" for key, value in sorted(environment.items())]
    return "\n".join([*lines, shlex.join(command), ""])


def followed(command: Sequence[str], environment: Mapping[str, str], stop: signal.Signals = signal.SIGTERM) -> int:
    """Run an engine's command to its end. Returns its exit code; 130 after an interruption.

    The first Ctrl-C (or SIGTERM) sends `stop`, after which the run ends in order; the second one kills.
    """
    asked, heeded, ours = signals.Counter(), 0, os.getpid()
    code: int | None = None
    with signals.handling(dict.fromkeys((signal.SIGINT, signal.SIGTERM), asked)):
        process = subprocess.Popen(
            command,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # otherwise a terminal's Ctrl-C would reach it directly, too
            preexec_fn=lambda: die_with_parent(signal.SIGTERM, ours),
        )
        while code is None:
            with suppress(subprocess.TimeoutExpired):
                code = process.wait(LOOK)
            while code is None and heeded < asked.count:
                heeded += 1
                with suppress(ProcessLookupError):
                    process.send_signal(stop) if heeded == 1 else os.killpg(process.pid, signal.SIGKILL)
    return 130 if asked.count else code if code >= 0 else 128 - code  # MPICH may forget a rank's code


def repeated(job: Job, begin: Callable[[], int], restarts: int, over: Callable[[int, int], bool] | None = None) -> int:
    """Call `begin` until the run ends, at most `restarts` more times in a row without a newer checkpoint. `begin`
    returns an exit code; `over` says whether the run has ended with that code, at its first start or a later one."""
    in_vain, saved = 0, -1
    for starts in count(1):
        code = begin()
        if over(code, starts) if over else ended_by_itself(code, job.directory):
            break
        newest = max(checkpoint.steps(job.directory / "checkpoints"), default=-1)
        in_vain = 1 if newest > saved else in_vain + 1
        saved = max(saved, newest)
        if in_vain > restarts:
            times = f"{in_vain} times in a row without a newer checkpoint" if in_vain > 1 else "once"
            job.say(f"the job broke off {times} (exit code {code}); --engine restarts= allows {restarts}")
            break
        where = f"the checkpoint of update {newest}" if newest >= 0 else "the beginning"
        job.say(f"the job broke off (exit code {code}); starting it again from {where}, {in_vain} of {restarts}")
        time.sleep(PAUSE)
    return code


def ended_by_itself(code: int, directory: Path) -> bool:
    """Whether the run itself has ended, well or with an error; otherwise one of its processes was killed."""
    if code in FINAL:
        return True
    if code != 1:  # of a signal: engines report 128 + number, or the number
        return False
    try:
        return "error" in json.loads((directory / "result.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False


def as_listing(job: Job, first: Sequence[str], what: str, more: Callable[[str], str], secret_goes: str) -> str:
    """What an engine's own library is asked for, as text: lines of the engine, then the variables of each task. `what`:
    the engine's word for a task; `more`: variables of a task that are known only later."""
    lines = [*first, f"command: {shlex.join(job.command)}", f"directory: {Path.cwd()}"]
    for index, task in enumerate(job.tasks):
        words = [f"{name}={value}" for name, value in job.environment(task).items()]
        lines.append(f"{what} {index}: {shlex.join(words)} {more(task)}")
    return "\n".join([*lines, f"PACELINE_SECRET goes to each {what} {secret_goes} and is not shown", ""])


class Tail:
    """Reads what another process appends to a file, which may not exist yet, or not be seen from this machine."""

    def __init__(self, path: Path, at: int = 0) -> None:
        self._path, self._at, self._buffer, self.seen = path, at, LineBuffer(), False

    def lines(self, *, over: bool = False) -> list[str]:
        """The new lines; with `over` also a last one that has no end."""
        found: list[bytes] = []
        with suppress(FileNotFoundError), self._path.open("rb") as file:
            file.seek(self._at)
            found = self._buffer.lines(file.read())
            self._at = file.tell()
        if over and self._buffer.rest:
            found += self._buffer.lines(b"\n")
        self.seen = self.seen or bool(found)
        return [line.decode(errors="replace") for line in found]


def secret_file(job: Job) -> Path:
    """The secret in a file that only this user can read, for tasks that share the run directory."""
    path = job.directory / "secret"
    if not path.exists():
        secret.write(path, job.secret)
    return path
