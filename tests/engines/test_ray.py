"""Runs under a real Ray of two raylets: tasks in actors, trained to their accuracy, with any role killed on the way."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from processes import until
from shells import SECONDS, Shell, Shells, free_ports, linger, shells, trained, updates_of

if importlib.util.find_spec("ray") is None:
    pytest.skip("ray is not installed", allow_module_level=True)

RAY = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}  # a token would be kept in the user's home
RUN = ("--no-summaries", "--json")
ENDLESS = ("--steps", "1000000")


class Cluster(Shells):
    """A head and another node with two CPUs each. Their actors inherit the test's mark, and tasks theirs."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._environment |= RAY
        self._temporary = Path(tempfile.mkdtemp(prefix="ray-"))  # sockets have short names
        self.address = f"127.0.0.1:{free_ports(1)[0]}"
        port = self.address.partition(":")[2]
        self._start("head", "--head", f"--port={port}", "--include-dashboard=false", f"--temp-dir={self._temporary}")
        until(lambda: "Ray runtime started" in self.nodes[0].out, SECONDS, "the head is up")
        self._start("node", f"--address={self.address}")
        until(lambda: "Ray runtime started" in self.nodes[1].out, SECONDS, "the other node is up")

    @property
    def nodes(self) -> list[Shell]:
        return self.shells[:2]

    def _start(self, name: str, *words: str) -> None:
        program = str(Path(sys.executable).with_name("ray"))
        own = ("--node-ip-address=127.0.0.1", "--num-cpus=2", "--disable-usage-stats", "--block")
        self.program(name, program, "start", *words, *own)

    def train(self, name: str, *words: str) -> Shell:
        engine = ("--on", "ray", "--engine", f"address={self.address}")
        return self(name, "train", *words, *RUN, *engine, "--dir", str(self.folder / name), **RAY)

    def tasks(self) -> dict[int, str]:
        """Processes of runs, not of Ray."""
        return {number: words for number, words in self.processes().items() if "paceline" in words}

    def end(self) -> None:
        for node in reversed(self.nodes):
            node.process.send_signal(signal.SIGTERM)
            node.ended(30)
        shutil.rmtree(self._temporary, ignore_errors=True)


@contextmanager
def cluster_in(folder: Path) -> Iterator[Cluster]:
    made = Cluster(folder)
    try:
        yield made
        made.end()
        until(lambda: not made.processes(), 20, f"all of them have gone: {made.processes()}")
    finally:
        for number in made.processes():
            os.kill(number, signal.SIGKILL)
        for shell in made.shells:
            shell.process.wait()
        shutil.rmtree(made._temporary, ignore_errors=True)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster_in(tmp_path_factory.mktemp("ray")) as made:
        yield made


def test_async_with_a_server(cluster: Cluster) -> None:
    run = cluster.train("async", "digits-mlp", "--scheme", "async", "lr=0.2", "--workers", "3", "--steps", "400")
    assert run.ended() == 0, run.err
    trained(cluster.folder / "async")
    assert '"accuracy"' in run.out  # what the chief prints comes to who submitted
    assert "did not end with the chief" not in run.err
    until(lambda: not cluster.tasks(), 10, f"nothing is left: {cluster.tasks()}")


def test_allreduce_spread_over_the_nodes(cluster: Cluster) -> None:
    words = ("digits-mlp", "--scheme", "allreduce", "lr=0.2", "--workers", "2", "--steps", "300")
    run = cluster.train("allreduce", *words, "--engine", "strategy=spread")
    assert run.ended() == 0, run.err
    trained(cluster.folder / "allreduce", 300)
    until(lambda: not cluster.tasks(), 10, f"nothing is left: {cluster.tasks()}")


