"""The words of `paceline run`: --set, and the command that resumes a script."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from paceline.cli import train
from paceline.cli.main import app, main
from paceline.config.plan import Plan
from paceline.runs.run_directory import RunDirectory

SCRIPT = ["/home/me/my script.py", "--epochs", "3", "--lr", "0.2"]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Plan]:
    """The plans that a command would carry out."""
    plans: list[Plan] = []

    def note(place: RunDirectory, plan: Plan, *_: Any, **__: Any) -> None:
        plans.append(plan)

    monkeypatch.setattr(train, "conduct", note)
    monkeypatch.chdir(tmp_path)
    Path("my.py").touch()
    return plans


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["run", *words])
    return int(ended.value.code or 0)


@pytest.mark.parametrize(
    ("words", "hyper", "arguments"),
    [
        ("my.py --set lr=0.001 window=8 -- --epochs 3", {"lr": "0.001", "window": "8"}, ["--epochs", "3"]),
        ("--set lr=0.001 window=8 my.py x=1", {"lr": "0.001", "window": "8"}, ["x=1"]),
        (
            "my.py --set lr=1 --workers 3 --set rule=adam rule.beta1=0.8",
            {"lr": "1", "rule": "adam", "rule.beta1": "0.8"},
            [],
        ),
        ("my.py --set=lr=1 window=2 -- --set lr=5", {"lr": "1", "window": "2"}, ["--set", "lr=5"]),
        ("my.py x=1 -- y=2", {}, ["x=1", "y=2"]),
    ],
)
def test_set_takes_the_pairs_that_follow_it(
    launched: list[Plan], words: str, hyper: dict[str, str], arguments: list[str]
) -> None:
    assert run(*words.split()) == 0
    (plan,) = launched
    assert (plan.hyper, plan.script[1:]) == (hyper, arguments)


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("my.py --set", "requires an argument"),
        ("my.py --set lr", "'lr' is not a hyper-parameter; write it as key=value"),
        ("my.py --set steps=3", "if you mean the option, write --steps"),
        ("my.py --set task.size=3", "a program has no task; its options follow --"),
        ("my.py --scheme sync --set window=3", "no hyper-parameter of sync 'window'"),
        ("my.py --scheme downpour --set learning_rate=3", "did you mean 'lr'?"),
    ],
)
def test_what_cannot_be_set(launched: list[Plan], words: str, error: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*words.split()) == 2
    assert error in capsys.readouterr().err.replace("\n", " ")
    assert not launched


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"scheme": "downpour", "hyper": {"lr": "0.001", "window": "8"}, "servers": 2, "steps": 5000},
        {"hooks": ["log:every=3", "target:value=0.9"], "patience": 3.5, "seconds": 60.0, "workers": 5, "threads": 2},
    ],
    ids=["nothing given", "a scheme", "hooks and limits"],
)
def test_the_printed_command_resumes_with_all_options(
    launched: list[Plan], settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "my script.py"
    script.touch()
    place = RunDirectory.create(tmp_path / "run 1", "run")
    plan = Plan(script=[str(script), *SCRIPT[1:]], title=script.name, **({"workers": 2} | settings))
    program, command, *words = shlex.split(train.resume_command(place, plan))
    assert (program, command) == ("paceline", "run")
    assert run(*words) == 0
    assert launched == [plan]


def test_the_option_is_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        app(["run", "--help"])
    assert "--set KEY=VALUE..." in capsys.readouterr().out
