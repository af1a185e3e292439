"""`--on mpi` with real mpirun and mpiexec."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from launching import SECRET, command_lines, followed, gone, interrupt, launched

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


@pytest.mark.parametrize("names", PROGRAMS, ids=["Open MPI", "MPICH"])
def test_an_interruption_reaches_the_chief(names: tuple[str, ...], tmp_path: Path) -> None:
    with launched("mpi", tmp_path / "run", "stay", mpirun=program(names)) as run:
        tasks = run.everybody()
        assert SECRET.hex() not in command_lines()
        assert run.told("chief")["PACELINE_SECRET_FILE"] == str(tmp_path / "run" / "secret")
        interrupt(run)
        assert run.ended() == 130
        gone(tasks)
    assert (tmp_path / "run" / "ended").read_text() == "by a signal"


@pytest.mark.parametrize("names", PROGRAMS, ids=["Open MPI", "MPICH"])
def test_a_launcher_that_is_killed_leaves_nothing(names: tuple[str, ...], tmp_path: Path) -> None:
    with launched("mpi", tmp_path / "run", "stay", mpirun=program(names)) as run:
        tasks = run.everybody()
        run.process.kill()
        gone(tasks)
