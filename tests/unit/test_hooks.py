"""Hooks run around the steps of those whose role has them, and their end always runs."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import pytest

import paceline
from paceline.config import discovery
from paceline.config.build import hook_of
from paceline.errors import LossError, UsageError
from paceline.hook import Hook, Role, Session
from paceline.hooks.target import Target

SEEN: list[tuple[str, str, int]] = []


@dataclass
class Recorder(Hook, name="recorder"):
    """Writes down what is called."""

    label: str = "a"
    own: list[int] = field(default_factory=list)

    def _note(self, what: str, session: Session) -> None:
        SEEN.append((self.label, what, session.worker.rank))

    def begin(self, session: Session) -> None:
        self.own = []
        self._note("begin", session)

    def before_step(self, session: Session) -> None:
        self.own.append(session.worker.t)
        self._note("before", session)

    def after_step(self, session: Session) -> None:
        assert self.own[-1] + 1 == session.worker.t  # its own copy: no other worker's steps among them
        self._note("after", session)

    def failed(self, session: Session, error: BaseException) -> None:
        self._note(type(error).__name__, session)

    def end(self, session: Session) -> None:
        self._note("end", session)


@dataclass
class ChiefOnly(Recorder, name="chief-only"):
    roles: ClassVar[frozenset[Role]] = frozenset({"chief"})


@pytest.fixture(autouse=True)
def _fresh() -> None:
    SEEN.clear()


def test_hooks_surround_every_step_and_end_in_reverse_order() -> None:
    paceline.simulate("toy", "allreduce", workers=1, steps=2, hooks=[Recorder("a"), Recorder("b")])
    calls = [(label, what) for label, what, _ in SEEN]
    step = [("a", "before"), ("b", "before"), ("a", "after"), ("b", "after")]
    assert calls[:2] == [("a", "begin"), ("b", "begin")]
    assert calls[2:10] == step * 2
    assert calls[-2:] == [("b", "end"), ("a", "end")]


def test_roles_choose_who_runs_a_hook() -> None:
    paceline.simulate("toy", "async", workers=3, steps=6, lr=0.01, hooks=[ChiefOnly("chief"), Recorder("all")])
    assert {rank for label, _, rank in SEEN if label == "chief"} == {0}
    assert {rank for label, _, rank in SEEN if label == "all"} == {0, 1, 2}


def test_failed_and_end_run_when_a_run_breaks_off() -> None:
    with pytest.raises(LossError):
        paceline.simulate("toy", "async", workers=2, lr=5.0, hooks=[Recorder()], warn=lambda text: None)
    assert ("a", "LossError", 0) in SEEN
    assert [what for _, what, _ in SEEN].count("end") == 2


def test_hooks_change_no_bit() -> None:
    plain = paceline.simulate("quadratic", "dynsgd", workers=3, steps=20, task_options={"noise": 1.0})
    hooked = paceline.simulate(
        "quadratic",
        "dynsgd",
        workers=3,
        steps=20,
        task_options={"noise": 1.0},
        hooks=[Recorder(), "target:metric=loss,value=0"],
    )
    assert plain.digest == hooked.digest


def test_target_ends_the_run_and_says_why() -> None:
    result = paceline.simulate("toy", "sync", workers=2, steps=500, hooks=["target:metric=loss,value=1,every=5"])
    assert result.updates < 500
    assert result.loss <= 1
    assert result.updates % 5 == 0
    assert result.stopped is not None
    assert "target" in result.stopped
    never = paceline.simulate("toy", "sync", workers=2, steps=10, hooks=["target:metric=loss,value=0,every=5"])
    assert (never.updates, never.stopped) == (10, None)


def test_target_of_an_unknown_metric_names_the_known() -> None:
    with pytest.raises(UsageError, match="no metric 'accuracy'; it has loss"):
        paceline.simulate("toy", "sync", workers=2, hooks=[Target()])


def test_log_and_final_metrics_speak() -> None:
    said: list[str] = []
    paceline.simulate("toy", "sync", workers=2, steps=20, hooks=["log:every=5", "final-metrics"], say=said.append)
    steps = [text for text in said if text.startswith("worker:0 step")]
    assert len(steps) in (3, 4)  # the run ends with the update inside the last step
    assert said[-1].startswith("at the end: update 20")


def test_options_are_checked() -> None:
    for text, said in [
        ("targt", "did you mean 'target'"),
        ("target:valu=1", "did you mean 'value'"),
        ("target:value=much", "must be a number"),
        ("target:every=0", "must be at least 1"),
        ("absent.py:Mine", "no file 'absent.py'"),
    ]:
        with pytest.raises(UsageError, match=said):
            hook_of(text)
    assert hook_of("paceline.hooks.target:Target:value=0.5,every=3") == Target(value=0.5, every=3)
    assert {"target", "log", "final-metrics"} <= discovery.hooks().keys()


def test_the_hook_of_the_docs_runs(tmp_path: Path) -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "add-a-hook.md"
    code, *_ = re.findall(r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    (tmp_path / "best.py").write_text(code, encoding="utf-8")
    said: list[str] = []
    hook = f"{tmp_path / 'best.py'}:BestLoss:margin=0.5"
    paceline.simulate("toy", "sync", workers=2, steps=10, hooks=[hook], say=said.append)
    assert said
    assert all("best loss" in text for text in said)
