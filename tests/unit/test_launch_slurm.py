"""What is submitted to Slurm, what the batch script then does, what is told of the job. Its commands are stand-ins."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import RunError, UsageError
from paceline.launcher import Job
from paceline.launchers import _slurm_follow, slurm
from paceline.launchers._slurm_resources import Partition, SlurmNode, asked, partition, share
from paceline.launchers.slurm import SlurmLauncher

FOUR = ("chief", "worker:0", "worker:1", "server:0")
SECRET = b"an unlikely secret of 32 bytes ."
# as sinfo and scontrol of Slurm 22.05 print it, shortened
NODES = "n1|main|4|8000|1\nn2|main|4|6000|1\nbig|wide|64|256000|2\nn1|small|4|8000|1\n"
PARTITIONS = """
PartitionName=main AllowGroups=ALL Default=YES Nodes=n[1-2] DefMemPerNode=UNLIMITED MaxMemPerNode=UNLIMITED
PartitionName=wide AllowGroups=ALL Default=NO Nodes=big DefMemPerNode=UNLIMITED MaxMemPerCPU=2000
PartitionName=small AllowGroups=ALL Default=NO Nodes=n1 DefMemPerCPU=1500 MaxMemPerNode=4000
""".strip()

Fake = Callable[[str, str], Path]


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    """Put a shell script of this name on the path, where there are a few harmless commands, and none of Slurm's."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))

    def put(name: str, text: str) -> Path:
        path = folder / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        return path

    for name in ("cat", "seq", "rm", "touch", "wc"):  # scripts, not links: who writes here must not write elsewhere
        put(name, f'PATH=/usr/bin:/bin exec {name} "$@"')
    return lambda name, text: put(name, f"cd {tmp_path}\n{text}")


@pytest.fixture
def here(fake: Fake) -> None:
    """A Slurm that answers questions."""
    fake("sinfo", f"cat <<'.'\n{NODES}.")
    fake("scontrol", f"cat <<'.'\n{PARTITIONS}\n.")


def job(folder: Path, tasks: tuple[str, ...] = FOUR, threads: int = 1, gpus: int | str = 0, **options: str) -> Job:
    command = ("paceline", "train", "mnist-mlp", "--scheme", "async", "lr=0.1", "--dir", str(folder))
    given = {key.replace("_", "-"): value for key, value in options.items()}
    if isinstance(gpus, str):
        given, gpus = given | {"gpus": gpus}, 0
    return Job(command, tasks, folder, "mnist-mlp-async", given, threads, gpus, SECRET)


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
    done = _ran(f'{task}\nbash -c "$task" task sh -c \'echo "<${{CUDA_VISIBLE_DEVICES-unset}}>"\'', **told)
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
    done = _ran(text, SLURM_ARRAY_TASK_ID="2", SLURM_ARRAY_JOB_ID="7", SLURM_JOB_ID="9")
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


# what the batch script does


