"""What people see of a script: its prints, its progress bars, and what it does now. Data: scikit-learn's digits."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest
from attached import PRELUDE

from paceline.api.execute import execute
from paceline.config.from_plan import scheme_of
from paceline.config.plan import Plan
from paceline.processes.supervisor.status import RoleState, Status
from paceline.result import Result
from paceline.runs.run_directory import RunDirectory

Told = list[tuple[str, str]]

WAITING = """
def wait_for(name):
    while not Path(name).exists():
        time.sleep(0.01)
"""
PRINTS = """
print("loaded")
with attach(model, "sync", lr=0.2, steps=20) as pace:
    for n, (images, labels) in enumerate(pace.share(items)):
        pace.step(F.cross_entropy(model(images), labels))
        sys.stderr.write(f"\\r{n}/20")
    sys.stderr.write("\\n")
    pace.say(f"said by {pace.rank}")
print(f"after the loop {pace.rank}")
"""
STATES = (
    WAITING
    + """
def evaluate(model):
    wait_for("evaluating.seen")
    return {"accuracy": 0.5}

def slowly(graph, inputs):
    wait_for("compiling.seen")
    return graph.forward

fast = torch.compile(model, backend=slowly)
with attach(model, "sync", lr=0.2, steps=5, evaluate=evaluate) as pace:
    for images, labels in pace.share(items):
        pace.step(F.cross_entropy(fast(images), labels))
wait_for("after.seen")
"""
)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


def run(place: Path, body: str, told: Told, statuses: list[Status], **settings: str) -> Result:
    script = place / "script.py"
    script.write_text(PRELUDE + body)
    directory = RunDirectory.create(place / "run", "run")
    plan = Plan(script=[str(script)], workers=2, directory=str(directory.path), title="test", **settings)  # type: ignore[arg-type]
    directory.write_plan(dataclasses.asdict(plan))

    def watch(status: Status) -> None:
        statuses.append(status)
        for role in status.roles:
            (place / f"{role.state.split()[0]}.seen").touch()

    return execute(plan, scheme_of(plan, {}), {}, tell=lambda *one: told.append(one), watch=watch)


@pytest.mark.parametrize(
    ("prints", "names"),
    [("chief", ["{}"]), ("all", ["{}", "worker:1: {}"]), ("none", [])],
)
def test_the_prints_of_the_chief_reach_people_and_others_by_option(place: Path, prints: str, names: list[str]) -> None:
    told: Told = []
    run(place, PRINTS, told, [], prints=prints)
    lines = [text for kind, text in told if kind == "out"]
    expected = [name.format(text) for rank, name in enumerate(names) for text in ("loaded", f"after the loop {rank}")]
    assert sorted(lines) == sorted(expected)
    bars = [text for kind, text in told if kind == "err"]
    assert len(bars) == len(names)  # one line of each progress bar
    assert all(text.endswith("/20") for text in bars)
    assert sorted(text for kind, text in told if kind == "say") == [
        "said by 0",
        "said by 1",
    ]  # once, whatever is printed
    for rank, role in enumerate(("chief", "worker-1")):
        log = (place / f"run/logs/{role}.log").read_text()
        assert f"after the loop {rank}" in log
        assert f"said by {rank}" in log


def test_what_a_script_does_now_is_shown(place: Path) -> None:
    statuses: list[Status] = []
    result = run(place, STATES, [], statuses)
    assert result.updates == 5
    seen = {(role.name, role.state) for status in statuses for role in status.roles}
    for name in ("chief", "worker:1"):
        assert {(name, RoleState.COMPILING), (name, RoleState.AFTER)} <= seen
    assert ("chief", RoleState.EVALUATING) in seen
    assert {role.state for role in statuses[-1].roles} == {RoleState.DONE}
