"""Signals at every moment of `paceline train` and `paceline run`, to the launcher, to the group, once and twice: the
command ends with 130 and a line that says what happened, and leaves nothing behind. Data: scikit-learn's digits.

A wider sweep: python tests/system/test_signals.py SEED COUNT
"""

from __future__ import annotations

import os
import random
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import Commands, paceline
from processes import children, shared_files, until
from test_endings_commands import is_gone, newest, started

from paceline.runs.run_directory import RunDirectory, RunState

__all__ = ["paceline"]

SOON = 60.0  # seconds; the run's patience is 30
SCHEMES = ("async", "sync", "hogwild", "allreduce")


def armed(pid: int) -> bool:
    """It has heard of signals: before that it is Python that is loading, not paceline."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (signal.SIGTERM - 1) & 1)
    return False


def loads_torch(pid: int) -> bool:
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text(errors="replace")


# moments in the life of a run in `place`; each is also looked for a little later
MOMENTS: dict[str, Callable[[int, Path], bool]] = {
    "the command is there": lambda pid, _: armed(pid),
    "it loads torch": lambda pid, _: loads_torch(pid),
    "the run has a directory": lambda _, place: place.exists(),
    "the plan is written": lambda _, place: (place / "plan.json").exists(),
    "the first process is there": lambda pid, _: bool(children(pid)),
    "all processes are there": lambda pid, _: len(children(pid)) > 1,
    "the first checkpoint is begun": lambda _, place: any((place / "checkpoints").glob("*")),
    "a later checkpoint is there": lambda _, place: any(
        one.name.isdigit() and int(one.name) > 0 for one in place.glob("checkpoints/*")
    ),
}


def trial(place: Path, moment: str, number: int, *, group: bool, twice: bool, scheme: str, seed: int) -> str:
    """One run that is interrupted; gives what it said. All that must hold whatever the moment is checked here."""
    rng, before = random.Random(f"{seed} {moment} {number} {group} {twice} {scheme}"), shared_files()
    words = ["train", "digits-mlp", "-s", scheme, "-n", "2", "--plain", "--steps", "1000000", "--dir", str(place)]
    with started(*words, "--checkpoint-every", "20") as launcher:
        until(lambda: armed(launcher.pid) and MOMENTS[moment](launcher.pid, place), SOON, moment)
        threading.Event().wait(rng.random() ** 2 * 0.3)
        crew = children(launcher.pid)
        for _ in range(1 + twice):
            (os.killpg if group else os.kill)(launcher.pid, number)
            threading.Event().wait(rng.random() * 0.05)
        _, told = launcher.communicate(timeout=SOON)
    assert launcher.returncode == 130, told
    assert "interrupted" in told
    assert "Traceback" not in told
    assert "restarting" not in told
    assert all(map(is_gone, crew))
    until(lambda: shared_files() <= before, 5, "no shared memory is left")
    return told


def check_that_it_can_be_looked_at_and_resumed(place: Path, told: str, command: Commands, *, twice: bool) -> None:
    if not (place / "plan.json").exists():
        assert "nothing was trained" in told or "interrupted" in told
        return
    assert f"resume with: paceline train --resume {place}" in told
    assert RunDirectory(place).state is RunState.INTERRUPTED or (twice and not (place / "result.json").exists())
    assert command("runs", str(place.parent)).code == 0
    assert command("show", str(place)).code == 0
    reached = newest(place) if any((place / "checkpoints").glob("[0-9]*")) else 0
    again = command("train", "--resume", str(place), "--steps", str(reached + 20), "--json")
    assert again.code == 0, again.err
    assert newest(place) >= reached + 20


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize(
    ("number", "group", "twice"),
    [(signal.SIGINT, True, False), (signal.SIGTERM, True, True)],
    ids=["ctrl-c", "kill the group twice"],
)
def test_a_signal_at_any_moment_ends_the_run(
    number: int, group: bool, twice: bool, moment: str, tmp_path: Path, paceline: Commands
) -> None:
    scheme = SCHEMES[(list(MOMENTS).index(moment) + number) % len(SCHEMES)]
    told = trial(tmp_path / "run", moment, number, group=group, twice=twice, scheme=scheme, seed=1)
    check_that_it_can_be_looked_at_and_resumed(tmp_path / "run", told, paceline, twice=twice)


def test_sigterm_to_the_group_restarts_nobody_and_loses_nothing(tmp_path: Path) -> None:
    told = trial(
        tmp_path / "run", "a later checkpoint is there", signal.SIGTERM, group=True, twice=False, scheme="async", seed=2
    )
    assert "ending in order" in told
    result = RunDirectory(tmp_path / "run").result()
    assert result is not None
    assert result["restarts"] == 0
    assert result["metrics"]


def test_sigterm_to_one_role_restarts_that_role(tmp_path: Path) -> None:
    place = tmp_path / "run"
    words = ["train", "digits-mlp", "-s", "async", "-n", "2", "--plain", "--steps", "1000000", "--dir", str(place)]
    with started(*words, "--checkpoint-every", "20") as launcher:
        until(lambda: MOMENTS["a later checkpoint is there"](launcher.pid, place), SOON, "training")
        crew = children(launcher.pid)
        worker = next(pid for pid in crew if b"worker:1" in Path(f"/proc/{pid}/cmdline").read_bytes())
        os.kill(worker, signal.SIGTERM)
        until(lambda: is_gone(worker) and len(children(launcher.pid)) == len(crew), SOON, "another worker:1")
        launcher.terminate()
        _, told = launcher.communicate(timeout=SOON)
    assert launcher.returncode == 130
    assert "worker:1 died (signal SIGTERM); restarting it" in told


SCRIPT = """
import sys
import torch
import paceline

