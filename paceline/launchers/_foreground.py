"""An engine's own command in the foreground: it prints where we do, hears of Ctrl-C from us, and does not outlive us.

Where an engine ends everybody as soon as one process dies, the run is begun again from its newest checkpoint.
"""

from __future__ import annotations

import ctypes
import json
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from paceline.errors import UsageError
from paceline.launcher import Job
from paceline.network.secure import secret
from paceline.runs import checkpoint

FINAL = (0, 2, 3, 130)  # done, wrong usage, data missing, interrupted: the same would come out again
PAUSE = 1.0  # seconds before the next beginning: what held the ports and the lock of the last one is going
_PR_SET_PDEATHSIG = 1


def number(job: Job, key: str, default: int) -> int:
    """An `--engine` option that is a whole number."""
    text = job.options.get(key, str(default))
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise UsageError(f"--engine {key}= must be a whole number of at least 0, not {text!r}")
    return int(text)


def truth(job: Job, key: str, default: bool) -> bool:
    """An `--engine` option that is yes or no."""
    text = job.options.get(key, "yes" if default else "no").lower()
    if text not in ("yes", "no", "true", "false"):
        raise UsageError(f"--engine {key}= must be yes or no, not {text!r}")
    return text in ("yes", "true")


def seats(hosts: Sequence[str], tasks: int) -> list[str]:
    """The host of each task: as many on each as on the next, the first ones one more; a host named twice has two."""
    if len(hosts) > tasks:
        raise UsageError(f"there are more hosts ({len(hosts)}) than tasks ({tasks}): leave some away")
    each, more = divmod(tasks, len(hosts))
    return [host for place, host in enumerate(hosts) for _ in range(each + (place < more))]


def roles(tasks: Sequence[str]) -> str:
    """PACELINE_PLACEMENT: the role of each task in the order of the engine's numbers."""
    return ",".join(task.partition(":")[0] for task in tasks)


def as_script(environment: Mapping[str, str], command: Sequence[str]) -> str:
    """What will be run, as one would type it."""
    return "".join(f"export {key}={shlex.quote(value)}\n" for key, value in sorted(environment.items())) + (
        shlex.join(command) + "\n"
    )


def followed(command: Sequence[str], environment: Mapping[str, str], stop: signal.Signals = signal.SIGTERM) -> int:
    """Run an engine's command to its end; gives its exit code, and 130 after an interruption.

    The first Ctrl-C (or SIGTERM) hands `stop` on, by which the run ends in order; the second one kills.
    """
    process: subprocess.Popen[bytes] | None = None
    interrupts = handed_on = 0

    def interrupted(*_: object) -> None:
        nonlocal interrupts
        interrupts += 1
        hand_on()

    def hand_on() -> None:
        nonlocal handed_on
        while process is not None and handed_on < interrupts:
            handed_on += 1
            if handed_on == 1:
                process.send_signal(stop)
            else:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)

    with handling(interrupted):
        process = subprocess.Popen(
            command,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # a terminal's Ctrl-C would reach it besides us
            preexec_fn=_ends_with_us,
        )
        hand_on()  # what came before it was there
        code = process.wait()
    return 130 if interrupts else code if code >= 0 else 128 - code  # MPICH may forget a rank's code


@contextmanager
def handling(interrupted: Callable[..., None]) -> Iterator[None]:
    """Ctrl-C and SIGTERM call this inside."""
    before = {number: signal.signal(number, interrupted) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def repeated(job: Job, begin: Callable[[], int], restarts: int, over: Callable[[int], bool] | None = None) -> int:
    """Begin, and begin again after every breakdown; not more than `restarts` times in a row without a newer checkpoint.

    `over` says of an exit code whether the run has ended by itself.
    """
    in_vain, saved = 0, -1
    while True:
        code = begin()
        if over(code) if over else ended_by_itself(code, job.directory):
            return code
        newest = max(checkpoint.steps(job.directory / "checkpoints"), default=-1)
        in_vain = 1 if newest > saved else in_vain + 1
        saved = max(saved, newest)
        if in_vain > restarts:
            times = f"{in_vain} times in a row without a newer checkpoint" if in_vain > 1 else "once"
            job.say(f"the job broke off {times} (exit code {code}); --engine restarts= allows {restarts}")
            return code
        where = f"the checkpoint of update {newest}" if newest >= 0 else "the beginning"
        job.say(f"the job broke off (exit code {code}); starting it again from {where}, {in_vain} of {restarts}")
        time.sleep(PAUSE)


def ended_by_itself(code: int, directory: Path) -> bool:
    """Whether a run has come to an end of its own, good or bad; otherwise somebody died on the way."""
    if code in FINAL:
        return True
    if code != 1:  # a signal's: engines tell it as 128 + number, or as the number
        return False
    try:
        return "error" in json.loads((directory / "result.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False


def _ends_with_us() -> None:
    """However rudely we end, the kernel tells the engine to."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def secret_file(job: Job) -> Path:
    """A file that only this user can read, for tasks that see the run directory."""
    path = job.directory / "secret"
    if not path.exists():
        secret.write(path, job.secret)
    return path
