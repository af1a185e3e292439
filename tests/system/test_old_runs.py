"""Run directories that an earlier version wrote: they are verified, replayed and resumed.

`old_runs/0.1.tar.xz` holds small runs of the version before the modules moved into rooms: `averaging` was killed with
all its processes, `sync` (with a backup worker) and `aeasgd` (with two servers) lost a worker on the way, `async` and
`sync-rates` ended undisturbed. `sync-repeat` is a run of `sync` with `repeat=true`, which is a scheme of its own now.
"""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
from command_line import Commands
from command_line import paceline as command

from paceline import replay, verify
from paceline.errors import UsageError
from paceline.runs import checkpoint, fingerprint, order_log

__all__ = ["command"]  # pytest finds it here

ARCHIVE = Path(__file__).with_name("old_runs") / "0.1.tar.xz"
GOALS = {"aeasgd": 250, "async": 60, "averaging": 4000, "sync": 150, "sync-rates": 20}


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path


def same_machine(run: Path) -> bool:
    """Whether this machine computes the bits of the one that the run was made on."""
    about = json.loads((order_log.place(run, 1) / order_log.ABOUT).read_text())
    then: dict[str, Any] = about["versions"]
    now = fingerprint.versions(then["threads"], "cpu")
    return all(then[name] == now[name] for name in ("torch", "numpy", "cpu", "machine"))


@pytest.mark.parametrize("name", GOALS)
def test_it_is_verified_and_replayed(name: str, runs: Path) -> None:
    found = verify(runs / name)
    broken_off = {"result"} if name == "averaging" else set()
    assert {one.what: one.text for one in found.checks if one.fits is False}.keys() <= broken_off
    told = replay(runs / name)
    if not told.match:  # the last bits of a product depend on the vector units of the machine
        assert not same_machine(runs / name), told.difference
        assert any("cpu was" in hint for hint in told.hints)
    elif name != "averaging":
        assert told.updates == GOALS[name]
        assert told.recorded_digest == json.loads((runs / name / "result.json").read_text())["digest"]


@pytest.mark.parametrize("name", GOALS)
def test_it_is_resumed(name: str, runs: Path, command: Commands) -> None:
    run, goal = runs / name, 100 if name == "averaging" else GOALS[name] + 40
    before = checkpoint.steps(run / "checkpoints")[-1]
    done = command("train", "--resume", str(run), "--steps", str(goal), "--json").json
    assert done["updates"] == goal > before
    assert verify(run).verified
    told = replay(run)  # both launches, the one of each version
    if same_machine(run):
        assert told.match, told.difference
        assert told.updates == goal


def test_what_is_another_scheme_now_is_refused_by_its_name(runs: Path, command: Commands) -> None:
    run = runs / "sync-repeat"
    told = "sync has no 'repeat' any more: several gradients of a worker per update are the scheme sync-repeat"
    shown = command("train", "--resume", str(run), "--steps", "40")
    assert shown.code == 2
    assert told in shown.err
    with pytest.raises(UsageError, match=told):
        replay(run)
    assert {one.what for one in verify(run).checks if one.fits is False} == {"config"}