def _ran(text: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["/bin/bash", "-c", text],
        env={"PATH": os.environ["PATH"], "SLURM_JOB_ID": "9"} | environment,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


@pytest.mark.parametrize(
    ("codes", "code", "steps"),
    [
        ("0", 0, 1),
        ("137 0", 0, 2),
        ("137 139 1", 1, 3),
        ("137 137 137 137", 137, 4),  # as often as --engine restarts= allows
        ("130", 130, 1),
        ("143", 143, 1),
        ("2", 2, 1),
    ],
)
@pytest.mark.usefixtures("here")
def test_a_step_whose_task_was_killed_begins_again(
    tmp_path: Path, fake: Fake, codes: str, code: int, steps: int
) -> None:
    fake("srun", f'echo step >>steps; set -- {codes}; shift $(($(wc -l <steps) - 1)); touch hub; exit "$1"')
    fake("rm", '[ "$2" = "$PACELINE_MEET" ] && echo removed >>removed')
    done = _ran(slurm.script(job(tmp_path)))
    assert done.returncode == code, done.stderr
    assert (tmp_path / "steps").read_text().count("step") == steps
    assert (tmp_path / "removed").read_text().count("removed") == steps  # nobody may find an earlier hub
    assert done.stdout.count("the step is restarted") == steps - 1


@pytest.mark.parametrize(("code", "hub", "ends"), [(2, False, True), (1, True, False), (137, False, False)])
def test_a_task_that_fails_before_there_is_a_hub_ends_all(
    tmp_path: Path, fake: Fake, here: None, code: int, hub: bool, ends: bool
) -> None:
    deed = f"{'touch ' + str(tmp_path / 'hub') + ';' if hub else ''} exit {code}"
    text = slurm.script(Job(("sh", "-c", deed), FOUR, tmp_path, "x", {"restarts": "0"}))
    # one task fails, by which the step is ended: then that is all that srun itself knows
    fake(
        "srun",
        f'while [ "$1" != bash ]; do shift; done; shift; PATH=$PATH:/bin bash "$@"; exit {143 if ends else code}',
    )
    fake("scancel", 'echo "$@" >ended')
    done = _ran(text, SLURM_STEP_ID="0")
    assert done.returncode == code, done.stderr
    assert (tmp_path / "ended").exists() == ends
    if ends:
        assert (tmp_path / "ended").read_text() == "9.0\n"


@pytest.mark.parametrize(
    ("requeue", "code", "result", "queued"),
    [
        ("yes", 130, "", True),
        ("no", 130, "", False),
        ("yes", 0, "", False),
        ("yes", 2, "", False),
        ("yes", 1, "", True),  # interrupted while Python started
        ("yes", 1, '{"error": "the loss is not finite"}', False),
        ("yes", 1, '{"updates": 7}', True),
    ],
)
def test_near_the_time_limit_a_last_checkpoint_then_the_queue(
    tmp_path: Path, fake: Fake, here: None, requeue: str, code: int, result: str, queued: bool
) -> None:
    text = slurm.script(job(tmp_path, requeue=requeue))
    (tmp_path / "told").write_text(result)
    write = "cat told >result.json; touch -d tomorrow result.json;" if result else ""
    fake("srun", f'{write} kill -USR1 "$PPID"; until [ -e asked ]; do :; done; exit {code}')
    fake("scancel", 'echo "$@" >asked.part; cat asked.part >asked')
    fake("scontrol", 'echo "$@" >queued')
    fake("sleep", ":")  # in the meantime Slurm ends the script
    done = _ran(text, SLURM_RESTART_COUNT="2")
    assert done.returncode == code
    assert (tmp_path / "asked").read_text() == "--signal=INT 9\n"
    assert (tmp_path / "queued").exists() == queued
    if queued:
        assert (tmp_path / "queued").read_text() == "requeue 9\n"
    assert "is restarted (2), from the newest checkpoint" in done.stdout


@pytest.mark.parametrize(
    ("kept", "checkpoints", "limit", "ends", "left"),
    [
        (None, (), "2", False, "0 -1"),  # nothing is known of an earlier life
        ("0 -1", (), "2", False, "1 -1"),
        ("2 -1", (), "2", True, "3 -1"),
        ("2 -1", ("0000000000",), "2", False, "0 0"),  # a first checkpoint is progress
        ("2 40", ("0000000040", "0000000008"), "2", True, "3 40"),  # 0000000008 is no number of the octal system
        ("2 40", ("0000000040", "0000000041.new", "ofsomebody"), "2", False, "0 41"),
        ("0 40", ("0000000040",), "0", True, "1 40"),
    ],
)
def test_a_job_that_comes_back_without_progress_ends(
    tmp_path: Path, fake: Fake, here: None, kept: str | None, checkpoints: tuple[str, ...], limit: str, ends: bool,
    left: str,
) -> None:  # fmt: skip
    text = slurm.script(job(tmp_path, requeues=limit))
    if kept is not None:
        (tmp_path / "hub.requeues").write_text(f"{kept}\n")
    for name in checkpoints:
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    fake("srun", "echo step >>steps")
    done = _ran(text, SLURM_RESTART_COUNT="4")
    assert (tmp_path / "hub.requeues").read_text() == f"{left}\n"
    assert done.returncode == (1 if ends else 0), done.stderr
    assert (tmp_path / "steps").exists() != ends
    stood = "any checkpoint" if "-1" in left else f"a newer checkpoint than that of update {left.split()[1]}"
    told = f"times in a row without {stood} (--engine requeues={limit})"
    assert (told in done.stdout) == ends
    assert not done.stderr


@pytest.mark.parametrize(("saves", "queued"), [(True, True), (False, False)])
def test_near_the_time_limit_a_job_without_progress_is_not_queued_again(
    tmp_path: Path, fake: Fake, here: None, saves: bool, queued: bool
) -> None:
    (tmp_path / "hub.requeues").write_text("1 7\n")
    text = slurm.script(job(tmp_path, requeues="2"))
    (tmp_path / "checkpoints" / "0000000007").mkdir(parents=True)
    newer = tmp_path / "checkpoints" / "0000000009"
    save = f"PATH=/bin mkdir {newer};" if saves else ""
    fake("srun", f'{save} kill -USR1 "$PPID"; until [ -e asked ]; do :; done; exit 130')
    fake("scancel", 'echo "$@" >asked.part; cat asked.part >asked')
    fake("scontrol", 'echo "$@" >queued')
    fake("sleep", ":")
    done = _ran(text, SLURM_RESTART_COUNT="2")
    assert (tmp_path / "queued").exists() == queued
    assert done.returncode == (130 if queued else 1), done.stdout
    assert ("ends: it was requeued 2 times in a row without" in done.stdout) != queued


# following a job


def _told(fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *answers: str) -> list[str]:
    """Each look at the job gets the next of the answers; all but the number and the state is as in every one."""
    monkeypatch.setattr(_slurm_follow._Watch, "pause", lambda _: 0.0)
    for number, answer in enumerate(answers, 1):
        rest = "" if "\n" in answer else " Requeue=1 BatchFlag=1"
        (tmp_path / f"answer{number}").write_text(f"{answer}{rest}\n")
    fake("scontrol", 'echo look >>looks; cat "answer$(wc -l <looks)"')
    return []


def test_a_job_is_followed_to_its_end(tmp_path: Path, fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    said = _told(
        *(fake, tmp_path, monkeypatch),
        "JobId=7 JobName=JobState= JobState=PENDING Reason=Resources Restarts=0 ExitCode=0:0 NodeList=",
        "JobId=7 JobName=x JobState=RUNNING Reason=None Restarts=0 ExitCode=0:0 NodeList=n[1-2]",
        "JobId=7 JobName=x JobState=PENDING Reason=BeginTime Restarts=1 ExitCode=0:0 NodeList=",
        "JobId=7 JobName=x JobState=RUNNING Reason=None Restarts=1 ExitCode=0:0 NodeList=n[1,3]",
        "JobId=7 JobName=x JobState=COMPLETED Reason=None Restarts=1 ExitCode=0:0 NodeList=n[1,3]",
    )
    output = tmp_path / "slurm-7.out"
    output.write_text("trained\nno end of line")
    assert _slurm_follow.follow("7", output, said.append) == 0
    assert said == [
        *("job 7 waits (Resources)", "trained", "job 7 runs on n[1-2]"),
        "job 7 was requeued (restart 1): a node was lost, or its time was over; it resumes from its newest checkpoint",
        *("job 7 waits (BeginTime)", "job 7 runs on n[1,3]", "no end of line", "job 7 has ended"),
    ]


@pytest.mark.parametrize(
    ("state", "exit_code", "code", "words"),
    [
        ("FAILED", "2:0", 2, "failed, exit code 2"),
        ("FAILED", "0:9", 137, "failed, exit code 137"),
        ("TIMEOUT", "0:0", 1, "timeout, exit code 1"),
        ("OUT_OF_MEMORY", "0:125", 253, "out of memory"),
        ("CANCELLED", "0:15", 143, "cancelled"),
    ],
)
def test_a_job_that_failed_gives_its_code(
    tmp_path: Path, fake: Fake, monkeypatch: pytest.MonkeyPatch, state: str, exit_code: str, code: int, words: str
) -> None:
    said = _told(fake, tmp_path, monkeypatch, f"JobId=7 JobState={state} Reason=None ExitCode={exit_code}")
    assert _slurm_follow.follow("7", None, said.append) == code
    assert words in said[-1]


def test_of_a_sweep_the_worst_code_counts(tmp_path: Path, fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    said = _told(
        *(fake, tmp_path, monkeypatch),
        "JobId=7 ArrayJobId=7 ArrayTaskId=0-1 JobState=PENDING Reason=Priority ExitCode=0:0",
        "JobId=7 ArrayJobId=7 ArrayTaskId=1 JobState=RUNNING NodeList=n1 ExitCode=0:0\n"
        "JobId=8 ArrayJobId=7 ArrayTaskId=0 JobState=FAILED ExitCode=3:0 StdOut=/x/slurm-7_0.out",
        "JobId=7 ArrayJobId=7 ArrayTaskId=1 JobState=COMPLETED ExitCode=0:0\n"
        "JobId=8 ArrayJobId=7 ArrayTaskId=0 JobState=FAILED ExitCode=3:0 StdOut=/x/slurm-7_0.out",
    )
    assert _slurm_follow.follow("7", None, said.append) == 3
    assert said[0] == "job 7_0-1 waits (Priority)"
    ended = "job 7_0 has ended: failed, exit code 3; see /x/slurm-7_0.out"
    assert sorted(said[1:]) == sorted(["job 7_1 runs on n1", ended, "job 7_1 has ended"])


def test_ctrl_c_asks_for_an_end_in_order_and_the_second_one_cancels(
    tmp_path: Path, fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = "JobId=7 JobState=RUNNING NodeList=n1 ExitCode=0:0"
    said = _told(fake, tmp_path, monkeypatch, runs, runs, "JobId=7 JobState=CANCELLED ExitCode=0:15")
    fake("scancel", 'echo "$@" >>cancelled')

    def press(_: Any) -> float:
        os.kill(os.getpid(), signal.SIGINT)
        return 0.0

    monkeypatch.setattr(_slurm_follow._Watch, "pause", press)
    assert _slurm_follow.follow("7", None, said.append) == 143
    assert (tmp_path / "cancelled").read_text() == "--signal=INT 7\n7\n"
    assert any("with a last checkpoint (again to cancel it)" in line for line in said)


def test_a_job_that_slurm_has_forgotten(tmp_path: Path, fake: Fake) -> None:
    fake("scontrol", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    with pytest.raises(RunError, match="no longer knows job 7"):
        _slurm_follow.follow("7", None, print)


def test_a_controller_that_is_away_for_a_while_is_waited_for(
    tmp_path: Path, fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = _told(fake, tmp_path, monkeypatch, "", "JobId=7 JobState=COMPLETED ExitCode=0:0")
    fake("scontrol", 'echo look >>looks; [ "$(wc -l <looks)" -gt 1 ] || exit 1; cat answer2')
    assert _slurm_follow.follow("7", None, said.append) == 0
    monkeypatch.setattr(_slurm_follow, "_PATIENCE", -1.0)
    fake("scontrol", "echo 'scontrol: error: Unable to contact slurm controller' >&2; exit 1")
    with pytest.raises(RunError, match=r"Unable to contact slurm controller.*see squeue -j 7"):
        _slurm_follow.follow("7", None, said.append)


@pytest.mark.usefixtures("here")
def test_a_job_is_submitted_with_the_secret_beside_it(tmp_path: Path, fake: Fake) -> None:
    fake("sbatch", 'echo "$@" >submitted; echo "7;cluster"')
    said: list[str] = []
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "hub").write_text("an earlier one's")
    one = job(folder, wait="no")
    one = Job(one.command, one.tasks, folder, one.name, one.options, secret=SECRET, say=said.append)
    assert SlurmLauncher().launch(one) == 0
    assert (tmp_path / "submitted").read_text() == f"--parsable {folder}/job.sbatch\n"
    assert (folder / "job.sbatch").read_text() == slurm.script(one)
    assert (folder / "secret").stat().st_mode & 0o777 == 0o600
    assert not (folder / "hub").exists()
    assert (folder / "logs").is_dir()
    follow = "follow it with: squeue -j 7; end it in order with: scancel -s INT 7"
    assert said == [f"Slurm job 7 is submitted ({folder}/job.sbatch)", f"not waiting; {follow}"]
    fake("sbatch", "echo 'sbatch: error: Batch job submission failed: Invalid account' >&2; exit 1")
    with pytest.raises(UsageError, match="sbatch refuses the job: Batch job submission failed: Invalid account"):
        SlurmLauncher().launch(one)
