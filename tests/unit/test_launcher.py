"""The contract of launchers: values of --engine, unknown keys, and what a job tells its tasks."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.errors import UnknownName, UsageError
from paceline.launcher import Job, Launcher


class Echo(Launcher):
    """Only says what it would do."""

    name = "echo"
    keys = {"count": "how often; default: 1", "colour": "of the text"}  # noqa: RUF012

    def launch(self, job: Job) -> int:
        job.say(self.shown(job))
        return 0

    def shown(self, job: Job) -> str:
        return " ".join(job.command)


def job(**options: str) -> Job:
    return Job(("train", "--tls=own", "--dir", "a"), ("chief", "worker:0", "server:0"), Path("/a"), "a", options)


def test_unknown_keys_are_refused_with_a_suggestion() -> None:
    with pytest.raises(UnknownName, match="no --engine key of echo 'cuont'; did you mean 'count'"):
        Echo().check(job(cuont="3"))
    Echo().check(job(count="3", colour="red"))


@pytest.mark.parametrize(("text", "value"), [("0", 0), ("12", 12)])
def test_whole_numbers(text: str, value: int) -> None:
    assert job(count=text).number("count", 7) == value
    assert job().number("count", 7) == 7


@pytest.mark.parametrize("text", ["", "-1", "1.5", "many", "٣", "1" * 10])
def test_no_whole_numbers(text: str) -> None:
    with pytest.raises(UsageError, match=f"--engine count={text}: a whole number of at least 0 is needed"):
        job(count=text).number("count", 7)


def test_a_number_may_have_a_least_value() -> None:
    assert job(count="1").number("count", 1, least=1) == 1
    with pytest.raises(UsageError, match="of at least 1 is needed"):
        job(count="0").number("count", 1, least=1)


def test_seconds() -> None:
    assert job(wait="0.5").seconds("wait", 60.0) == 0.5
    assert job().seconds("wait", 60.0) == 60.0
    for text in ("", "-1", "inf", "nan", "1e3", "soon"):
        with pytest.raises(UsageError, match=f"--engine wait={text}: a number of seconds"):
            job(wait=text).seconds("wait", 60.0)


def test_truth_values() -> None:
    assert [job(on=text).truth("on", False) for text in ("yes", "TRUE", "no", "false")] == [True, True, False, False]
    assert job().truth("on", True)
    with pytest.raises(UsageError, match="--engine on=perhaps: yes or no is needed"):
        job(on="perhaps").truth("on", True)


def test_amounts_of_memory() -> None:
    texts = ("1500", "1500M", "4G", "1.5g", "1T", "2GiB")
    amounts = [job(memory=text).size("memory", unit=2**20) for text in texts]
    assert amounts == [1500, 1500, 4096, 1536, 1024 * 1024, 2048]
    assert [job(memory=text).size("memory") for text in ("1500", "1K", "2G")] == [1500, 1024, 2 * 2**30]
    assert job().size("memory") is None
    for text in ("", "G", "-1G", "0", "4X"):
        with pytest.raises(UsageError, match="such as 4G"):
            job(memory=text).size("memory")
    with pytest.raises(UsageError, match="such as 4G"):
        job(memory="1K").size("memory", unit=2**20)


def test_what_a_task_is_told_and_needs() -> None:
    assert job().environment("worker:0") == {
        "PACELINE_TASK": "worker:0",
        "PACELINE_CLUSTER": "chief=1,worker=1,server=1",
    }
    assert (job().option("--tls"), job().option("--dir"), job().option("--on")) == ("own", "a", None)


def test_the_secret_is_not_printed() -> None:
    told = Job(("train",), ("chief",), Path("/a"), "a", secret=bytes(range(32)))
    assert bytes(range(32)).hex() not in repr(told)
    assert "x1f" not in repr(told)
