"""What an engine is asked to start: the same command once for every task, and what each task must be told."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from paceline.errors import UnknownName


@dataclass(frozen=True)
class Job:
    """`tasks` in the order in which the engine numbers them: task i of the engine is tasks[i]."""

    command: tuple[str, ...]  # of every task, without --on and what goes with it
    tasks: tuple[str, ...]  # chief, worker:0, …, server:0, …, evaluator
    directory: Path  # of the run, absolute
    name: str
    options: dict[str, str] = field(default_factory=dict)  # for this engine alone
    threads: int = 1  # of each task
    gpus: int = 0  # of each task that trains
    secret: bytes = field(default=b"", repr=False)
    say: Callable[[str], None] = print
    ports: tuple[int, int] | None = None  # the first and the last that tasks may listen on; None: any
    evaluator_gpus: int = 0

    def gpus_of(self, task: str) -> int:
        """How many GPUs a task takes: servers have nothing to compute on one."""
        kind = task.partition(":")[0]
        return self.gpus if kind in ("chief", "worker") else self.evaluator_gpus if kind == "evaluator" else 0

    def option(self, name: str) -> str | None:
        """The value of an option in the tasks' command; None: it is not there."""
        for word, after in zip(self.command, (*self.command[1:], ""), strict=True):
            if word == name:
                return after
            if word.startswith(f"{name}="):
                return word.partition("=")[2]
        return None

    def cluster(self) -> str:
        """How many tasks of each kind there are, as PACELINE_CLUSTER has it."""
        kinds = Counter(task.partition(":")[0] for task in self.tasks)
        return ",".join(f"{kind}={kinds[kind]}" for kind in ("chief", "worker", "server", "evaluator") if kinds[kind])

    def environment(self, task: str) -> dict[str, str]:
        """What a task must be told, but for the secret and where the chief is."""
        return {"PACELINE_TASK": task, "PACELINE_CLUSTER": self.cluster()}

    def meeting_file(self) -> Path:
        """Where the chief will write its address; what an earlier one has written there is void."""
        path = self.directory / "hub"
        path.unlink(missing_ok=True)
        return path

    def refuse_unknown(self, known: Iterable[str]) -> None:
        """An option that this engine does not have is an error, not a silence."""
        names = sorted(known)
        for key in self.options:
            if key not in names:
                raise UnknownName("setting of this engine", key, names)
