"""`paceline.train` from Python: the launcher is a process of its own, objects come along."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import children, until

import paceline
from paceline import Hook, UsageError
from paceline.processes.supervisor.status import Status
from paceline.result import Result
from paceline.runs import checkpoint

MINE = '''
import json, sys
from dataclasses import dataclass

import torch
from torch import nn

import paceline
from paceline.scheme import Rate, Scheme, on_server

x = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
task = paceline.TorchTask(lambda: nn.Linear(3, 1), nn.MSELoss(), (x, x.sum(1, keepdim=True)), batch=8, name="sums")


@dataclass(frozen=True)
class Mine(Scheme, name="mine"):
    """Of the script's own."""

    lr: Rate = 0.1

    @on_server
    def push(self, s, g):
        s.x -= self.lr * g
        s.v += 1
        return s.x

    async def step(self, w):
        w.x = await self.push(await w.grad(w.x))


@dataclass
class Told(paceline.Hook):
    """Says what a lambda of the script gives."""

    what: object = None

    def end(self, session):
        session.say(f"worker:{session.worker.rank} says {self.what(session)}")


if __name__ == "__main__":
    said = []
    hook = Told(lambda session: session.updates + 1)
    run = paceline.train(task, Mine(lr=0.05), workers=2, servers=2, steps=40, hooks=[hook], say=said.append)
    one = paceline.train(task, Mine, workers=1, steps=40, directory="one", lr=0.2)
    virtual = paceline.simulate(task, Mine, workers=1, steps=40, lr=0.2)
    print(json.dumps({"run": run.as_dict(), "said": said, "same": one.digest == virtual.digest}))
