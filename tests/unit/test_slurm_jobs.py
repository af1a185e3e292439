"""What the batch script for Slurm does, and what is told of the job. Its commands are stand-ins."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from slurm_stand_ins import FOUR, SECRET, Fake, answering, commands, job, ran

from paceline.errors import RunError, UsageError
from paceline.launcher import Job
from paceline.launchers import _slurm_follow, slurm
from paceline.launchers.slurm import SlurmLauncher


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    return commands(tmp_path, monkeypatch)


@pytest.fixture
def here(fake: Fake) -> None:
    answering(fake)


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
    done = ran(slurm.script(job(tmp_path)))
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
    done = ran(text, SLURM_STEP_ID="0")
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
    done = ran(text, SLURM_RESTART_COUNT="2")
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
    done = ran(text, SLURM_RESTART_COUNT="4")
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
    done = ran(text, SLURM_RESTART_COUNT="2")
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
