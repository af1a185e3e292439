"""Training under a real Slurm: shapes of jobs, roles and tasks that are killed, time limits, a node without power."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from beds.hosts import until
from beds.slurm import Slurm, cluster
from far_runs import COMMAND, LIMIT, Story, options

from paceline.launcher import Job
from paceline.launchers import slurm as launcher
from paceline.runs import checkpoint

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

# a hook whose file takes for ever to load on the nodes, so that the chief never gets past its start
NEVER_READY = """
import os, threading
from dataclasses import dataclass
from pathlib import Path
from paceline.hook import Hook

if "SLURM_STEP_ID" in os.environ:
    restarts = os.environ.get("SLURM_RESTART_COUNT", "0")
    Path(os.environ["PACELINE_MEET"]).with_name(f"starting-{restarts}").touch()
    threading.Event().wait()

@dataclass
class Harmless(Hook):
    pass
"""


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    with cluster(nodes=2) as up:
        yield up


@contextmanager
def submitted(
    slurm: Slurm, place: Path, *words: str, before: Sequence[str] = (), engine: Sequence[str] = ()
) -> Iterator[Story]:
    """`paceline train …` on the login host, with a directory that all nodes see."""
    on = ["--on", "slurm", *(word for one in engine for word in ("--engine", one))] if engine else []
    command = [*before, *COMMAND, *options(place), *words, *on]
    environment = slurm.environment | {"XDG_CONFIG_HOME": str(place / "config")}
    output = place / "output"
    with output.open("w") as log:
        process = slurm.login.start(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
    nodes = {name: slurm.hosts[name] for name in slurm.nodes}
    with process:
        yield Story(place, nodes, process, output)


def job_of(story: Story) -> str:
    return re.findall(r"Slurm job (\d+) is submitted", story.output.read_text())[0]


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
        assert story.stands() == stands
        result = story.enough()
    left_nothing(slurm)
    assert result["restarts"] == 0
    assert "has ended" in story.output.read_text()
    secret = (story.folder / "secret").read_text().strip()
    assert secret not in (story.folder / "job.sbatch").read_text() + story.told()


def test_a_step_of_the_users_own_trains(slurm: Slurm, tmp_path: Path) -> None:
    """`srun paceline train …`, a task on each node: the server on the first, as no placement is given."""
    with submitted(slurm, tmp_path, before=["srun", "-N2", "-n2"]) as story:
        story.until_it_trains(2)
        assert story.stands() == {"server:0": "n1", "chief": "n2"}
        story.enough()
    left_nothing(slurm)


def test_the_run_continues_whichever_role_is_killed(slurm: Slurm, tmp_path: Path) -> None:
    """Roles one after another; then the task of a worker, which the others do without; then the hub: a new step."""
    words = ["--workers", "2", "--servers", "2", "--placement", "spread"]
    with submitted(slurm, tmp_path, *words, engine=["nodes=2"]) as story:
        story.until_it_trains(4)
        assert story.stands() == {"server:0": "n1", "server:1": "n2", "chief": "n1", "worker:1": "n2"}
        for role in ("worker:1", "server:1", "server:0", "chief"):
            story.kill(role)
        os.kill(story.task("worker:1"), signal.SIGKILL)
        story.until(lambda: "worker:1" not in story.roles(), "the worker is gone with its task")
        story.until_it_gets_on()
        os.kill(story.task("chief"), signal.SIGKILL)
        story.until(lambda: "the step is restarted" in story.output.read_text(), "a new step")
        story.until_it_trains(4)
        story.enough()
    left_nothing(slurm)


def test_a_time_limit_and_a_lost_node_put_the_job_into_the_queue_again(tmp_path: Path) -> None:
    with cluster(nodes=3, patience=5) as slurm:
        words = ["--workers", "1", "--placement", "pack"]
        with submitted(slurm, tmp_path, *words, engine=["nodes=2"]) as story:
            story.until_it_trains(2)
            before = story.progress
            slurm.ask("scancel", "--batch", "--signal=USR1", job_of(story))  # as Slurm does before the time is over
            story.until(lambda: slurm.job(job_of(story))["Restarts"] == "1", "the job is in the queue again")
            assert "a last checkpoint" in story.told()
            story.until_it_trains(2)
            assert story.progress >= before  # nothing is lost
            story.until_saved()
            assert story.stands()["chief"] == "n2"
            slurm.power_cut("n2")
            story.until(lambda: slurm.job(job_of(story))["Restarts"] == "2", "the job is in the queue once more")
            story.until_it_trains(2)
            assert set(story.stands().values()) == {"n1", "n3"}
            assert story.progress >= before
            story.enough()
        left_nothing(slurm)
        assert story.output.read_text().count("was requeued (restart") == 2


def test_a_time_limit_during_every_start_does_not_queue_the_job_for_ever(slurm: Slurm, tmp_path: Path) -> None:
    """Its time is over before it has trained, each time: after two turns in the queue the job ends and says why."""
    (tmp_path / "never_ready.py").write_text(NEVER_READY)
    words = ["--workers", "1", "--hook", f"{tmp_path}/never_ready.py:Harmless"]
    with submitted(slurm, tmp_path, *words, engine=["tasks-per-node=2", "requeues=2"]) as story:
        for restarts in range(3):
            story.until((story.folder / f"starting-{restarts}").exists, f"it starts, restart {restarts}")
            slurm.ask("scancel", "--batch", "--signal=USR1", job_of(story))
        assert story.process.wait(LIMIT) == 1, story.told()
    left_nothing(slurm)
    assert slurm.job(job_of(story))["Restarts"] == "2"
    assert "requeued 2 times in a row without any checkpoint" in story.told()


def test_ctrl_c_ends_the_job_in_order(slurm: Slurm, tmp_path: Path) -> None:
    with submitted(slurm, tmp_path, "--workers", "1", engine=["tasks-per-node=2"]) as story:
        story.until_it_trains(2)
        before = story.progress
        story.process.send_signal(signal.SIGINT)
        assert story.process.wait(LIMIT) == 130, story.told()
    left_nothing(slurm)
    assert "with a last checkpoint (again to cancel it)" in story.told()
    assert max(checkpoint.steps(story.folder / "checkpoints")) >= before


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


def test_gpus_are_for_those_that_train(tmp_path: Path) -> None:
    """Two nodes with two GPUs each: chief and a worker on the first, a worker and a server on the second."""
    tell = f'echo "$CUDA_VISIBLE_DEVICES" >{tmp_path}/task-$SLURM_PROCID.new; touch "$PACELINE_MEET"'
    command = ("sh", "-c", f"{tell}; mv {tmp_path}/task-$SLURM_PROCID.new {tmp_path}/task-$SLURM_PROCID")
    tasks = ("chief", "worker:0", "worker:1", "server:0")
    with cluster(nodes=2, gpus=2) as slurm:
        job = Job(command, tasks, tmp_path, "gpus", {"nodes": "2", "memory": "100M"}, gpus=1)
        (tmp_path / "logs").mkdir()
        (tmp_path / "job.sbatch").write_text(launcher.script(job))
        slurm.ask("sbatch", "--parsable", str(tmp_path / "job.sbatch"))
        told = [tmp_path / f"task-{number}" for number in range(4)]
        until(lambda: all(one.exists() for one in told), LIMIT, f"all tasks have begun: {slurm.logs()}")
        assert [one.read_text().strip() for one in told] == ["0", "1", "0", ""]
        left_nothing(slurm)


def test_slurm_accepts_what_is_written_for_it(slurm: Slurm, tmp_path: Path) -> None:
    tasks = ("chief", "worker:0", "worker:1", "server:0")
    many: list[dict[str, str]] = [
        {"nodes": "2"},
        {"tasks-per-node": "4", "time": "1-0", "partition": "main", "signal": "USR2@300"},
        {"cpus": "2", "requeue": "no", "array": "lr=0.1,0.2"},
        {"nodes": "2", "ports": "2", "extra": "--exclusive; --nice=10"},
    ]
    for number, settings in enumerate(many):
        folder = tmp_path / f"it's run {number}"
        folder.mkdir()
        job = Job(
            ("paceline", "train", "toy", "--dir", str(folder)), tasks, folder, "toy run", settings | {"memory": "1G"}
        )
        script = folder / "job.sbatch"
        script.write_text(launcher.script(job))
        done = slurm.login.run(["sbatch", "--test-only", str(script)], env=slurm.environment)
        assert done.returncode == 0, f"{settings}: {done.stderr}"
