"""Training under a real Slurm: shapes of jobs, roles and tasks that are killed, time limits, a node without power."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from beds.hosts import Running, until
from beds.slurm import Slurm, cluster

from paceline.launchers import slurm as launcher
from paceline.launchers.job import Job

LIMIT = 120.0  # seconds that anything may take on a busy machine
COMMAND = [sys.executable, "-P", "-m", "paceline", "train", "digits-mlp", "--scheme", "async", "lr=0.1"]
ROLE = re.compile(r"paceline role (\S+)")
TASK = re.compile(r"python\S* -P -m paceline train ")

# a run goes on until it is told, at least for so many updates, and says how far it is
HOOK = """
import threading
from dataclasses import dataclass
from pathlib import Path
from paceline.hook import Hook, Session

@dataclass
class UntilTold(Hook):
    folder: str

    def after_step(self, session: Session) -> None:
        if not session.worker.rank:
            Path(self.folder, "progress").write_text(str(session.updates))
        if session.updates >= 600 and Path(self.folder, "enough").exists():
            session.stop("enough")
        threading.Event().wait(0.002)
"""

# a hook that is there where the job is submitted, but not on the nodes
ONLY_HERE = """
import os
from dataclasses import dataclass
from paceline.errors import DataError
from paceline.hook import Hook

if "SLURM_STEP_ID" in os.environ:
    raise DataError("not on this node")

@dataclass
class Harmless(Hook):
    pass
