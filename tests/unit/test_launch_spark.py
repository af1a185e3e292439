"""What would be submitted to Spark, and what follows from the way a stage ended; the real one is in engines/."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.errors import RunError, UsageError
from paceline.launcher import Job
from paceline.launchers import spark
from paceline.launchers._child_process import Running
from paceline.launchers._foreground import Tail
from paceline.launchers._spark_task import LOGS, MARK, STOP, followed
from paceline.launchers.spark import SparkLauncher

TASKS = ("chief", "worker:0", "server:0")
SECRET = bytes(range(32))


def job(said: list[str] | None = None, gpus: int = 0, **options: str) -> Job:
    return Job(
        command=("paceline", "train", "digits-mlp", "--dir", "/runs/a"),
        tasks=TASKS,
        directory=Path("/runs/a"),
        name="a",
        options=options,
        threads=2,
        gpus=gpus,
        secret=SECRET,
        say=(lambda text: None) if said is None else said.append,
    )


@pytest.fixture(autouse=True)
def _no_spark_here(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYSPARK_SUBMIT_ARGS", "SPARK_CONF_DIR", "SPARK_HOME"):
        monkeypatch.delenv(name, raising=False)


def test_everything_but_the_secret_is_shown() -> None:
    gpus = "spark.task.resource.gpu.amount=1"
    text = SparkLauncher().shown(job(gpus=1, conf=f"spark.executor.memory=2g,spark.ui.enabled=true,{gpus}"))
    assert "spark master: local-cluster[2,4,1024]" in text  # two executors with room for three tasks of two threads
    assert "barrier stage: 3 partitions" in text
    for line in ("spark.task.cpus=2", "spark.task.resource.gpu.amount=1", "spark.executor.memory=2g"):
        assert f"conf: {line}" in text
    assert "conf: spark.ui.enabled=true" in text  # what is asked for counts
    assert "partition 2: PACELINE_TASK=server:0 PACELINE_CLUSTER=chief=1,worker=1,server=1" in text
    assert SECRET.hex() not in text


def test_a_server_does_not_silently_hold_a_gpu() -> None:
    with pytest.raises(UsageError, match=r"server:0 would hold an unused GPU.* conf=spark.task.resource.gpu.amount=1"):
        SparkLauncher().shown(job(gpus=1))
    trains = replace(job(gpus=1), tasks=("chief", "worker:0"))
    assert "conf: spark.task.resource.gpu.amount=1" in SparkLauncher().shown(trains)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"resubmissions": "-1"}, "--engine resubmissions=-1: a whole number of at least 0"),
        ({"patience": "0"}, "--engine patience=0: a whole number of at least 1"),
        ({"conf": "spark.ui.enabled"}, "spark.KEY=VALUE"),
    ],
)
def test_wrong_settings_are_refused(options: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        SparkLauncher().launch(job(**options))


def test_without_pyspark_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyspark", None)
    with pytest.raises(UsageError, match=re.escape("pip install 'paceline[spark]'")):
        SparkLauncher().launch(job())


def test_the_master_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "spark-defaults.conf").write_text(
        "# defaults\nspark.eventLog.enabled false\nspark.master\tspark://a:7077\n"
    )
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path))
    assert "spark master: spark://a:7077" in SparkLauncher().shown(job())
    monkeypatch.setenv("PYSPARK_SUBMIT_ARGS", "--master yarn pyspark-shell")
    assert "spark master: yarn" in SparkLauncher().shown(job())
    assert "spark master: local[3]" in SparkLauncher().shown(job(master="local[3]"))


def failure(task: str, code: int) -> RuntimeError:
    told = json.dumps({"task": task, "code": code, "last": ["first", "last words"]})
    return RuntimeError(f"Job aborted due to stage failure: …\nRuntimeError: {MARK}{told}\n\tat java.lang…")


def test_a_lost_task_is_submitted_again() -> None:
    said: list[str] = []
    asked = job(said)
    assert spark._failed(failure("worker:0", -9), asked, spark.SparkSettings(asked), 2, False) is None
    assert said == [
        "the stage was lost: worker:0 was killed by SIGKILL; resubmitted from the newest checkpoint (2 more times)"
    ]


def test_an_executor_that_is_lost_is_named() -> None:
    said: list[str] = []
    asked = job(said)
    lost = RuntimeError(
        "Job aborted.\nExecutorLostFailure (executor 0 exited caused by one of the running tasks) Reason: 137\n"
    )
    assert spark._failed(lost, asked, spark.SparkSettings(asked), 1, False) is None
    assert "ExecutorLostFailure (executor 0 exited" in said[0]


@pytest.mark.parametrize("code", [1, 2, 3])
def test_a_chief_that_fails_is_not_submitted_again(code: int) -> None:
    asked = job()
    assert spark._failed(failure("chief", code), asked, spark.SparkSettings(asked), 3, False) == code


def test_after_the_last_submission_the_last_words_are_told() -> None:
    asked = job()
    with pytest.raises(RunError, match=r"resubmitted 3 times .*\nfirst\nlast words"):
        spark._failed(failure("worker:0", 1), asked, spark.SparkSettings(asked), 0, False)


def test_an_interrupted_run_is_not_submitted_again() -> None:
    asked = job()
    assert spark._failed(failure("chief", 130), asked, spark.SparkSettings(asked), 3, True) == 130


def test_too_few_slots_are_told() -> None:
    asked = job(master="local[2]")
    error = RuntimeError("org.apache.spark.scheduler.BarrierJobSlotsNumberCheckFailed: [SPARK-24819]: …")
    with pytest.raises(
        RunError, match=r"Spark \(local\[2\]\) has not enough slots: the stage needs 3 .*--engine patience="
    ):
        spark._failed(error, asked, spark.SparkSettings(asked), 3, False)


def test_a_file_is_shown_by_whole_lines_as_it_grows(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("of an earlier life\n")
    tail = Tail(path, path.stat().st_size)
    for piece, new in (("a", []), ("b\nc", ["ab"]), ("\n", ["c"]), ("d", [])):
        with path.open("a") as file:
            file.write(piece)
        assert tail.lines() == new
    assert tail.lines(over=True) == ["d"]
    assert tail.lines(over=True) == []


def test_the_chiefs_output_and_its_stop_are_in_the_run_directory(tmp_path: Path) -> None:
    code = (
        "import pathlib, signal, sys\n"
        "signal.signal(signal.SIGINT, lambda *_: sys.exit(130))\n"
        "print('ready', flush=True); print('aside', file=sys.stderr, flush=True)\n"
        "pathlib.Path(sys.argv[1]).touch()\n"
        "while True: signal.pause()"
    )
    running = Running([sys.executable, "-c", code, str(tmp_path / STOP)], {})
    try:
        ended, last = followed(running, tmp_path, chief=True)
    finally:
        running.end()
    assert ended == 130
    assert (tmp_path / "logs" / LOGS["out"]).read_text() == "ready\n"
    assert (tmp_path / "logs" / LOGS["err"]).read_text() == "aside\n"
    assert sorted(last) == ["aside", "ready"]
