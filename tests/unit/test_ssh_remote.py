"""What `paceline train --on` makes of its options: the tasks in their order, and the command of each."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.cli.cluster_options import ordered, task_command
from paceline.config.build import scheme_of
from paceline.config.plan import Plan
from paceline.errors import UsageError


def tasks(by: str | None, **settings: int) -> tuple[str, ...]:
    return ordered(Plan(scheme="async", **settings), scheme_of("async", {}), by)


def test_without_a_list_the_chief_is_first_and_the_servers_last() -> None:
    assert tasks(None, workers=3, servers=2) == ("chief", "worker:0", "worker:1", "server:0", "server:1")
    assert tasks("spread", workers=2) == ("chief", "worker:0", "server:0")


def test_of_a_list_that_names_no_chief_the_first_worker_is_it() -> None:
    listed = tasks("ps,worker,ps,worker", workers=2, servers=2)
    assert listed == ("server:0", "chief", "server:1", "worker:0")
    assert tasks("worker,chief,ps", workers=2) == ("worker:0", "chief", "server:0")


@pytest.mark.parametrize("by", ["ps,worker", "ps,worker,worker,worker", "ps,ps,worker"])
def test_a_list_that_is_longer_or_shorter_than_the_run_is_refused(by: str) -> None:
    with pytest.raises(UsageError, match="placement"):
        tasks(by, workers=2)


def test_a_task_runs_what_was_given_without_what_was_meant_for_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    given = ["paceline", "train", "toy", "lr=0.1", "--on", "slurm", "--engine=nodes=2", "--engine", "time=5"]
    monkeypatch.setattr("sys.argv", [*given, "--dry-run", "--steps", "9", "--dir", "here", "--placement", "pack"])
    assert task_command(Plan(), Path("/runs/one")) == (
        *("paceline", "train", "toy", "lr=0.1", "--steps", "9"),
        *("--dir", "/runs/one", "--plain"),
    )