"""


@dataclass
class Story:
    """A run that was submitted, and what can be seen and done while it goes on."""

    slurm: Slurm
    folder: Path
    process: Running
    output: Path

    @property
    def progress(self) -> int:
        try:
            return int((self.folder.parent / "progress").read_text())
        except (OSError, ValueError):
            return -1

    @property
    def job(self) -> str:
        return re.findall(r"Slurm job (\d+) is submitted", self.output.read_text())[0]

    def roles(self) -> dict[str, tuple[str, int]]:
        """The node and process of each role that is there."""
        found = {}
        for node in self.slurm.nodes:
            for pid, words in self.slurm.hosts[node].processes().items():
                if match := ROLE.fullmatch(words):
                    found[match[1]] = (node, pid)
        return found

    def task(self, role: str) -> int:
        """The process that the engine has started for a role, of which the role is a child."""
        stat = Path(f"/proc/{self.roles()[role][1]}/stat").read_text()
        return int(stat.rpartition(")")[2].split()[1])

    def until(self, condition: Callable[[], bool], what: str) -> None:
        def holds() -> bool:
            assert self.process.poll() is None, f"ended before {what}: {self.told()}"
            return condition()

        try:
            until(holds, LIMIT, what)
        except AssertionError as error:
            raise AssertionError(f"{error}: {self.told()}") from None

    def until_it_trains(self, roles: int) -> None:
        before = self.progress
        self.until(lambda: len(self.roles()) == roles and self.progress not in (before, -1), f"{roles} roles train")

    def kill(self, role: str) -> None:
        """kill -9, and somebody else plays the role, and the run gets on."""
        node, pid = self.roles()[role]
        os.kill(pid, signal.SIGKILL)
        self.until(lambda: self.roles().get(role, (node, pid))[1] != pid, f"another {role}")
        before = self.progress
        self.until(lambda: self.progress not in (before, -1), f"progress after the end of {role}")

    def end(self, code: int = 0) -> dict[str, Any]:
        """Tell it that it is enough; it must end by itself, leave nothing, and have learnt something."""
        (self.folder.parent / "enough").touch()
        assert self.process.wait(LIMIT) == code, self.told()
        left_nothing(self.slurm)
        result: dict[str, Any] = json.loads((self.folder / "result.json").read_text())
        assert result["updates"] >= 600
        assert result["metrics"]["accuracy"] > 0.85
        return result

    def told(self) -> str:
        logs = [f"== {log.name}\n{log.read_text()[-2000:]}" for log in sorted((self.folder / "logs").glob("*"))]
        return "\n".join([self.output.read_text(), *logs])


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    with cluster(nodes=2) as up:
        yield up


@contextmanager
def submitted(
    slurm: Slurm, place: Path, *words: str, before: Sequence[str] = (), engine: Sequence[str] = ()
) -> Iterator[Story]:
    """`paceline train …` on the login host, with a directory that all nodes see."""
    (place / "told.py").write_text(HOOK)
    folder, output = place / "run", place / "output"
    hook = ["--hook", f"{place}/told.py:UntilTold:folder={place}", "--steps", "1000000"]
    often = ["--checkpoint-seconds", "1", "--patience", "8"]
    on = ["--on", "slurm", *(word for one in engine for word in ("--engine", one))] if engine else []
    with output.open("w") as log:
        command = [*before, *COMMAND, *hook, *often, *words, "--dir", str(folder), *on]
        process = slurm.login.start(command, env=slurm.environment, stdout=log, stderr=subprocess.STDOUT)
    with process:
        yield Story(slurm, folder, process, output)


def left_nothing(slurm: Slurm) -> None:
    until(lambda: not slurm.processes(), 15, f"nothing is left on the nodes, but for {slurm.processes()}")


@pytest.mark.parametrize(
    ("nodes", "servers", "placement", "stands"),
    [
        pytest.param(1, 1, "pack", {"server:0": "n1", "chief": "n1", "worker:1": "n1"}, id="one node"),
        pytest.param(
            *(2, 2, "pack", {"server:0": "n1", "server:1": "n1", "chief": "n2", "worker:1": "n2"}), id="2x2, packed"
        ),
    ],
)
def test_a_job_trains_with_every_role_in_its_place(
    slurm: Slurm, tmp_path: Path, nodes: int, servers: int, placement: str, stands: dict[str, str]
) -> None:
    words = ["--workers", "2", "--servers", str(servers), "--placement", placement]
    with submitted(slurm, tmp_path, *words, engine=[f"nodes={nodes}"]) as story:
        story.until_it_trains(len(stands))
        assert {role: node for role, (node, _) in story.roles().items()} == stands
        result = story.end()
    assert result["restarts"] == 0
    assert "has ended" in story.output.read_text()
    secret = (story.folder / "secret").read_text().strip()
    assert secret not in (story.folder / "job.sbatch").read_text() + story.told()


def test_a_step_of_the_users_own_trains(slurm: Slurm, tmp_path: Path) -> None:
    """`srun paceline train …`, a task on each node: the server on the first, as no placement is given."""
    with submitted(slurm, tmp_path, before=["srun", "-N2", "-n2"]) as story:
        story.until_it_trains(2)
        assert {role: node for role, (node, _) in story.roles().items()} == {"server:0": "n1", "chief": "n2"}
        story.end()


def test_whoever_is_killed_the_run_goes_on(slurm: Slurm, tmp_path: Path) -> None:
    """Roles one after another; then the task of a worker, which the others do without; then the hub: a new step."""
    words = ["--workers", "2", "--servers", "2", "--placement", "spread"]
    with submitted(slurm, tmp_path, *words, engine=["nodes=2"]) as story:
        story.until_it_trains(4)
        nodes = {role: node for role, (node, _) in story.roles().items()}
        assert nodes == {"server:0": "n1", "server:1": "n2", "chief": "n1", "worker:1": "n2"}
        for role in ("worker:1", "server:1", "server:0", "chief"):
            story.kill(role)
        os.kill(story.task("worker:1"), signal.SIGKILL)
        story.until(lambda: "worker:1" not in story.roles(), "the worker is gone with its task")
        before = story.progress
        story.until(lambda: story.progress > before, "the others go on")
        os.kill(story.task("chief"), signal.SIGKILL)
        story.until(lambda: "the step begins again" in story.output.read_text(), "a new step")
        story.until_it_trains(4)
        story.end()


def test_a_time_limit_and_a_lost_node_put_the_job_into_the_queue_again(tmp_path: Path) -> None:
    with cluster(nodes=3, patience=5) as slurm:
        words = ["--workers", "1", "--placement", "pack"]
        with submitted(slurm, tmp_path, *words, engine=["nodes=2"]) as story:
            story.until_it_trains(2)
            before = story.progress
            slurm.ask("scancel", "--batch", "--signal=USR1", story.job)  # as Slurm does before the time is over
            story.until(lambda: slurm.job(story.job)["Restarts"] == "1", "the job is in the queue again")
            assert "a last checkpoint" in story.told()
            story.until_it_trains(2)
            assert story.progress >= before  # nothing is lost
            checkpoints = {path.name for path in (story.folder / "checkpoints").iterdir()}
            story.until(
                lambda: bool({path.name for path in (story.folder / "checkpoints").iterdir()} - checkpoints),
                "one more checkpoint",
            )
            assert story.roles()["chief"][0] == "n2"
            slurm.power_cut("n2")
            story.until(lambda: slurm.job(story.job)["Restarts"] == "2", "the job is in the queue once more")
            story.until_it_trains(2)
            assert {node for node, _ in story.roles().values()} == {"n1", "n3"}
            assert story.progress >= before
            story.end()
        assert story.output.read_text().count("was put into the queue again") == 2


def test_a_sweep(slurm: Slurm, tmp_path: Path) -> None:
    command = [*COMMAND[:-1], "--workers", "1", "--steps", "300", "--dir", str(tmp_path / "runs"), "--on", "slurm"]
    done = slurm.login.run(
        [*command, "--engine", "array=lr=0.05,0.2", "--engine", "memory=500M"], env=slurm.environment, timeout=LIMIT
    )
    assert done.returncode == 0, done.stderr
    left_nothing(slurm)
    runs = sorted((tmp_path / "runs").glob("runs-*"))
    assert [json.loads((run / "plan.json").read_text())["hyper"]["lr"] for run in runs] == ["0.05", "0.2"]
    assert all(json.loads((run / "result.json").read_text())["updates"] == 300 for run in runs)


def test_a_chief_that_cannot_begin_ends_the_job_at_once(slurm: Slurm, tmp_path: Path) -> None:
    (tmp_path / "only_here.py").write_text(ONLY_HERE)
    words = ["--hook", f"{tmp_path}/only_here.py:Harmless", "--dir", str(tmp_path / "run"), "--on", "slurm"]
    done = slurm.login.run([*COMMAND, *words], env=slurm.environment, timeout=LIMIT)
    assert "not on this node" in done.stderr + done.stdout
    assert done.returncode == 3
    left_nothing(slurm)


def test_slurm_accepts_what_is_written_for_it(slurm: Slurm, tmp_path: Path) -> None:
    tasks = ("chief", "worker:0", "worker:1", "server:0")
    many: list[dict[str, str]] = [
        {"nodes": "2"},
        {"tasks-per-node": "4", "time": "1-0", "partition": "main", "signal": "USR2@300"},
        {"cpus": "2", "requeue": "no", "array": "lr=0.1,0.2"},
        {"nodes": "2", "ports": "2", "extra": "--exclusive; --nice=10"},
    ]
    for number, options in enumerate(many):
        folder = tmp_path / f"it's run {number}"
        folder.mkdir()
        job = Job(
            ("paceline", "train", "toy", "--dir", str(folder)), tasks, folder, "toy run", options | {"memory": "1G"}
        )
        script = folder / "job.sbatch"
        script.write_text(launcher.script(job))
        done = slurm.login.run(["sbatch", "--test-only", str(script)], env=slurm.environment)
        assert done.returncode == 0, f"{options}: {done.stderr}"