'''


def check_told(out: str) -> None:
    told = json.loads(out)
    run = told["run"]
    assert (run["task"], run["scheme"], run["updates"], run["hyper"]) == ("sums", "mine", 40, {"lr": 0.05})
    assert run["servers"] == 2
    assert sorted(told["said"])[-2:] == ["worker:0 says 41", "worker:1 says 41"]
    assert told["same"] is True


def test_objects_of_a_script(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE, encoding="utf-8")
    ran = subprocess.run(
        [sys.executable, "mine.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.returncode == 0, ran.stderr
    check_told(ran.stdout)
    plan = json.loads((tmp_path / "runs/sums-mine-001/plan.json").read_text(encoding="utf-8"))
    assert (plan["task"], plan["scheme"]) == (None, None)


def test_objects_of_a_session_without_any_file(tmp_path: Path) -> None:
    """As in a notebook: the program comes through a pipe."""
    ran = subprocess.run(
        [sys.executable, "-"], input=MINE, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.returncode == 0, ran.stderr
    check_told(ran.stdout)


# the result, and what becomes of errors


def test_the_result_is_that_of_the_command_and_watched_on_the_way(tmp_path: Path) -> None:
    seen: list[Status] = []
    result = paceline.train(
        "digits-mlp", "sync", workers=2, steps=30, seed=3, directory=tmp_path / "run", every=10, watch=seen.append
    )
    virtual = paceline.simulate("digits-mlp", "sync", workers=2, steps=30, seed=3)
    assert (result.digest, result.metrics) == (virtual.digest, virtual.metrics)
    assert torch.equal(result.vector, virtual.vector)
    assert result.directory == str(tmp_path / "run")
    assert json.loads((tmp_path / "run/result.json").read_text(encoding="utf-8")) == result.as_dict()
    assert [point.update for point in result.history][-1] == 30
    assert {role.name for role in seen[-1].roles} == {"chief", "worker:1", "server:0"}
    assert seen[-1].updates == 30
    more = paceline.train("digits-mlp", "sync", workers=2, steps=50, seed=3, directory=tmp_path / "run", resume=True)
    assert more.digest == paceline.simulate("digits-mlp", "sync", workers=2, steps=50, seed=3).digest


def test_an_error_carries_what_was_reached(tmp_path: Path) -> None:
    with pytest.raises(paceline.errors.LossError, match="the loss is inf") as raised:
        paceline.train("toy", "async", lr=3.0, workers=2, checkpoint_steps=5, directory=tmp_path, say=lambda _: None)
    reached = raised.value.result
    assert isinstance(reached, Result)
    assert reached.updates + (reached.lost_updates or 0) > 0  # the numbers are those of the newest checkpoint
    assert any("log" in note for note in raised.value.__notes__)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"workers": "two"}, "workers must be a whole number, not 'two'"),
        ({"steps": None}, "nothing would end this run"),
        ({"resume": True}, "give its directory"),
        ({"quorum": "half"}, "quorum must be one of shrink, hold"),
        ({"lr": "much"}, "lr must be a number"),
        ({"windo": 3}, "no hyper-parameter"),
        ({"task": "digits-mpl"}, "did you mean 'digits-mlp'?"),
        ({"hooks": "valdation"}, "did you mean 'validation'?"),
    ],
    ids=lambda value: str(value),
)
def test_a_mistake_is_told_before_anything_is_started(
    settings: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=said):
        paceline.train(**({"task": "digits-mlp"} | settings))
    assert not (tmp_path / "runs").exists()


def test_what_cannot_be_handed_over_is_told(tmp_path: Path) -> None:
    with (tmp_path / "open").open("w") as file:

        @dataclass
        class Holds(Hook, name="holds"):
            what: Any = file

        with pytest.raises(UsageError, match="cannot be handed to other processes"):
            paceline.train("toy", "sgd", steps=3, hooks=[Holds()], directory=tmp_path / "run")


def test_a_watcher_that_breaks_ends_the_run(tmp_path: Path) -> None:
    def broken(status: Status) -> None:
        if status.updates:
            raise ZeroDivisionError("in my watcher")

    with pytest.raises(ZeroDivisionError):
        paceline.train("digits-mlp", "async", steps=100_000_000, directory=tmp_path, watch=broken)
    assert not any("apart" in name for name in map(command_of, children()))
    saved = checkpoint.newest(tmp_path / "checkpoints", lambda _: None)
    assert saved is not None
    assert saved.step > 0


# the end of the caller

ENDLESS = """
import sys
from pathlib import Path

import paceline

try:
    paceline.train("digits-mlp", "async", workers=2, steps=10**9, directory="run", checkpoint_steps=200)
except KeyboardInterrupt as error:
    print("interrupted", error.result.updates, error.result.directory == str(Path("run").absolute()), flush=True)
    print(error, flush=True)
    result = paceline.train("digits-mlp", "async", workers=2, steps=error.result.updates + 20, **error.resume)
    print(result.updates >= error.result.updates + 20)
    sys.exit(130)
"""


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


@pytest.fixture
def caller(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A script that trains, and the launcher and roles that it has, once they have trained a while."""
    command = [sys.executable, "-c", ENDLESS]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=tmp_path, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            until(lambda: max(checkpoint.steps(tmp_path / "run/checkpoints"), default=0) > 0, 60, "a checkpoint")
            (launcher,) = children(process.pid)
            roles = children(launcher)
            assert len(roles) == 3
            yield process, [launcher, *roles]
        finally:
            process.kill()


def test_control_c_ends_in_order(caller: tuple[subprocess.Popen[str], list[int]], tmp_path: Path) -> None:
    process, others = caller
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    first, told, again = out.splitlines()
    reached = int(first.removeprefix("interrupted ").removesuffix(" True"))
    assert reached > 0
    assert told == (
        f"the run was interrupted after {reached:,} updates; "
        "resume it by the same call with directory='run', resume=True"
    )
    assert again == "True"
    assert "ending in order" in err
    assert all(map(is_gone, others))
    result = json.loads((tmp_path / "run/result.json").read_text(encoding="utf-8"))
    assert result["stopped"] is None  # the resumed run has reached its end
    saved = checkpoint.newest(tmp_path / "run/checkpoints", lambda _: None)
    assert saved is not None
    assert saved.step == result["updates"]


EARLY = """
import os, signal, sys
import paceline
from paceline.api import detached

start = detached.subprocess.Popen

def interrupted(*words, **rest):
    process = start(*words, **rest)
    signal.setitimer(signal.ITIMER_REAL, float(sys.argv[1]))
    return process

detached.subprocess.Popen = interrupted
signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
try:
    paceline.train("digits-mlp", "async", workers=2, steps=10**9, directory="run", checkpoint_steps=10**9)
except KeyboardInterrupt as error:
    print(type(error).__name__, error.directory, error.resume)
    detached.subprocess.Popen = start
    print(paceline.train("digits-mlp", "async", workers=2, steps=20, **error.resume).updates >= 20)
"""


@pytest.mark.parametrize("seconds", [0.01, 0.5])
def test_control_c_while_the_launcher_starts_shows_no_traceback(seconds: float, tmp_path: Path) -> None:
    command = [sys.executable, "-c", EARLY, str(seconds)]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert "Traceback" not in ran.stderr
    assert ran.stdout.splitlines() == ["RunInterrupted run {'directory': 'run', 'resume': True}", "True"]


def test_the_death_of_the_caller_ends_all(caller: tuple[subprocess.Popen[str], list[int]], tmp_path: Path) -> None:
    process, others = caller
    os.kill(process.pid, signal.SIGKILL)
    until(lambda: all(map(is_gone, others)), 60, "the end of the launcher and its roles")
    assert (tmp_path / "run/result.json").exists()  # the launcher ended in order
