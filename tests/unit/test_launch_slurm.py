"""What is submitted to Slurm, and with which resources. Its commands are stand-ins."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from slurm_stand_ins import FOUR, NODES, PARTITIONS, SECRET, Fake, answering, commands, job, ran

from paceline.errors import UsageError
from paceline.launcher import Job
from paceline.launchers import slurm
from paceline.launchers._slurm_resources import Partition, SlurmNode, asked, partition, share
from paceline.launchers.slurm import SlurmLauncher


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    return commands(tmp_path, monkeypatch)


@pytest.fixture
def here(fake: Fake) -> None:
    answering(fake)


def options_of(text: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]


def checked(text: str) -> str:
    """The script, after bash has read it without running it."""
    done = subprocess.run(["/bin/bash", "-n"], input=text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return text


# the script


@pytest.mark.usefixtures("here")
def test_the_script_has_all_that_the_tasks_need_and_no_secret(tmp_path: Path) -> None:
    text = checked(slurm.script(job(tmp_path, nodes="2", time="10:00", partition="main", account="me")))
    assert options_of(text) == [
        "--job-name=mnist-mlp-async",
        f"--output={tmp_path}/logs/slurm-%j.out",
        "--open-mode=append",
        f"--chdir={Path.cwd()}",
        "--partition=main",
        "--account=me",
        "--time=10:00",
        "--nodes=2",
        "--ntasks=4",
        "--ntasks-per-node=2",
        "--cpus-per-task=1",
        "--mem=6000M",
        "--requeue",
        "--signal=B:USR1@60",
    ]
    assert "# memory: 3000M for each task: 2 tasks fit on a node, and n2 has 6000M" in text
    assert "export PACELINE_PLACEMENT=chief,worker,worker,server\n" in text
    assert f"export PACELINE_SECRET_FILE={tmp_path}/secret\n" in text
    assert f"export PACELINE_MEET={tmp_path}/hub\n" in text
    assert "-m paceline train mnist-mlp --scheme async lr=0.1 --dir" in text
    assert SECRET.hex() not in text
    assert SECRET.decode() not in text


@pytest.mark.parametrize(
    ("options", "wanted", "unwanted"),
    [
        ({"requeue": "no"}, ["--no-requeue"], ["--requeue"]),
        ({"signal": "no"}, [], ["--signal"]),
        ({"signal": "SIGUSR2@300"}, ["--signal=B:USR2@300"], []),
        ({"memory": "2G"}, ["--mem-per-cpu=2048M"], ["--mem="]),
        ({"memory": "2G", "cpus": "4"}, ["--mem-per-cpu=512M", "--cpus-per-task=4"], []),
        ({"memory": "2G", "tasks_per_node": "4"}, ["--mem=8192M", "--nodes=1", "--ntasks-per-node=4"], []),
        ({"gpus": "1", "nodes": "2"}, ["--gres=gpu:2"], ["--gpus-per-task"]),
        ({"gpus": "a100:2", "nodes": "2"}, ["--gres=gpu:a100:4"], []),
        ({"constraint": "ib&avx", "reservation": "r", "qos": "q"}, ["--constraint='ib&avx'", "--qos=q"], []),
        ({"extra": "--exclusive; --mail-type=END"}, ["--exclusive", "--mail-type=END"], []),
    ],
)
@pytest.mark.usefixtures("here")
def test_settings_become_options(
    tmp_path: Path, options: dict[str, str], wanted: list[str], unwanted: list[str]
) -> None:
    found = options_of(checked(slurm.script(job(tmp_path, **options))))
    assert set(wanted) <= set(found)
    for prefix in unwanted:
        assert not [option for option in found if option.startswith(prefix)]


@pytest.mark.usefixtures("here")
def test_srun_is_told_what_it_does_not_take_over(tmp_path: Path) -> None:
    text = checked(slurm.script(job(tmp_path, threads=2, gpus=1, ports="4", nodes="2")))
    step = next(line for line in text.splitlines() if line.strip().startswith("srun "))
    for word in ("--ntasks=4", "--cpus-per-task=2", "--kill-on-bad-exit=0", "--resv-ports=4"):
        assert word in step.split()


@pytest.mark.usefixtures("here")
def test_where_every_task_trains_slurm_gives_each_its_gpus(tmp_path: Path) -> None:
    trains = FOUR[:3]
    text = checked(slurm.script(job(tmp_path, trains, gpus=1)))
    assert "--gpus-per-task=1" in options_of(text)
    assert " --gpu-bind=single:1 " in text
    assert "--gres=gpu:a100:6" in options_of(slurm.script(job(tmp_path, trains, gpus="a100:2", tasks_per_node="3")))


def _shown(text: str, node: int, local: int, devices: str | None = "0,1,2,3") -> str:
    """What a task of the job finds in CUDA_VISIBLE_DEVICES; `devices` is what Slurm shows to its node."""
    task = text[text.index("task='") : text.index("\n\njob=")]
    told = {"SLURM_NODEID": str(node), "SLURM_LOCALID": str(local)}
    told |= {} if devices is None else {"CUDA_VISIBLE_DEVICES": devices}
    done = ran(f'{task}\nbash -c "$task" task sh -c \'echo "<${{CUDA_VISIBLE_DEVICES-unset}}>"\'', **told)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.usefixtures("here")
def test_servers_take_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """chief, worker | worker, server on two nodes: two GPUs for the first, of which the second uses one."""
    text = checked(slurm.script(job(tmp_path, gpus=1, nodes="2")))
    assert "--gres=gpu:2" in options_of(text)
    assert "--gpu-bind" not in text
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    shown = [_shown(text, node, local, "0,1") for node in (0, 1) for local in (0, 1)]
    assert shown == ["<0>", "<1>", "<0>", "<>"]
    assert _shown(text, 0, 1, None) == "<unset>"  # a Slurm that does not say which
    two = checked(slurm.script(job(tmp_path, gpus="a100:2", nodes="2")))
    assert "--gres=gpu:a100:4" in options_of(two)
    assert [_shown(two, 0, 1, "4,5,6,7"), _shown(two, 1, 1)] == ["<6,7>", "<>"]
    assert "--gres=gpu:1" in options_of(slurm.script(job(tmp_path, gpus=1, nodes="4")))


@pytest.mark.usefixtures("here")
def test_an_evaluator_takes_a_gpu_when_it_is_asked_to(tmp_path: Path) -> None:
    tasks = ("chief", "worker:0", "server:0", "evaluator")
    plain = job(tmp_path, tasks, gpus=1, nodes="1")
    assert "--gres=gpu:2" in options_of(slurm.script(plain))
    assert "--gres=gpu:3" in options_of(slurm.script(replace(plain, evaluator_gpus=1)))


@pytest.mark.usefixtures("here")
def test_gpus_for_some_tasks_only_need_to_know_the_nodes(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="give --engine nodes="):
        slurm.script(job(tmp_path, gpus=1))


@pytest.mark.usefixtures("here")
def test_odd_paths_and_names_come_through(tmp_path: Path) -> None:
    folder = tmp_path / "it's 100% $HOME"
    folder.mkdir()
    text = checked(slurm.script(Job(("paceline", "train", "a;b", "--dir", str(folder)), FOUR, folder, "a b;c", {})))
    assert "#SBATCH --job-name=a-b-c\n" in text
    assert "100%% " in next(option for option in options_of(text) if option.startswith("--output="))
    printed = subprocess.run(
        ["/bin/bash", "-c", text.partition("\njob=")[0] + '\nprintf %s "$PACELINE_MEET"'],
        capture_output=True,
        text=True,
        check=True,
    )
    assert printed.stdout == f"{folder}/hub"


@pytest.mark.usefixtures("here")
def test_a_sweep_is_an_array_of_jobs_with_a_directory_each(tmp_path: Path, fake: Fake) -> None:
    fake("srun", 'echo "$PACELINE_MEET" "$@"')
    text = checked(slurm.script(job(tmp_path, array="lr=0.1,0.2,0.4", memory="1G")))
    assert "--array=0-2" in options_of(text)
    assert f"--output={tmp_path}/logs/slurm-%A_%a.out" in options_of(text)
    done = ran(text, SLURM_ARRAY_TASK_ID="2", SLURM_ARRAY_JOB_ID="7", SLURM_JOB_ID="9")
    assert done.stdout.startswith(f"{tmp_path}/hub-2 ")
    assert done.stdout.endswith(f"lr=0.1 --dir {tmp_path}/mnist-mlp-async-2 lr=0.4\n")


@pytest.mark.parametrize(
    ("policy", "tasks", "kinds"),
    [
        ("pack", ("chief", "worker:0", "server:0", "server:1"), "server,server,chief,worker"),
        ("spread", ("chief", "worker:0", "server:0", "server:1"), "server,chief,server,worker"),
        ("ps-per-node", ("chief", "worker:0", "server:0", "server:1"), "server,chief,server,worker"),
        ("spread", ("chief", "worker:0", "server:0", "evaluator"), "server,chief,worker,evaluator"),
        ("worker,ps,ps,worker", ("chief", "worker:0", "server:0", "server:1"), "chief,server,server,worker"),
    ],
)
@pytest.mark.usefixtures("here")
def test_a_placement_gives_each_seat_its_role(tmp_path: Path, policy: str, tasks: tuple[str, ...], kinds: str) -> None:
    text = slurm.script(job(tmp_path, tasks, nodes="2", placement=policy))
    assert f"export PACELINE_PLACEMENT={kinds}\n" in text


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"nodes": "5"}, "only 4 tasks"),
        ({"nodes": "0"}, "at least 1"),
        ({"nodes": "two"}, "whole number"),
        ({"nodes": "2", "tasks_per_node": "1"}, "room for 2 tasks"),
        ({"placement": "spread"}, "which tasks share a node"),
        ({"placement": "ps,ps,worker,worker"}, "should be those of chief, worker:0, worker:1, server:0"),
        ({"placement": "sideways"}, "no placement 'sideways'"),
        ({"memory": "much"}, "such as 4G"),
        ({"gpus": "all"}, "the GPUs of a task are needed"),
        ({"signal": "USR1"}, "such as USR1@120"),
        ({"signal": "KILL@60"}, "USR1, USR2, TERM or HUP"),
        ({"requeue": "maybe"}, "yes or no"),
        ({"array": "lr"}, "such as lr=0.1,0.2,0.4"),
        ({"array": "lr=0.1,,0.2"}, "such as lr=0.1,0.2,0.4"),
        ({"time": "10 minutes"}, "one word"),
        ({"partition": "mian"}, "no partition 'mian'; there are: main, small, wide"),
        ({"cpus": "128"}, "no node of partition main has room"),
    ],
)
@pytest.mark.usefixtures("here")
def test_wrong_values_are_named(tmp_path: Path, options: dict[str, str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        slurm.script(job(tmp_path, **options))


def test_without_slurm_a_dry_run_shows_the_script_and_writes_nothing(tmp_path: Path, fake: Fake) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    text = SlurmLauncher().shown(job(folder))
    assert text.startswith(f"# sbatch --parsable {folder}/job.sbatch\n#!/bin/bash\n")
    assert "# memory: is computed where Slurm answers" in text
    assert list(folder.iterdir()) == []
    with pytest.raises(UsageError, match=r"needs sbatch, which is missing here.*apt-get install slurm-wlm"):
        SlurmLauncher().launch(job(folder))


# memory


def test_a_partition_is_read() -> None:
    main = Partition("main", (SlurmNode("n1", 4, 8000), SlurmNode("n2", 4, 6000)))
    assert partition(NODES, PARTITIONS, None) == main
    assert partition(NODES, PARTITIONS, "wide") == Partition("wide", (SlurmNode("big", 64, 256000, 2),), None, 2000)
    assert partition(NODES, PARTITIONS, "small").default == "DefMemPerCPU=1500"
    with pytest.raises(UsageError, match=r"no default partition: give --engine partition=small\|wide"):
        partition(NODES, PARTITIONS.split("\n", 1)[1], None)


@pytest.mark.parametrize(
    ("tasks", "per_node", "cpus", "option"),
    [
        (4, 2, 1, "--mem=6000M"),  # two on n2, 3000 each
        (4, 1, 1, "--mem=6000M"),
        (4, None, 1, "--mem-per-cpu=1500M"),  # all four may come to stand on n2
        (4, None, 2, "--mem-per-cpu=1500M"),  # two of two processors each: 3000 a task
        (1, None, 1, "--mem-per-cpu=6000M"),
        (64, None, 4, "--mem-per-cpu=1500M"),  # one on each node
    ],
)
def test_the_share_of_the_smallest_node(tasks: int, per_node: int | None, cpus: int, option: str) -> None:
    assert share(partition(NODES, PARTITIONS, "main"), tasks, per_node, cpus).option == option


def test_what_a_site_sets_counts() -> None:
    default = share(partition(NODES, PARTITIONS, "small"), 4, 4, 1)
    assert default.option is None
    assert "DefMemPerCPU=1500" in default.reason
    node = (SlurmNode("n", 8, 16000),)
    assert share(Partition("p", node, most_per_node=4000), 4, 4, 1).option == "--mem=4000M"
    assert share(Partition("p", node, most_per_cpu=1000), 2, 2, 2).option == "--mem=4000M"
    # a task gets a whole core, with both its threads
    assert share(Partition("p", (SlurmNode("n", 8, 16000, 2),)), 1, None, 1).option == "--mem-per-cpu=8000M"


def test_memory_of_a_task_is_asked_for_by_the_processor() -> None:
    assert asked(3000, None, 2).option == "--mem-per-cpu=1500M"