_, option, steps = sys.argv
assert option == "--steps"
model = torch.nn.Linear(3, 1)
with paceline.attach(model, "downpour", lr=0.01, window=2, steps=int(steps)) as pace:
    for x in pace.share([torch.randn(8, 3) for _ in range(8)]):
        pace.step(model(x).square().mean())
"""


@pytest.mark.parametrize("moment", ["the first process is there", "a later checkpoint is there"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_script_with_options_is_interrupted_and_resumed_by_the_printed_command(
    number: int, moment: str, tmp_path: Path, paceline: Commands
) -> None:
    script, place = tmp_path / "my script.py", tmp_path / "run"
    script.write_text(SCRIPT)
    words = ["run", "--plain", "--set", "lr=0.02", "--checkpoint-every", "20", "--dir", str(place), str(script)]
    with started(*words, "--", "--steps", "1000000") as launcher:
        until(lambda: armed(launcher.pid) and MOMENTS[moment](launcher.pid, place), SOON, moment)
        crew = children(launcher.pid)
        os.killpg(launcher.pid, number)
        _, told = launcher.communicate(timeout=SOON)
    assert launcher.returncode == 130, told
    assert "Traceback" not in told
    assert "restarting" not in told
    assert all(map(is_gone, crew))
    assert paceline("runs", str(tmp_path)).code == 0
    assert "(run, interrupted)" in paceline("show", str(place)).out
    program, *again = shlex.split(told.strip().splitlines()[-1].partition("resume with: ")[2])
    assert program == "paceline"
    assert again[-3:] == [str(script), "--steps", "1000000"]
    reached = newest(place) if any((place / "checkpoints").glob("[0-9]*")) else 0
    result = paceline("run", "--json", *again[1:-1], str(reached + 20)).json
    assert result["hyper"]["lr"] == 0.02
    assert result["updates"] >= reached + 20


def test_a_closed_terminal_ends_the_run_in_order_and_nohup_keeps_it(tmp_path: Path) -> None:
    train = [sys.executable, "-m", "paceline", "train", "digits-mlp", "-s", "async", "-n", "2", "--plain"]
    for name, before in (("kept", ["nohup"]), ("ended", [])):
        place = tmp_path / name
        words = [*before, *train, "--steps", "1000000", "--checkpoint-every", "20", "--dir", str(place)]
        with subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
        ) as launcher:
            try:
                until(lambda p=place: MOMENTS["a later checkpoint is there"](0, p), SOON, "training")
                os.killpg(launcher.pid, signal.SIGHUP)
                if before:
                    reached = newest(place)
                    until(lambda p=place, r=reached: newest(p) > r, SOON, "training continues")
                    launcher.terminate()
                launcher.communicate(timeout=SOON)
                assert launcher.returncode == 130
            finally:
                if launcher.poll() is None:
                    os.killpg(launcher.pid, signal.SIGKILL)
        result = RunDirectory(place).result()
        assert result is not None
        assert result["stopped"] == "interrupted"
        assert result["restarts"] == 0
