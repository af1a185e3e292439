"""`paceline train` as a process of its own, and the ways in which it is made to end. Data: scikit-learn's digits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from processes import children, shared_files, until

from paceline.runs import checkpoint
from paceline.runs.run_directory import RunDirectory

TRAIN = ["train", "digits-mlp", "-s", "async", "-n", "2", "--plain"]


@contextmanager
def started(*words: str) -> Iterator[subprocess.Popen[str]]:
    """The command, and the certainty that it is gone afterwards."""
    command = [sys.executable, "-m", "paceline", *words]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True) as process:
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def paceline(*words: str) -> subprocess.CompletedProcess[str]:
    with started(*words) as process:
        out, err = process.communicate(timeout=60)
        return subprocess.CompletedProcess(words, process.returncode, out, err)


def crew_of(launcher: int, run: Path) -> list[int]:
    """The launcher's children, once they have trained for a while."""
    until(lambda: max(checkpoint.steps(run / "checkpoints"), default=0) > 0, 30, "a checkpoint on the way")
    found = children(launcher)
    assert len(found) == 3  # chief, worker, server
    return found


def is_gone(pid: int) -> bool:
    """Dead; whether its new parent has taken notice yet is not ours to wait for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def newest(run: Path) -> int:
    saved = checkpoint.newest(run / "checkpoints", lambda _: None)
    assert saved is not None
    return saved.step


def test_ctrl_c_ends_all_in_order_and_resume_goes_on_to_the_end(tmp_path: Path) -> None:
    run, before = tmp_path / "run", shared_files()
    with started(*TRAIN, "--steps", "1000000", "--checkpoint-every", "50", "--dir", str(run)) as launcher:
        crew = crew_of(launcher.pid, run)
        second = paceline("train", "--resume", str(run), "--steps", "7")
        assert second.returncode == 2
        assert second.stderr.startswith("error: ")
        assert "another run is using it" in second.stderr
        assert str(launcher.pid) in second.stderr
        assert RunDirectory(run).plan()["steps"] == 1_000_000  # the refused one has changed nothing
        os.killpg(launcher.pid, signal.SIGINT)  # as a terminal does: to everybody
        _, told = launcher.communicate(timeout=60)
    assert launcher.returncode == 130
    assert "interrupted: ending in order" in told
    assert f"paceline train --resume {run}" in told
    assert all(map(is_gone, crew))
    reached = newest(run)
    assert reached > 0
    again = paceline("train", "--resume", str(run), "--steps", str(reached + 100))
    assert again.returncode == 0, again.stderr
    assert f"resuming from the checkpoint of update {reached:,}" in again.stderr
    assert newest(run) == reached + 100
    assert shared_files() <= before


def test_a_killed_launcher_takes_all_with_it_and_resume_goes_on(tmp_path: Path) -> None:
    run, before = tmp_path / "run", shared_files()
    with started(*TRAIN, "--steps", "1000000", "--checkpoint-every", "50", "--dir", str(run)) as launcher:
        crew = crew_of(launcher.pid, run)
        os.kill(crew[1], signal.SIGSTOP)  # one that could not even hear of it
        os.kill(launcher.pid, signal.SIGKILL)
        until(lambda: all(map(is_gone, crew)), 10, "the end of the launcher's children")
        launcher.wait()
    assert shared_files() <= before
    reached = newest(run)
    assert reached > 0
    refused = paceline(*TRAIN, "--steps", "10", "--dir", str(run))
    assert refused.returncode == 2
    assert "--resume" in refused.stderr
    again = paceline("train", "--resume", str(run), "--steps", str(reached + 100))
    assert again.returncode == 0, again.stderr
    assert newest(run) == reached + 100


def test_a_terminated_launcher_ends_in_order_and_a_normal_run_ends_with_0(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with started(*TRAIN, "--steps", "1000000", "--checkpoint-every", "50", "--dir", str(run)) as launcher:
        crew = crew_of(launcher.pid, run)
        launcher.terminate()
        launcher.communicate(timeout=60)
    assert launcher.returncode == 130
    assert all(map(is_gone, crew))
    plain = paceline(*TRAIN, "--steps", "100", "--dir", str(tmp_path / "other"))
    assert plain.returncode == 0, plain.stderr
    assert newest(tmp_path / "other") == 100
