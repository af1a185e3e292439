"""`--on spark`: a barrier stage with one partition for each task; each partition runs the task's command.

Spark starts the tasks of a barrier stage together and ends them together. So the loss of a task fails the stage, and
the stage is resubmitted: the run resumes from its newest checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

from paceline import signals
from paceline.errors import RunError, UsageError
from paceline.launcher import Job, Launcher
from paceline.launchers import _child_process, _spark_task
from paceline.launchers._child_process import why
from paceline.launchers._foreground import Tail, as_listing
from paceline.launchers._spark_task import LOGS, MARK, STOP, Share, seat

GPUS = "spark.task.resource.gpu.amount"
STOPPING = 60.0  # seconds for the last checkpoint after Ctrl-C


class SparkSettings:
    """The values of `--engine`."""

    def __init__(self, job: Job) -> None:
        patience = job.number("patience", 30, least=1)
        self.conf = {
            "spark.app.name": job.name,
            "spark.task.cpus": str(job.threads),
            # too few slots: Spark looks every second, and fails after `patience` seconds
            "spark.scheduler.barrier.maxConcurrentTasksCheck.interval": "1s",
            "spark.scheduler.barrier.maxConcurrentTasksCheck.maxFailures": str(patience),
            "spark.ui.enabled": "false",
            "spark.ui.showConsoleProgress": "false",
        }
        if job.gpus:
            self.conf[GPUS] = str(job.gpus)
        given = {}
        for pair in filter(None, job.options.get("conf", "").split(",")):
            key, equals, value = pair.partition("=")
            if not equals:
                raise UsageError(f"--engine conf={pair}: settings of Spark are written spark.KEY=VALUE,…")
            given[key.strip()] = value.strip()
        self.conf |= given
        idle = [task for task in job.tasks if not job.gpus_of(task)]
        if job.gpus and idle and GPUS not in given:
            raise UsageError(
                f"Spark gives every task of a barrier stage the same: {', '.join(idle)} would hold an unused GPU. "
                "Take a scheme without a server, another engine (ray, kubernetes, slurm), or allow it with "
                f"--engine conf={GPUS}={job.gpus}"
            )
        half = -(-len(job.tasks) // 2)
        here = f"local-cluster[{min(2, len(job.tasks))},{half * job.threads},1024]"
        self.master = job.options.get("master") or _environment_master(os.environ) or here
        self.resubmissions = job.number("resubmissions", 3)


class SparkLauncher(Launcher):
    """The partitions of a Spark barrier stage run the tasks; a lost stage is resubmitted."""

    name = "spark"
    keys = {
        "master": "Spark's master; default: that of Spark's configuration, else two executors on this machine",
        "resubmissions": "resubmissions of a lost stage; default: 3",
        "patience": "seconds to wait for enough slots; default: 30",
        "conf": "spark.KEY=VALUE,…, for Spark",
    }

    def launch(self, job: Job) -> int:
        settings = SparkSettings(job)
        context = _context(job, settings)
        home = os.environ.get("SPARK_HOME") or sys.modules["pyspark"].__path__[0]
        folder = Path(home) / "work" / context.applicationId
        try:
            for life in range(settings.resubmissions + 1):
                code = _submitted(context, job, settings, settings.resubmissions - life)
                if code is not None:
                    return code
            raise AssertionError("the last submission returns a code or raises")
        finally:
            with contextlib.suppress(Exception):  # the JVM may have ended already
                context.stop()
            if settings.master.startswith("local-cluster"):  # whose executors leave folders in Spark's installation
                shutil.rmtree(folder, ignore_errors=True)

    def shown(self, job: Job) -> str:
        settings = SparkSettings(job)
        first = [
            f"spark master: {settings.master}",
            *(f"conf: {key}={value}" for key, value in settings.conf.items()),
            f"barrier stage: {len(job.tasks)} partitions, resubmitted at most {settings.resubmissions} times",
        ]
        hub = "PACELINE_HUB=(of the chief, by allGather)"
        return as_listing(job, first, "partition", lambda _: hub, "with its function")


def _submitted(context: Any, job: Job, settings: SparkSettings, left: int) -> int | None:
    """One barrier stage from start to end: the chief's exit code, or None: resubmit the stage."""
    share = Share(
        command=job.command,
        environments=tuple(job.environment(task) for task in job.tasks),
        secret=job.secret.hex(),
        directory=str(job.directory),
        here=os.getcwd(),  # noqa: PTH109
        chief=job.tasks.index("chief"),
        ports=job.ports,
    )
    stop = job.directory / STOP
    stop.unlink(missing_ok=True)
    count = len(job.tasks)
    logs = {stream: job.directory / "logs" / LOGS[name] for name, stream in (("err", sys.stderr), ("out", sys.stdout))}
    tails = {stream: Tail(path, path.stat().st_size if path.exists() else 0) for stream, path in logs.items()}

    def print_new() -> None:
        for stream, tail in tails.items():  # the result comes last
            for line in tail.lines():
                print(line, file=stream, flush=True)

    interrupts = signals.Counter()
    with ThreadPoolExecutor(1) as pool, signals.counted(interrupts):
        stage = context.parallelize(range(count), count).barrier().mapPartitions(seat(share))
        collected: Future[list[str]] = pool.submit(stage.collect)
        asked = None
        while not collected.done():
            print_new()
            if interrupts.count and asked is None:
                asked = time.monotonic()
                job.say("stopping: the chief writes a last checkpoint (once more: kill everything at once)")
                stop.touch()
            if asked and (interrupts.count > 1 or time.monotonic() - asked > STOPPING):
                context.cancelAllJobs()
            with contextlib.suppress(TimeoutError):
                collected.exception(timeout=0.3)
        print_new()
    stop.unlink(missing_ok=True)
    error = collected.exception()
    if error is None:
        outcomes = [json.loads(text) for text in collected.result()]
        if not any(tail.seen for tail in tails.values()):  # this machine does not share the chief's run directory
            print("\n".join(outcomes[share.chief]["last"]), flush=True)
        return int(outcomes[share.chief]["code"])
    return _failed(error, job, settings, left, bool(interrupts.count))


