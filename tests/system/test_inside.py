"""Workers of several processes, for real: they train, are killed, and leave no process; their runs are repeated.

Data: scikit-learn's digits.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from processes import Linger, children, finished, leaving_nothing, run, until

import paceline
from paceline.api.execute import execute
from paceline.config.from_plan import scheme_of
from paceline.config.plan import Plan
from paceline.processes.supervisor.status import Status
from paceline.runs.run_directory import RunDirectory

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "examples"


class Inner:
    """Notes the processes inside the workers of a run. Kills what it is told to, one after another."""

    def __init__(self, gate: Path, kills: tuple[str, ...] = ()) -> None:
        self.seen: dict[str, set[int]] = {}
        self._gate, self._kills = gate, list(kills)
        self._after: tuple[int, int] | None = None  # a leader that was killed, or whose process was, and its step

    def __call__(self, status: Status) -> None:
        for role in status.roles:
            inner = {pid for pid in children(role.pid) if _inside(pid)} if role.pid else set()
            self.seen.setdefault(role.name, set()).update(inner)
            if role.name == "worker:1" and inner and role.state == "training":
                self._deal(role.pid, role.step, min(inner))
        if not self._kills and self._after is None and all(self.seen.get(name) for name in ("chief", "worker:1")):
            self._gate.touch()

    def _deal(self, leader: int, step: int, inner: int) -> None:
        if self._after is not None and (leader == self._after[0] or step <= self._after[1]):
            return
        self._after = None
        if self._kills and step > 4:
            self._after = (leader, step)
            with suppress(ProcessLookupError):
                os.kill(inner if self._kills.pop(0) == "inner" else leader, signal.SIGKILL)

    def left(self) -> set[int]:
        return {pid for pids in self.seen.values() for pid in pids if _inside(pid)}


def _inside(pid: int) -> bool:
    with suppress(OSError):
        return b"paceline inside" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


@pytest.mark.parametrize(
    ("scheme", "inside", "hyper"),
    [
        ("averaging", "ddp:2", {"window": 4}),
        ("diloco", "ddp:2", {"window": 4}),
        ("averaging", "fsdp:2", {"window": 2}),
    ],
)
def test_two_workers_of_two_processes_train_and_are_repeated(
    scheme: str, inside: str, hyper: dict[str, float], tmp_path: Path
) -> None:
    gate, steps = tmp_path / "gate", 10 if inside == "fsdp:2" else 20
    look, hooks = Inner(gate), [Linger(gate, 4, 0.1)]
    settings = {"workers": 2, "steps": steps, "inside": inside, "hyper": hyper}
    with leaving_nothing():
        story = run(tmp_path / "run", "digits-mlp", scheme, watch=look, hooks=hooks, **settings)
    result = finished(story, steps)
    assert {name: len(pids) for name, pids in look.seen.items()} == {"chief": 1, "worker:1": 1}
    until(lambda: not look.left(), 5, "the processes end")
    assert story.directory.plan()["inside"] == inside
    again = paceline.replay(story.directory.path)
    assert again.match, again.difference
    assert again.recorded_digest == again.digest
    simulated = paceline.simulate("digits-mlp", scheme, workers=2, steps=steps, inside=inside, **hyper)
    assert simulated.digest == result.digest


def test_a_killed_process_of_a_worker_is_a_killed_worker(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    look = Inner(gate, ("inner", "leader"))
    settings = {"workers": 2, "steps": 60, "inside": "ddp:2", "hyper": {"window": 2}, "quorum": "hold"}
    with leaving_nothing():
        story = run(tmp_path / "run", "digits-mlp", "averaging", watch=look, hooks=[Linger(gate, 10, 0.1)], **settings)
    result = finished(story, 60)
    assert result.restarts == 2
    assert story.told("process 1 inside worker:1", "signal 9", "the whole worker ends")
    assert len(look.seen["worker:1"]) == 3
    until(lambda: not look.left(), 5, "the processes end")
    assert paceline.replay(story.directory.path).match


def test_a_run_is_resumed_in_another_number_of_processes(tmp_path: Path) -> None:
    settings = {"workers": 2, "hyper": {"window": 2}}
    finished(run(tmp_path / "run", "digits-mlp", "averaging", steps=6, inside="ddp:2", **settings), 6)
    story = run(tmp_path / "run", "digits-mlp", "averaging", steps=12, inside="ddp:3", resume=True, **settings)
    finished(story, 12)
    assert paceline.replay(story.directory.path).match


def test_a_loop_of_ones_own_has_ddp_inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of the four processes is killed on the way."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    directory = RunDirectory.create(tmp_path / "run", "run")
    script = [str(EXAMPLES / "inside_ddp.py"), "--steps=30", "--window=10"]
    plan = Plan(script=script, workers=2, directory=str(directory.path), title="test", quorum="hold")
    directory.write_plan(dataclasses.asdict(plan))
    gate = tmp_path / "gate"
    look, hooks = Inner(gate, ("inner",)), [Linger(gate, 5, 0.1)]
    with leaving_nothing():
        result = execute(plan, scheme_of(plan, {}), {"hooks": hooks}, tell=lambda *_: None, watch=look)
    assert (result.updates, result.restarts) == (30, 1)
    assert result.metrics["accuracy"] > 0.9
    assert len(look.seen["worker:1"]) == 2
    assert "killed by signal 9: the worker ends" in (directory.logs / "worker-1.log").read_text()
    until(lambda: not look.left(), 5, "the processes end")


def test_a_model_in_shards_has_the_bits_of_slices_one_after_the_other() -> None:
    """In a process of its own: torch.distributed stays as it was in this one."""
    program = [sys.executable, str(HERE / "sharded_gradients.py")]
    done = subprocess.run(program, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["same", "same", "same", "ended"]
