"""Runs under a real Spark: a barrier stage of tasks, trained to their accuracy, submitted again when one is lost."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
from pathlib import Path

import pytest
from processes import until
from shells import SECONDS, Shell, Shells, linger, shells, trained, updates_of

if importlib.util.find_spec("pyspark") is None:
    pytest.skip("pyspark is not installed", allow_module_level=True)
if shutil.which("java") is None:
    pytest.skip("java, which Spark needs, is not installed", allow_module_level=True)

RUN = ("--no-summaries", "--json", "--on", "spark")
SPARK = {"SPARK_LOCAL_IP": "127.0.0.1"}
LONGER = 2 * SECONDS  # a JVM starts slowly where there is much to do


def train(start: Shells, *words: str, master: str | None = None) -> Shell:
    engine = () if master is None else ("--engine", f"master={master}")
    return start("run", "train", "digits-mlp", *words, *RUN, *engine, "--dir", str(start.folder / "run"), **SPARK)


def test_async_with_a_server_in_two_executors(tmp_path: Path) -> None:
    with shells(tmp_path) as start:
        run = train(start, "--scheme", "async", "lr=0.2", "--workers", "3", "--steps", "400")
        assert run.ended(LONGER) == 0, run.err
        trained(tmp_path / "run")
        assert "local-cluster[2,2,1024]" in run.err
        assert '"accuracy"' in run.out  # what the chief prints comes to who submitted


def test_allreduce_in_one_executor(tmp_path: Path) -> None:
    with shells(tmp_path) as start:
        words = ("--scheme", "allreduce", "lr=0.2", "--workers", "2", "--steps", "300")
        run = train(start, *words, master="local[2]")
        assert run.ended(LONGER) == 0, run.err
        trained(tmp_path / "run", 300)


@pytest.mark.parametrize("victim", ["chief", "worker:0"])
def test_a_lost_task_is_submitted_again_from_the_checkpoint(tmp_path: Path, victim: str) -> None:
    with shells(tmp_path) as start:
        gate, hook = linger(tmp_path)
        words = ("--scheme", "async", "lr=0.2", "--workers", "2", "--steps", "400", "--checkpoint-every", "50")
        run = train(start, *words, *hook, master="local[3]")
        trains(run, tmp_path / "run")
        os.kill(start.rank(f"PACELINE_TASK={victim}"), signal.SIGKILL)
        gate.touch()
        assert run.ended(LONGER) == 0, run.err
        trained(tmp_path / "run")
        assert f"{victim} was killed by SIGKILL; resubmitted from the newest checkpoint" in run.err
        assert "resuming from the checkpoint" in run.err


def test_an_interrupt_ends_the_run_in_order(tmp_path: Path) -> None:
    with shells(tmp_path) as start:
        words = ("--scheme", "async", "--workers", "2", "--checkpoint-every", "50", "--steps", "1000000")
        run = train(start, *words, master="local[3]")
        trains(run, tmp_path / "run")
        run.process.send_signal(signal.SIGINT)
        assert run.ended(LONGER) == 130, run.err
        assert (tmp_path / "run" / "result.json").exists()
        assert not (tmp_path / "run" / "stop").exists()


def test_too_few_slots_are_told(tmp_path: Path) -> None:
    with shells(tmp_path) as start:
        words = ("--scheme", "async", "--workers", "4", "--steps", "10", "--engine", "patience=2")
        run = train(start, *words, master="local[2]")
        assert run.ended(LONGER) == 1
        assert "has not enough slots: the stage needs 5 tasks" in run.err


def test_a_run_that_fails_gives_its_exit_code(tmp_path: Path) -> None:
    with shells(tmp_path) as start:
        words = ("--scheme", "async", "lr=1e30", "--workers", "2", "--steps", "400")
        run = train(start, *words, master="local[3]")
        assert run.ended(LONGER) == 1
        assert "loss" in run.err
        assert "resubmitted" not in run.err


def trains(run: Shell, folder: Path) -> None:
    def begun() -> bool:
        assert run.process.poll() is None, run.err
        return updates_of(folder) >= 50

    until(begun, SECONDS, "it trains")
