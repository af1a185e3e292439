"""A launcher in a process of its own, so that it can be interrupted and killed; its tasks are `stand_in.py`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from processes import until

from paceline.config import discovery
from paceline.launcher import Job

STAND_IN = Path(__file__).with_name("stand_in.py")
SECRET = bytes(range(32))
TASKS = ("chief", "worker:0", "server:0")
LAUNCH = """
import json, sys
from pathlib import Path
from paceline.config import discovery
from paceline.launcher import Job
engine, command, tasks, directory, options = json.loads(sys.argv[1])
def say(text): print(text, file=sys.stderr, flush=True)
job = Job(tuple(command), tuple(tasks), Path(directory), "test", options, secret=bytes(range(32)), say=say)
sys.exit(discovery.launcher(engine).launch(job))
"""


class Launched:
    """The launcher's process, and the folder in which its tasks leave what they were told."""

    def __init__(self, engine: str, folder: Path, deed: str, options: dict[str, str]) -> None:
        self.folder = folder
        folder.mkdir()
        command = [sys.executable, str(STAND_IN), str(folder), deed]
        told = json.dumps([engine, command, TASKS, str(folder), options])
        self._out, self._err = (folder / "stdout").open("wb"), (folder / "stderr").open("wb")
        self.process = subprocess.Popen(
            [sys.executable, "-c", LAUNCH, told], stdin=subprocess.DEVNULL, stdout=self._out, stderr=self._err
        )

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._out.close()
        self._err.close()

    def ended(self, seconds: float = 40) -> int:
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {seconds:g} s:\n{self.said}") from None

    @property
    def said(self) -> str:
        return (self.folder / "stderr").read_text()

    def told(self, task: str, life: int = 0, seconds: float = 20) -> dict[str, str]:
        """What a task was told in its environment, once it is there; also its `pid`."""
        path = self.folder / f"{task}.{life}.json"
        until(lambda: path.exists() or self.process.poll() is not None, seconds, f"{task} is there")
        assert path.exists(), self.said
        told: dict[str, str] = json.loads(path.read_text())
        return told

    def everybody(self) -> list[int]:
        """The processes of all tasks, once all are there."""
        return [int(self.told(task)["pid"]) for task in TASKS]


def followed(engine: str, folder: Path, deed: str = "none", **options: str) -> tuple[int, list[str]]:
    """The same in this process, where nothing has to be done on the way: the exit code, and what was said."""
    folder.mkdir()
    said: list[str] = []
    command = (sys.executable, str(STAND_IN), str(folder), deed)
    job = Job(command, TASKS, folder, "test", options, secret=SECRET, say=said.append)
    return discovery.launcher(engine).launch(job), said


@contextmanager
def launched(engine: str, folder: Path, deed: str = "none", **options: str) -> Iterator[Launched]:
    run = Launched(engine, folder, deed, options)
    try:
        yield run
    finally:
        run.close()


def lives(number: int) -> bool:
    return Path(f"/proc/{number}/cwd").exists()


def gone(numbers: list[int]) -> None:
    until(lambda: not any(lives(number) for number in numbers), 20, "every task has gone")


def command_lines() -> str:
    """What anybody on this machine can read of every process: its command line."""
    found = []
    for place in Path("/proc").iterdir():
        if place.name.isdigit():
            try:
                found.append((place / "cmdline").read_text(errors="replace"))
            except OSError:
                continue
    return "\n".join(found)


def interrupt(run: Launched) -> None:
    os.kill(run.process.pid, signal.SIGINT)
