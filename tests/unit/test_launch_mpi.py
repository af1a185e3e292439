"""The command that `--on mpi` runs, and what it does when a rank dies. Programs of a few lines stand in for mpirun."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from beds.commands import need
from launch_jobs import SECRET, made, program

from paceline.errors import UsageError
from paceline.launchers import _foreground
from paceline.launchers.mpi import MpiLauncher

OPEN_MPI = "mpirun (Open MPI) 4.1.4"
OPEN_MPI_5 = "mpirun (Open MPI) 5.0.8"
HYDRA = "HYDRA build details:\n    Version:  4.0.2"


@pytest.fixture
def bin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which alone programs are looked for, besides the shell's own."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder


def engine(folder: Path, version: str, deed: str = "exit 0", name: str = "mpirun") -> Path:
    shell = "PATH=/usr/bin:/bin"
    return program(folder / name, f'{shell}\n[ "$1" = --version ] && {{ echo "{version}"; exit 0; }}\n{deed}')


def words(text: str) -> list[str]:
    return text.splitlines()[-1].split()


def test_open_mpi_on_one_host(bin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine(bin, OPEN_MPI)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    text = MpiLauncher().shown(made(tmp_path).job)
    assert text.splitlines() == [
        f"export PACELINE_MEET={tmp_path}/hub",
        "export PACELINE_PLACEMENT=chief,worker,worker,server",
        f"export PACELINE_SECRET_FILE={tmp_path}/secret",
        "export TERM=dumb",
        "mpirun -n 4 --map-by slot:OVERSUBSCRIBE --bind-to none -x PACELINE_MEET -x PACELINE_PLACEMENT "
        "-x PACELINE_SECRET_FILE -x TERM "
        f"{sys.executable} -P -m paceline train digits-mlp --scheme async --dir /runs/one",
    ]
    assert not list(tmp_path.glob("secret"))  # a dry run writes nothing


def test_root_is_allowed_where_it_is_root(bin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine(bin, OPEN_MPI_5)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert "--allow-run-as-root" in words(MpiLauncher().shown(made(tmp_path).job))


@pytest.mark.parametrize(
    ("hosts", "told"),
    [("a,b", "a:2,b:2"), ("a,b,c", "a:2,b:1,c:1"), ("a:3,b", "a:3,b:1"), ("a", "a:4"), ("a,b,a,b", "a:1,b:1,a:1,b:1")],
)
def test_hosts_get_ranks_in_their_order(hosts: str, told: str, bin: Path, tmp_path: Path) -> None:
    engine(bin, OPEN_MPI)
    command = words(MpiLauncher().shown(made(tmp_path, hosts=hosts).job))
    assert command[command.index("--host") + 1] == told
    several = len(set(told.split(","))) > 1
    assert ("slot" if several else "slot:OVERSUBSCRIBE") in command


def test_mpich_has_other_words(bin: Path, tmp_path: Path) -> None:
    engine(bin, HYDRA, name="mpiexec")
    command = words(MpiLauncher().shown(made(tmp_path, hosts="a,b", extra="-print-rank-map").job))
    assert command[:7] == ["mpiexec", "-n", "4", "-genvall", "-hosts", "a:2,b:2", "-print-rank-map"]
    assert "-x" not in command
    assert words(MpiLauncher().shown(made(tmp_path, hostfile="list").job))[4:6] == ["-f", "list"]


def test_a_program_of_its_own_and_words_of_ones_own(bin: Path, tmp_path: Path) -> None:
    other = engine(tmp_path, OPEN_MPI, name="prte-run")
    command = words(MpiLauncher().shown(made(tmp_path, mpirun=other, extra="--mca btl tcp,self", hostfile="list").job))
    assert command[0] == str(other)
    at = command.index("--mca")
    assert command[at : at + 3] == ["--mca", "btl", "tcp,self"]
    assert command[command.index("--hostfile") + 1] == "list"
    assert "slot" in command  # the file says how many a host takes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hosts": "a:0"}, "'a:0' is no host; write HOST or HOST:COUNT"),
        ({"hosts": "a,b,c,d,e"}, r"more hosts \(5\) than tasks \(4\)"),
        ({"hosts": "a", "hostfile": "b"}, "both name the hosts"),
        ({"oversubscribe": "perhaps"}, "oversubscribe=perhaps: yes or no is needed"),
        ({"mpirun": "nowhere"}, "nowhere: not installed here; apt-get install openmpi-bin"),
    ],
)
def test_what_is_refused(options: dict[str, str], message: str, bin: Path, tmp_path: Path) -> None:
    engine(bin, OPEN_MPI)
    with pytest.raises(UsageError, match=message):
        MpiLauncher().shown(made(tmp_path, **options).job)


def test_restarts_are_a_number(bin: Path, tmp_path: Path) -> None:
    engine(bin, OPEN_MPI)
    with pytest.raises(UsageError, match="restarts=-1: a whole number of at least 0 is needed"):
        MpiLauncher().launch(made(tmp_path, restarts="-1").job)


def test_no_mpi_and_something_that_is_none(bin: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="mpirun and mpiexec: not installed here; apt-get install openmpi-bin"):
        MpiLauncher().shown(made(tmp_path).job)
    engine(bin, "mpirun (my own) 1.0")
    with pytest.raises(UsageError, match="is neither Open MPI's nor MPICH's"):
        MpiLauncher().shown(made(tmp_path).job)


# what happens when ranks die


@pytest.fixture
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_foreground, "PAUSE", 0.0)


def once_then(first: str, then: str = "exit 0") -> str:
    return f'if [ -e "$PACELINE_MEET.seen" ]; then {then}; else touch "$PACELINE_MEET.seen"; {first}; fi'


@pytest.mark.usefixtures("no_pause")
def test_a_job_that_broke_off_is_begun_again(bin: Path, tmp_path: Path) -> None:
    engine(bin, OPEN_MPI, once_then("echo stale >$PACELINE_MEET; exit 137", '[ ! -e "$PACELINE_MEET" ]'))
    run = made(tmp_path)
    assert MpiLauncher().launch(run.job) == 0
    assert run.said == ["the job broke off (exit code 137); starting it again from the beginning, 1 of 3"]
    assert (tmp_path / "secret").read_text().strip() == SECRET.hex()
    assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o600


@pytest.mark.usefixtures("no_pause")
def test_how_often_it_is_begun_again(bin: Path, tmp_path: Path) -> None:
    engine(bin, HYDRA, "echo >>$PACELINE_MEET.count; exit 9")  # Hydra tells a signal as such a code
    run = made(tmp_path, restarts=2)
    assert MpiLauncher().launch(run.job) == 9
    assert len((tmp_path / "hub.count").read_text().splitlines()) == 3
    assert run.said[-1] == (
        "the job broke off 3 times in a row without a newer checkpoint (exit code 9); --engine restarts= allows 2"
    )


@pytest.mark.usefixtures("no_pause")
def test_a_newer_checkpoint_is_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved, codes = [[10], [20], [30], [30]], [137, 137, 137, 0]
    monkeypatch.setattr(_foreground.checkpoint, "steps", lambda _: saved.pop(0))
    run = made(tmp_path)
    assert _foreground.repeated(run.job, lambda: codes.pop(0), 1) == 0
    assert [text.rpartition("from ")[2] for text in run.said] == [
        f"the checkpoint of update {step}, 1 of 1" for step in (10, 20, 30)
    ]


@pytest.mark.parametrize(("code", "over"), [(0, True), (2, True), (3, True), (130, True), (137, False), (9, False)])
def test_exit_codes_that_say_it_all(code: int, over: bool, tmp_path: Path) -> None:
    assert _foreground.ended_by_itself(code, tmp_path) is over


def test_a_run_that_says_why_it_failed_is_not_begun_again(tmp_path: Path) -> None:
    assert not _foreground.ended_by_itself(1, tmp_path)  # nobody has said anything
    (tmp_path / "result.json").write_text(json.dumps({"updates": 3}))
    assert not _foreground.ended_by_itself(1, tmp_path)
    (tmp_path / "result.json").write_text(json.dumps({"error": "the loss is nan"}))
    assert _foreground.ended_by_itself(1, tmp_path)
    (tmp_path / "result.json").write_text("{")
    assert not _foreground.ended_by_itself(1, tmp_path)


@pytest.fixture
def shell() -> None:
    need({"sh": "dash", "sleep": "coreutils", "timeout": "coreutils"}, "an engine that is a shell script")


@pytest.mark.usefixtures("shell")
def test_an_interruption_is_handed_on_and_ends_in_order() -> None:
    before = signal.getsignal(signal.SIGINT)
    script = "trap 'exit 7' USR1; kill -INT $PPID; while :; do sleep 0.02; done"
    assert _foreground.followed(["sh", "-c", script], {}, signal.SIGUSR1) == 130
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.usefixtures("shell")
def test_a_second_interruption_kills() -> None:
    script = "trap 'kill -INT $PPID' USR1; kill -TERM $PPID; while :; do sleep 0.02; done"
    assert _foreground.followed(["sh", "-c", script], {}, signal.SIGUSR1) == 130


@pytest.mark.usefixtures("shell")
def test_whatever_comes_of_it_an_interruption_is_one() -> None:
    script = "trap 'exit 0' TERM; kill -INT $PPID; while :; do sleep 0.02; done"
    assert _foreground.followed(["sh", "-c", script], {}) == 130


@pytest.mark.usefixtures("shell")
def test_the_engine_ends_with_its_launcher() -> None:
    """Killed without a word, the launcher leaves nobody behind: the engine's end of the pipe is closed too."""
    deed = "trap 'echo ended; exit' TERM; echo here; while :; do sleep 0.02; done"
    code = (
        f"from paceline.launchers._foreground import followed; followed(['timeout', '20', 'sh', '-c', {deed!r}], {{}})"
    )
    launcher = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert launcher.stdout is not None
    with launcher.stdout:
        assert launcher.stdout.readline() == b"here\n"
        launcher.kill()
        assert launcher.stdout.read() == b"ended\n"
        launcher.wait()