def _failed(error: BaseException, job: Job, settings: SparkSettings, left: int, interrupted: bool) -> int | None:
    text = str(error)
    if "BarrierJobSlotsNumberCheckFailed" in text or "does not support barrier" in text or "SPARK-24819" in text:
        raise RunError(
            f"Spark ({settings.master}) has not enough slots: the stage needs {len(job.tasks)} tasks of "
            f"{job.threads} CPU(s) at the same time. Add executors, take fewer workers, or wait longer for executors "
            "that are about to come (--engine patience=SECONDS)"
        ) from None
    found = re.search(re.escape(MARK) + r"(\{.*\})", text)
    outcome = json.loads(found.group(1)) if found else None
    if outcome and outcome["task"] == "chief" and outcome["code"] > 0:
        return int(outcome["code"])  # the run itself failed: a resubmission would fail, too
    if interrupted:
        return 1
    reason = f"{outcome['task']} {why(outcome['code'])}" if outcome else _first_line(text)
    if left == 0:
        last = "\n".join(outcome["last"][-10:]) if outcome else ""
        often = f"it has been resubmitted {settings.resubmissions} times (--engine resubmissions=…)"
        raise RunError(f"the stage was lost: {reason}; {often}\n{last}".rstrip())
    job.say(f"the stage was lost: {reason}; resubmitted from the newest checkpoint ({left} more times)")
    return None


def _context(job: Job, settings: SparkSettings) -> Any:
    try:
        import pyspark
    except ImportError as error:
        raise UsageError(f"--on spark needs PySpark ({error}); install it: pip install 'paceline[spark]'") from None
    for module in (*_child_process.BY_VALUE, _spark_task):  # Spark's Python needs no torch to start a command
        pyspark.cloudpickle.register_pickle_by_value(module)
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    conf = pyspark.SparkConf().setMaster(settings.master)
    for key, value in settings.conf.items():
        conf.set(key, value)
    try:
        context = pyspark.SparkContext(conf=conf)
    except Exception as error:
        if "JAVA" in str(error).upper() and "gateway" in str(error).lower():
            raise UsageError(f"Spark needs Java 17 or newer: {_first_line(str(error))}") from None
        raise RunError(f"Spark did not start at {settings.master}: {_first_line(str(error))}") from error
    context.setLogLevel("FATAL")  # a failure is reported here in one line; Spark would add a Java stack
    job.say(f"spark: {context.applicationId} at {settings.master}")
    return context


def _environment_master(environment: Mapping[str, str]) -> str | None:
    """spark.master as Spark's own tools find it: in PYSPARK_SUBMIT_ARGS or spark-defaults.conf."""
    words = shlex.split(environment.get("PYSPARK_SUBMIT_ARGS", ""))
    for word, after in pairwise(words):
        if word == "--master":
            return after
    for name, below in (("SPARK_CONF_DIR", ""), ("SPARK_HOME", "conf")):
        if not environment.get(name):
            continue
        path = Path(environment[name]) / below / "spark-defaults.conf"
        with contextlib.suppress(OSError):
            for line in path.read_text(encoding="utf-8").splitlines():
                key, *value = re.split(r"[\s=]+", line.strip(), maxsplit=1)
                if key == "spark.master" and value:
                    return value[0].strip()
    return None


def _first_line(text: str) -> str:
    """The one line of Spark's long message that says what happened."""
    lost = re.search(r"ExecutorLostFailure \([^)]*\)[^\n]*", text)
    if lost:
        return lost.group(0)[:300]
    lines = [line.strip(" :") for line in text.splitlines() if line.strip(" :")]
    telling = [line for line in lines if "failure" in line or "Exception" in line]
    return (telling or lines or ["no reason given"])[0][:300]
