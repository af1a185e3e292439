"""The code of a partition of the barrier stage: get the chief's address, run the task's command, report its end."""

from __future__ import annotations

import contextlib
import json
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from paceline.launchers._child_process import Running, free_port

TOGETHER = 15.0  # seconds that a failed task waits, so that the chief can report first why the run has ended
MARK = "paceline-outcome:"  # begins the report of a failed task inside Spark's own message
LOGS = {"out": "spark-out.log", "err": "spark-err.log"}  # of the chief, under logs/ of the run
STOP = "stop"  # a file in the run directory: the chief ends in order


@dataclass(frozen=True)
class Share:
    """The argument of every partition. The secret is only in Spark's own message to the executors."""

    command: tuple[str, ...]
    environments: tuple[dict[str, str], ...]
    secret: str
    directory: str  # of the run
    here: str
    chief: int
    ports: tuple[int, int] | None = None  # first and last port that the hub may listen on; None: any


def seat(share: Share) -> Callable[[Iterator[int]], Iterator[str]]:
    """The function of the partitions. Sent by value, so that Spark's Python does not load torch for it."""

    def sit(_: Iterator[int]) -> Iterator[str]:
        from pyspark import BarrierTaskContext

        context = BarrierTaskContext.get()
        number = context.partitionId()
        address = context.getTaskInfos()[number].address.rpartition(":")[0]
        port = free_port(address, share.ports) if number == share.chief else 0
        hub = context.allGather(f"{address}:{port}")[share.chief]
        environment = share.environments[number] | {
            "PACELINE_HUB": hub,
            "PACELINE_ADDRESS": address,
            "PACELINE_SECRET": share.secret,
        }
        gpus = context.resources().get("gpu")
        if gpus is not None:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus.addresses)
        running = Running(share.command, environment, share.here)
        try:
            code, last = followed(running, Path(share.directory), number == share.chief)
        finally:
            running.end()
        outcome = json.dumps({"task": environment["PACELINE_TASK"], "code": code, "last": last})
        if code:
            if number != share.chief and code > 0:
                time.sleep(TOGETHER)
            raise RuntimeError(MARK + outcome)
        yield outcome

    return sit


def followed(running: Running, directory: Path, chief: bool) -> tuple[int, list[str]]:
    """The exit code and the last lines. The chief's output goes to the run directory, where STOP is looked for, too."""
    logs: dict[str, TextIO] = {}
    with contextlib.ExitStack() as files:
        if chief:
            (directory / "logs").mkdir(parents=True, exist_ok=True)
            for name, file in LOGS.items():
                logs[name] = files.enter_context((directory / "logs" / file).open("a", encoding="utf-8"))
        last: list[str] = []
        stopped = False
        while True:
            lines, code = running.heard(0.5)
            for stream, text in lines:
                last = [*last[-199:], text]
                if stream in logs:
                    print(text, file=logs[stream], flush=True)
            if code is not None:
                return code, last
            if chief and not stopped and (directory / STOP).exists():
                stopped = True
                running.tell(signal.SIGINT)
