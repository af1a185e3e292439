"""`--on hosts` with a real sshd on loopback. Data: scikit-learn's digits."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from beds.hosts import several
from launching import SECRET, command_lines, followed, gone, interrupt, launched
from processes import until
from shells import SECONDS, TRAIN, linger, shells, trained, updates_of
from ssh_server import Sshd, sshd, sshd_on


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    with sshd(tmp_path_factory.mktemp("ssh") / "server") as running:
        yield running


def test_every_task_is_told_what_it_needs_and_nobody_else(server: Sshd, tmp_path: Path) -> None:
    with launched("hosts", tmp_path / "run", "stay", hosts="127.0.0.1", ssh=server.ssh) as run:
        told = {task: run.told(task) for task in ("chief", "worker:0", "server:0")}
        assert SECRET.hex() not in command_lines()
        interrupt(run)
        assert run.ended() == 130
        gone([int(one["pid"]) for one in told.values()])
    for task, one in told.items():
        assert one["PACELINE_TASK"] == task
        assert one["PACELINE_CLUSTER"] == "chief=1,worker=1,server=1"
        assert one["PACELINE_SECRET"] == SECRET.hex()
        assert one["PACELINE_ADDRESS"] == "127.0.0.1"
        assert one["cwd"] == str(Path.cwd())
    assert told["chief"]["PACELINE_HUB"] == "127.0.0.1:0"
    assert told["worker:0"]["PACELINE_HUB"] == told["server:0"]["PACELINE_HUB"] != "127.0.0.1:0"
    assert (tmp_path / "run" / "ended").read_text() == "by a signal"
    assert SECRET.hex() not in run.said


def test_a_lost_task_is_started_again(server: Sshd, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, said = followed("hosts", tmp_path / "run", "die:worker:0", hosts="127.0.0.1", ssh=server.ssh)
    assert code == 0, said
    assert "worker:0 was lost (exit code 137); starting it again, 1 of 3" in said
    assert said.count("worker:0: worker:0 is here") == 2
    assert capfd.readouterr().out == '{"called": ["server:0", "worker:0"]}\n'  # of the chief, as it was printed


def test_with_the_chief_the_whole_run_begins_again(server: Sshd, tmp_path: Path) -> None:
    code, said = followed("hosts", tmp_path / "run", "die:chief", hosts="127.0.0.1", ssh=server.ssh)
    assert code == 0, said
    assert "the job broke off (exit code 137); starting it again from the beginning, 1 of 3" in said


def test_a_connection_that_is_lost(server: Sshd, tmp_path: Path) -> None:
    """The far end ends its task, this end starts it again."""
    with launched("hosts", tmp_path / "run", "stay", hosts="127.0.0.1", ssh=server.ssh) as run:
        run.told("chief")
        task = int(run.told("worker:0")["pid"])
        os.kill(parent(parent(task)), signal.SIGKILL)  # task <- far.py <- sshd
        gone([task])
        again = int(run.told("worker:0", life=1)["pid"])
        assert "worker:0 was lost (the connection to 127.0.0.1 failed); starting it again, 1 of 3" in run.said
        interrupt(run)
        assert run.ended() == 130
        gone([again])


def test_a_launcher_that_is_killed_leaves_nothing(server: Sshd, tmp_path: Path) -> None:
    with launched("hosts", tmp_path / "run", "stay", hosts="127.0.0.1", ssh=server.ssh) as run:
        tasks = run.everybody()
        run.process.kill()
        gone(tasks)
    assert (tmp_path / "run" / "ended").read_text() == "by a signal"  # the chief had the time for it


def test_a_second_interruption_ends_at_once(server: Sshd, tmp_path: Path) -> None:
    with launched("hosts", tmp_path / "run", "stay", hosts="127.0.0.1", ssh=server.ssh) as run:
        tasks = run.everybody()
        os.kill(int(run.told("chief")["pid"]), signal.SIGSTOP)  # it cannot end in order
        interrupt(run)
        until(lambda: "again to end at once" in run.said, 20, "the interruption is noticed")
        interrupt(run)
        assert run.ended() == 130
        gone(tasks)


@pytest.mark.parametrize(
    ("deed", "options", "code", "words"),
    [
        ("fail:1", {}, 1, "chief is here"),
        ("fail:3", {}, 3, "chief is here"),
        ("none", {"python": "/no/such/python"}, 2, "/no/such/python"),
    ],
)
def test_what_cannot_work_is_not_tried_again(
    deed: str, options: dict[str, str], code: int, words: str, server: Sshd, tmp_path: Path
) -> None:
    ended, said = followed("hosts", tmp_path / "run", deed, hosts="127.0.0.1", ssh=server.ssh, **options)
    assert ended == code, said
    assert any(words in text for text in said)
    assert not any("again" in text for text in said)


def test_a_host_that_lets_nobody_in(server: Sshd, tmp_path: Path) -> None:
    wrong = server.ssh.replace("/user", "/host")  # a key that it does not know
    code, said = followed("hosts", tmp_path / "run", hosts="127.0.0.1", ssh=wrong, restarts="1")
    assert code == 255
    assert any("Permission denied" in text for text in said)
    assert "2 times in a row" in said[-1]


# training


@pytest.mark.parametrize("lost", ["task", "connection"])
def test_three_tasks_train_and_a_lost_one_comes_back(server: Sshd, tmp_path: Path, lost: str) -> None:
    """Also one whose connection is lost: at the far end it is asked to end, and leaves alone."""
    gate, waits = linger(tmp_path, seconds=0.5)
    words = (*TRAIN, "--workers", "2", "--checkpoint-every", "20", "--dir", str(tmp_path / "run"), "--json", *waits)
    engine = ("--on", "hosts", "--engine", "hosts=127.0.0.1", "--engine", f"ssh={server.ssh}")
    with shells(tmp_path) as made:
        run = made("hosts", *words, *engine)
        until(lambda: updates_of(tmp_path / "run") >= 40, SECONDS, f"it trains: {made.said()}")
        agent = far_task(tmp_path, "worker:0")
        os.kill(agent if lost == "task" else parent(parent(agent)), signal.SIGKILL)  # task <- far.py <- sshd
        gone([agent])
        until(lambda: far_task(tmp_path, "worker:0") not in (0, agent), SECONDS, f"it is back: {made.said()}")
        until(lambda: "worker:1 is here" in run.err, SECONDS, f"it takes part: {made.said()}")
        assert run.err.count("worker:0 was lost") == 1
        gate.touch()
        made.all_ended()
        until(lambda: not far_task(tmp_path, ""), 20, "nothing is left at the far end")
    result = trained(tmp_path / "run")
    assert json.loads(run.out)["digest"] == result["digest"]


def test_three_hosts_that_share_nothing(tmp_path: Path) -> None:
    """Each has its own network, its own sshd, and a directory of its own for runs; a fourth one is where one types."""
    runs = tmp_path / "runs"
    runs.mkdir()
    with (
        several(["login", "h1", "h2", "h3"]) as hosts,
        sshd_on([hosts[f"h{n}"] for n in (1, 2, 3)], tmp_path / "ssh") as ssh,
    ):
        for name in ("h1", "h2", "h3"):
            hosts[name].run(["mount", "-t", "tmpfs", "none", str(runs)], check=True)
        words = (*TRAIN, "--workers", "2", "--dir", str(runs / "run"), "--json")
        engine = ("--on", "hosts", "--engine", "hosts=h1,h2,h3", "--engine", f"ssh={ssh}")
        ran = hosts["login"].run(
            [sys.executable, "-P", "-m", "paceline", *words, *engine], timeout=SECONDS, cwd=tmp_path
        )
        assert ran.returncode == 0, ran.stderr
        told = json.loads(hosts["h1"].run(["cat", str(runs / "run" / "result.json")], check=True).stdout)
        logs = hosts["h1"].run(["ls", str(runs / "run" / "logs")]).stdout.split()
        left = {name: host.processes() for name, host in hosts.items()}
    assert json.loads(ran.stdout)["digest"] == told["digest"]
    assert told["metrics"]["accuracy"] > 0.85
    assert {"chief.log", "worker-1.log", "server-0.log"} <= set(logs)  # those of the others came to the chief
    assert not [words for one in left.values() for words in one.values() if "paceline" in words]


def far_task(folder: Path, task: str) -> int:
    """The process of a task at the other end of an ssh; only its environment tells which it is. 0: none."""
    for place in Path("/proc").iterdir():
        with suppress(OSError):
            if place.name.isdigit() and f"{folder}/run" in (place / "cmdline").read_text(errors="replace"):
                variables = (place / "environ").read_bytes()
                if f"PACELINE_TASK={task}".encode() in variables:
                    return int(place.name)
    return 0


def parent(number: int) -> int:
    return int(Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[1])
