"""Who is dead, frozen, late or hopeless, and what the others do meanwhile. Data: scikit-learn's digits."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
from processes import Linger, finished, leaving_nothing, run, until
from torch import Tensor

from paceline.config import build
from paceline.errors import RunError
from paceline.hook import Hook, Role, Session
from paceline.processes.supervisor.status import Status
from paceline.scheme import Scheme
from paceline.state import State, Vector
from paceline.task import Batch, Task
from paceline.worker import Worker

STEPS = 300


@dataclass
class StaysAway(Hook):
    """A worker that has been killed does not take part again before a file is there."""

    file: Path
    rank: int = 1

    def begin(self, session: Session) -> None:
        if session.worker.rank != self.rank:
            return
        first = self.file.with_suffix(".first")  # its step may be 0 again: if it dies inside a call, all go back
        if first.exists() and first.read_text() != str(os.getpid()):
            session.wait(self.file.exists, "a file", away=True)
        first.write_text(str(os.getpid()))


@pytest.mark.parametrize("quorum", ["hold", "shrink"])
@pytest.mark.parametrize("scheme", ["sync", "allreduce"])
def test_a_barrier_holds_or_shrinks_while_a_worker_is_dead(scheme: str, quorum: str, tmp_path: Path) -> None:
    file, gate = tmp_path / "back", tmp_path / "gate"
    seen: list[tuple[float, int]] = []  # since it is dead: when, updates

    def watch(status: Status) -> None:
        worker = next(role for role in status.roles if role.name == "worker:1")
        if worker.restarts and not file.exists():
            seen.append((time.monotonic(), status.updates))
            if seen[-1][0] - seen[0][0] > 0.7:
                file.touch()
        if file.exists() and worker.step > before.get("step", worker.step):
            gate.touch()  # it is back and takes steps: the run may end
        before["step"] = worker.step

    before: dict[str, int] = {}
    story = run(
        tmp_path / "run",
        "digits-mlp",
        scheme,
        kills=["worker:1"],
        watch=watch,
        hooks=[StaysAway(file), Linger(gate, 20, 0.005)],
        workers=2,
        steps=STEPS,
        quorum=quorum,
    )
    result = finished(story, STEPS)
    assert result.restarts == 1
    made = seen[-1][1] - seen[0][1]
    assert made <= 1 if quorum == "hold" else made > 20 or story.told("died inside a call")
    assert max(story.standstill.values(), default=0.0) < (1.0 if quorum == "shrink" else 3.0)


@pytest.mark.parametrize(
    ("scheme", "frozen"),
    [("async", "worker:1"), ("sync", "worker:1"), ("allreduce", "chief"), ("sync", "server:0")],
)
def test_who_is_frozen_longer_than_patience_is_killed_and_comes_back(scheme: str, frozen: str, tmp_path: Path) -> None:
    with leaving_nothing():
        story = run(
            tmp_path / "run",
            "digits-mlp",
            scheme,
            kills=[(frozen, signal.SIGSTOP)],
            workers=2,
            steps=STEPS,
            patience=1.0,
        )
    result = finished(story, STEPS)
    assert story.told(frozen, "has been stopped for 1 s", "killing it")
    assert result.restarts == 1
    back = story.faults[0].back
    assert back is not None
    assert back > 1.0


class Deadly(Task):
    """Digits, but the gradient of worker 1 ends its own process."""

    name = "deadly"

    def __init__(self) -> None:
        self._digits = build.task_of("digits-mlp", {})
        self.batch = self._digits.batch
        self._rank = 0

    def start(self, seed: int) -> Vector:
        return self._digits.start(seed)

    def batches(self, rank: int, workers: int, seed: int, first: int = 0) -> Iterator[Batch]:
        self._rank = rank
        return self._digits.batches(rank, workers, seed, first)

    def grad(
        self, x: Vector, batch: Batch, out: Vector | None = None, buffers: dict[str, Tensor] | None = None
    ) -> tuple[float, Vector]:
        if self._rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return self._digits.grad(x, batch, out, buffers)

    def evaluate(self, x: Vector, buffers: dict[str, Tensor] | None = None) -> dict[str, float]:
        return self._digits.evaluate(x, buffers)


@pytest.mark.parametrize("allowed", [0, 2])
def test_a_worker_that_dies_again_and_again_is_given_up(allowed: int, tmp_path: Path) -> None:
    with leaving_nothing():
        story = run(tmp_path / "run", Deadly(), "async", workers=2, seconds=60.0, restarts=allowed)
    assert isinstance(story.error, RunError)
    how = f"{allowed + 1} times in a row without any progress between" if allowed else "once"
    assert f"worker:1 died by signal SIGKILL {how}; --restarts allows {allowed}" in str(story.error)
    assert "logs/worker-1.log" in str(story.error)
    assert sum("worker:1 died" in text for text in story.said) == allowed
    assert story.error.result is not None  # what was reached by then
    assert story.seconds < 10


@dataclass
class Diary(Hook):
    """Each worker writes down at which update its first step began, and at which it ended."""

    folder: Path

    def before_step(self, session: Session) -> None:
        place = self.folder / f"first.{session.worker.rank}"
        if not place.exists():
            place.write_text(str(session.updates))

    def end(self, session: Session) -> None:
        (self.folder / f"last.{session.worker.rank}").write_text(str(session.updates))

    def read(self, name: str) -> list[int]:
        return [int(path.read_text()) for path in sorted(self.folder.glob(f"{name}.*"))]


@pytest.mark.parametrize(("scheme", "over"), [("async", 4), ("sync", 1), ("allreduce", 1)])
def test_a_worker_joins_late_and_all_end_at_the_last_step(scheme: str, over: int, tmp_path: Path) -> None:
    diary = Diary(tmp_path)
    hooks = [diary, Linger(tmp_path / "never", 200, 0.005), "global-step-waiter:step=200", "stop-at-step:last_step=300"]
    with leaving_nothing():
        story = run(tmp_path / "run", "digits-mlp", scheme, hooks=hooks, workers=2)
    result = finished(story, 300, over=over)  # two pushes of each worker may be under way when one sees the last step
    first = diary.read("first")
    assert first[0] == 0
    assert 200 <= first[1] < 290
    assert diary.read("last") == [result.updates] * 2
    assert story.steps["worker:1"] > 0
    assert result.stopped is not None
    assert "last step 300" in result.stopped


@pytest.mark.parametrize("scheme", ["async", "sync", "allreduce"])
def test_each_worker_leaves_after_its_own_count(scheme: str, tmp_path: Path) -> None:
    diary = Diary(tmp_path)
    hooks = [diary, Linger(tmp_path / "never", 100, 0.005), "global-step-waiter:step=100", "stop-at-step:num_steps=200"]
    with leaving_nothing():
        story = run(tmp_path / "run", "digits-mlp", scheme, hooks=hooks, workers=2)
    first, last = diary.read("first"), diary.read("last")
    result = finished(story, first[1] + 200, over=4)
    assert first[0] == 0
    assert 100 <= first[1] < 190
    assert result.updates <= last[1] + 1 <= first[1] + 205  # the late one goes last,
    assert last[0] == result.updates  # but the chief's end is the run's: it saves what the others have made of it
    assert story.steps["chief"] < story.steps["worker:1"] + first[1]


class SlowToStart(frozenset[Role]):
    """Asked whether a worker runs its hook, it answers when a file is there."""

    file: Path

    def __contains__(self, kind: object) -> bool:
        if kind == "worker":
            until(self.file.exists, 20, "the file")
        return super().__contains__(kind)


@dataclass
class StartsSlowly(Hook):
    """Keeps a worker from beginning at all."""

    roles: ClassVar[frozenset[Role]] = SlowToStart({"chief", "worker"})


@pytest.mark.parametrize(("hooks", "held"), [(["start-barrier"], True), ([], False)])
def test_the_start_barrier_holds_all_until_everybody_has_begun(
    hooks: list[str], held: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "begin"
    monkeypatch.setattr(SlowToStart, "file", file, raising=False)
    seen: list[tuple[float, int]] = []

    def watch(status: Status) -> None:
        if not file.exists() and status.roles[0].state in ("training", "starting"):
            seen.append((time.monotonic(), status.roles[0].step))
            # without the hook the chief trains, however late a busy machine lets it start
            if seen[-1][1] > 0 or (held and seen[-1][0] - seen[0][0] > 0.5):
                file.touch()

    settings: dict[str, Any] = {"workers": 2, "steps": STEPS}
    story = run(
        tmp_path / "run",
        "digits-mlp",
        "async",
        hooks=[StartsSlowly(), *hooks, Linger(file, 50)],
        watch=watch,
        **settings,
    )
    finished(story, STEPS)
    assert (max(step for _, step in seen) == 0) is held
    if held:
        assert story.steps["worker:1"] > 0


@dataclass(frozen=True)
class Twice(Scheme, name="twice"):
    """Two means per step; a worker dies between them, once."""

    mark: str = ""
    lr: float = 0.05

    def worker(self, x0: Vector, workers: int) -> State:
        return State(x=x0)

    async def step(self, w: Worker) -> None:
        g = await w.mean(await w.grad(w.x))
        if (w.rank, w.t) == (1, 20) and not Path(self.mark).exists():
            Path(self.mark).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        w.x = await w.mean(w.x - self.lr * g)
        w.v += 1


@pytest.mark.parametrize("collective", ["shared", "tcp"])
def test_a_worker_that_died_between_two_means_of_a_step_is_held_for_at_the_next_step(
    collective: str, tmp_path: Path
) -> None:
    """It can be taken in at the first mean of a step only."""
    scheme = Twice(str(tmp_path / "mark"))
    settings: dict[str, Any] = {"workers": 3, "steps": 60, "quorum": "hold", "patience": 10.0}
    with leaving_nothing():
        story = run(tmp_path / "run", "digits-mlp", scheme, collective=collective, **settings)
    assert finished(story, 60).restarts == 1
