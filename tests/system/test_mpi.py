"""`--on mpi` with real mpirun and mpiexec. Data: scikit-learn's digits."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
from launching import SECRET, command_lines, followed, gone, interrupt, launched
from processes import until
from shells import SECONDS, TRAIN, linger, shells, trained, updates_of

PROGRAMS = [("mpirun.openmpi", "mpirun"), ("mpiexec.hydra", "mpiexec.mpich")]


def program(names: tuple[str, ...]) -> str:
    """The first of these that is installed."""
    found = next((name for name in names if shutil.which(name)), None)
    if found is None:
        pytest.skip(f"{names[0]} is not installed")
    return found


@pytest.mark.parametrize("names", PROGRAMS, ids=["Open MPI", "MPICH"])
def test_a_rank_that_dies_takes_all_along_and_they_begin_again(
    names: tuple[str, ...], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code, said = followed("mpi", tmp_path / "run", "die:worker:0", mpirun=program(names))
    assert code == 0, capfd.readouterr().err
    assert len(said) == 1
    assert "starting it again from the beginning, 1 of 3" in said[0]
    assert '{"called": ["server:0", "worker:0"]}' in capfd.readouterr().out


def test_an_interruption_reaches_the_chief(tmp_path: Path) -> None:
    """Of MPICH here, of Open MPI below."""
    with launched("mpi", tmp_path / "run", "stay", mpirun=program(PROGRAMS[1])) as run:
        tasks = run.everybody()
        assert SECRET.hex() not in command_lines()
        assert run.told("chief")["PACELINE_SECRET_FILE"] == str(tmp_path / "run" / "secret")
        interrupt(run)
        assert run.ended() == 130
        gone(tasks)
    assert (tmp_path / "run" / "ended").read_text() == "by a signal"


def test_a_launcher_that_is_killed_leaves_nothing(tmp_path: Path) -> None:
    with launched("mpi", tmp_path / "run", "stay", mpirun=program(PROGRAMS[0])) as run:
        tasks = run.everybody()
        assert SECRET.hex() not in command_lines()
        run.process.kill()
        gone(tasks)


# training


@pytest.mark.parametrize("names", PROGRAMS, ids=["Open MPI", "MPICH"])
def test_four_ranks_train_two_of_them_servers(names: tuple[str, ...], tmp_path: Path) -> None:
    engine = ("--on", "mpi", "--engine", f"mpirun={program(names)}")
    with shells(tmp_path) as made:
        run = made(
            "mpi", *TRAIN, "--workers", "2", "--servers", "2", "--placement", "ps,worker,ps,worker", "--json", *engine
        )
        made.all_ended()
    (folder,) = (tmp_path / "runs").iterdir()
    result = trained(folder)
    assert (result["workers"], result["servers"]) == (2, 2)
    assert json.loads(run.out)["digest"] == result["digest"]


def test_ranks_that_a_person_starts(tmp_path: Path) -> None:
    """Without --on: mpirun as one types it; the ranks find each other in a directory that all see."""
    mpirun = shutil.which(program(PROGRAMS[0]))
    assert mpirun is not None
    words = (*TRAIN, "--placement", "chief,worker,ps", "--dir", str(tmp_path / "run"))
    root = ("--allow-run-as-root",) if os.geteuid() == 0 else ()
    with shells(tmp_path) as made:
        made.program("mpirun", mpirun, "-n", "3", "--oversubscribe", *root, "paceline", *words)
        made.all_ended()
    assert trained(tmp_path / "run")["workers"] == 2


def test_a_killed_role_is_the_runs_business_and_a_killed_rank_mpiruns(tmp_path: Path) -> None:
    gate, waits = linger(tmp_path)
    words = (*TRAIN, "--workers", "2", "--checkpoint-every", "20", "--dir", str(tmp_path / "run"), *waits)
    with shells(tmp_path) as made:
        run = made("mpi", *words, "--on", "mpi", "--engine", f"mpirun={program(PROGRAMS[0])}")
        until(lambda: updates_of(tmp_path / "run") >= 40, SECONDS, f"it trains: {made.said()}")
        made.kill_role("server:0")
        assert "again" not in run.err
        rank = made.rank("OMPI_COMM_WORLD_RANK=1")
        saved = updates_of(tmp_path / "run")
        os.kill(rank, signal.SIGKILL)
        until(lambda: "starting it again from the checkpoint of update" in run.err, SECONDS, "it begins again")
        until(lambda: made.rank("OMPI_COMM_WORLD_RANK=1") not in (0, rank), SECONDS, "there is another")
        gate.touch()
        made.all_ended()
    trained(tmp_path / "run")
    assert saved >= 40


def test_an_interruption_ends_with_a_last_checkpoint(tmp_path: Path) -> None:
    _, waits = linger(tmp_path)
    with shells(tmp_path) as made:
        words = (*TRAIN, "--workers", "2", "--checkpoint-every", "20", "--dir", str(tmp_path / "run"), *waits)
        run = made("mpi", *words, "--on", "mpi", "--engine", f"mpirun={program(PROGRAMS[0])}")
        until(lambda: updates_of(tmp_path / "run") >= 200, SECONDS, f"it trains: {made.said()}")
        run.process.send_signal(signal.SIGINT)
        assert run.ended() == 130
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["stopped"] == "interrupted"
    assert result["updates"] == updates_of(tmp_path / "run")
