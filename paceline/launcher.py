"""The contract of launchers: `--on NAME` has an engine start the same command once for every task of a run.

A launcher is a class of paceline/launchers/NAME.py, or an entry point of the group `paceline.launchers`.
docs/add-a-launcher.md has a complete example; the checks of paceline/testing/launchers.py hold for every launcher.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from paceline.errors import UnknownName, UsageError


class Launcher(ABC):
    """Starts the tasks of a job somewhere, tells each which task it is, and follows the run to its end."""

    name: ClassVar[str]  # the value of --on
    keys: ClassVar[Mapping[str, str]] = {}  # keys of --engine with their help: "what it is; default: 3"
    example: ClassVar[Mapping[str, str]] = {}  # values for the keys that are required

    @abstractmethod
    def launch(self, job: Job) -> int:
        """Start every task and wait for the end of the run. Returns the chief's exit code; 130 after Ctrl-C.

        UsageError says that nothing was started. Otherwise no task is left behind, however `launch` ends.
        """

    @abstractmethod
    def shown(self, job: Job) -> str:
        """What `launch` would submit, for --dry-run. Changes nothing, and never contains the secret."""

    def typed_on_every_node(self, options: Mapping[str, str]) -> bool:
        """Whether the user types the same command on several nodes: then another may have made the run directory."""
        return False

    def check(self, job: Job) -> None:
        """Refuse keys of --engine that this launcher does not have; called before `launch` and `shown`."""
        for key in job.options:
            if key not in self.keys:
                raise UnknownName(f"--engine key of {self.name}", key, self.keys)


@dataclass(frozen=True)
class Job:
    """What a launcher gets: a command, the tasks that run it, and the values of --engine.

    `tasks` are in the order in which the engine numbers them: task i of the engine is tasks[i].
    """

    command: tuple[str, ...]  # of every task, without --on and --engine
    tasks: tuple[str, ...]  # chief, worker:0, …, server:0, …, evaluator
    directory: Path  # the run directory, absolute
    name: str
    options: Mapping[str, str] = field(default_factory=dict)  # --engine KEY=VALUE
    threads: int = 1  # of each task
    gpus: int = 0  # of each task that trains
    secret: bytes = field(default=b"", repr=False)  # that all tasks of the run share
    say: Callable[[str], None] = print
    ports: tuple[int, int] | None = None  # the first and the last that tasks may listen on; None: any
    evaluator_gpus: int = 0

    # what a task is told

    def environment(self, task: str) -> dict[str, str]:
        """The variables of a task, except the secret and the address of the chief."""
        return {"PACELINE_TASK": task, "PACELINE_CLUSTER": self.cluster()}

    def cluster(self) -> str:
        """PACELINE_CLUSTER: the number of tasks of each kind."""
        kinds = Counter(task.partition(":")[0] for task in self.tasks)
        return ",".join(f"{kind}={count}" for kind, count in kinds.items())

    def meeting_file(self) -> Path:
        """PACELINE_MEET: the file into which the chief will write its address. An earlier chief's is deleted."""
        path = self.directory / "hub"
        path.unlink(missing_ok=True)
        return path

    # what a task needs

    def gpus_of(self, task: str) -> int:
        """The number of GPUs of a task. Servers compute nothing on a GPU."""
        kind = task.partition(":")[0]
        return self.gpus if kind in ("chief", "worker") else self.evaluator_gpus if kind == "evaluator" else 0

    def option(self, name: str) -> str | None:
        """The value of an option in the tasks' command; None: the command does not have it."""
        for word, after in zip(self.command, (*self.command[1:], ""), strict=True):
            if word == name:
                return after
            if word.startswith(f"{name}="):
                return word.partition("=")[2]
        return None

    # values of --engine

    def number(self, key: str, default: int, least: int = 0) -> int:
        """A whole number."""
        text = self.options.get(key, str(default))
        if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) >= least):
            raise UsageError(f"--engine {key}={text}: a whole number of at least {least} is needed")
        return int(text)

    def seconds(self, key: str, default: float) -> float:
        """A number of seconds, which may have a fraction."""
        text = self.options.get(key, str(default))
        if not re.fullmatch(r"[0-9]{1,9}(\.[0-9]*)?", text):
            raise UsageError(f"--engine {key}={text}: a number of seconds of at least 0 is needed")
        return float(text)

    def truth(self, key: str, default: bool) -> bool:
        """yes or no, true or false."""
        text = self.options.get(key, "yes" if default else "no").lower()
        if text not in ("yes", "no", "true", "false"):
            raise UsageError(f"--engine {key}={text}: yes or no is needed")
        return text in ("yes", "true")

    def size(self, key: str, unit: int = 1) -> int | None:
        """An amount of memory such as 4G, 1500M or 2GiB, in `unit` bytes, as is a bare number. None: not given."""
        if key not in self.options:
            return None
        text = self.options[key]
        match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?)(?:i?B)?", text.strip(), flags=re.IGNORECASE)
        scale = 1024.0 ** "KMGT".index(match[2].upper()) * 1024 / unit if match and match[2] else 1.0
        amount = int(float(match[1]) * scale) if match else 0
        if amount < 1:
            raise UsageError(f"--engine {key}={text}: an amount of memory is needed, such as 4G or 1500M")
        return amount