def test_killed_actors_and_tasks_come_back(cluster: Cluster) -> None:
    gate, hook = linger(cluster.folder)
    words = ("digits-mlp", "--scheme", "async", "lr=0.2", "--workers", "2", "--steps", "400", "--patience", "10")
    run = cluster.train("killed", *words, "--checkpoint-every", "50", *hook)
    folder = cluster.folder / "killed"
    trains(run, folder)

    worker = cluster.rank("PACELINE_TASK=worker:0")
    os.kill(parent_of(worker), signal.SIGKILL)  # the actor: its task goes with it
    until(lambda: cluster.rank("PACELINE_TASK=worker:0") not in (0, worker), SECONDS, f"it is back\n{run.err}")
    assert not Path(f"/proc/{worker}").exists()

    chief = cluster.rank("PACELINE_TASK=chief")
    os.kill(chief, signal.SIGKILL)  # the task: its actor stays
    until(lambda: cluster.rank("PACELINE_TASK=chief") not in (0, chief), SECONDS, f"it is back\n{run.err}")
    gate.touch()
    assert run.ended() == 0, run.err
    trained(folder)
    assert "worker:0: its actor died and is restarted by Ray" in run.err
    assert "chief: was killed by SIGKILL; restarted" in run.err
    until(lambda: not cluster.tasks(), 10, f"nothing is left: {cluster.tasks()}")


def test_an_interrupt_ends_the_run_in_order(cluster: Cluster) -> None:
    words = ("digits-mlp", "--scheme", "async", "lr=0.2", "--workers", "2", "--checkpoint-every", "50", *ENDLESS)
    run = cluster.train("interrupted", *words)
    folder = cluster.folder / "interrupted"
    trains(run, folder)
    run.process.send_signal(signal.SIGINT)
    assert run.ended() == 130, run.err
    assert (folder / "result.json").exists()
    until(lambda: not cluster.tasks(), 10, f"nothing is left: {cluster.tasks()}")


def test_a_killed_launch_leaves_nothing(cluster: Cluster) -> None:
    words = ("digits-mlp", "--scheme", "async", "--workers", "2", "--checkpoint-every", "50", *ENDLESS)
    run = cluster.train("orphaned", *words)
    trains(run, cluster.folder / "orphaned")
    run.process.kill()
    run.ended()
    until(lambda: not cluster.tasks(), SECONDS, f"nothing is left: {cluster.tasks()}")


def test_too_little_room_is_told(cluster: Cluster) -> None:
    words = ("digits-mlp", "--scheme", "async", "--workers", "8", "--steps", "10")
    run = cluster.train("crowded", *words, "--engine", "patience=2")
    assert run.ended() == 1
    assert "found no room for 9 tasks within 2 s" in run.err


def test_a_run_that_fails_gives_its_exit_code(cluster: Cluster) -> None:
    run = cluster.train("failed", "digits-mlp", "--scheme", "async", "lr=1e30", "--workers", "2", "--steps", "400")
    assert run.ended() == 1
    assert "loss" in run.err
    assert "restarted" not in run.err


def test_without_a_cluster_this_machine_is_one(tmp_path: Path) -> None:
    with shells(tmp_path) as alone:
        words = ("digits-mlp", "--scheme", "sync", "lr=0.2", "--workers", "2", "--steps", "100", "--on", "ray")
        run = alone("alone", "train", *words, *RUN, "--dir", str(tmp_path / "run"), RAY_TMPDIR="/tmp", **RAY)
        assert run.ended() == 0, run.err
        trained(tmp_path / "run", 100, 0.5)
        assert "no cluster is running" in run.err


def test_a_wrong_address_is_told(tmp_path: Path) -> None:
    with shells(tmp_path) as alone:
        nowhere = f"127.0.0.1:{free_ports(1)[0]}"
        run = alone("alone", "train", "digits-mlp", "--on", "ray", "--engine", f"address={nowhere}", **RAY)
        assert run.ended() == 2
        assert f"no Ray cluster answers at {nowhere}" in run.err


def trains(run: Shell, folder: Path) -> None:
    def begun() -> bool:
        assert run.process.poll() is None, run.err
        return updates_of(folder) >= 50

    until(begun, SECONDS, "it trains")


def parent_of(number: int) -> int:
    return int(subprocess.check_output(["ps", "-o", "ppid=", "-p", str(number)], text=True))
