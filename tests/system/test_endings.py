"""How a run ends: in order, by a signal, or because something in it broke; and that nothing is left behind.

Here the launcher runs inside the test's process. Data: scikit-learn's digits.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from processes import children, descriptors, finished, leaving_nothing, resident, run, shared_files
from torch import Tensor

from paceline.cli import train
from paceline.cli.main import main
from paceline.config import build
from paceline.errors import Deadlock, RunError
from paceline.hook import Hook, Role, Session
from paceline.processes.supervisor.status import Status
from paceline.runs import checkpoint
from paceline.scheme import Scheme, State, Vector, on_server
from paceline.task import Batch, Task
from paceline.worker import Worker

RUNS = 50
GROWTH = 8 << 20  # bytes that so many runs may leave in the launcher's memory: fragments, not segments


def test_many_runs_in_a_row_leave_nothing(tmp_path: Path) -> None:
    def once(number: int) -> None:
        scheme = ("async", "allreduce")[number % 2]
        finished(
            run(tmp_path / f"{number}", "digits-mlp", scheme, workers=2, steps=5, checkpoint_seconds=60.0), 5, over=1
        )

    for number in range(4):  # what is loaded once, and the allocator's first pools
        once(number)
    gc.collect()
    before = set(children()), descriptors(), shared_files(), resident()
    for number in range(4, 4 + RUNS):
        once(number)
    gc.collect()
    assert set(children()) == before[0]
    assert descriptors() == before[1]
    assert shared_files() <= before[2]
    assert resident() - before[3] < GROWTH


@dataclass
class SlowEnd(Hook):
    """The chief takes its time at the end."""

    roles: ClassVar[frozenset[Role]] = frozenset({"chief"})

    def end(self, session: Session) -> None:
        threading.Event().wait(20)


def sending(*numbers: int, after: int = 50) -> Callable[[Status], None]:
    """Signals to the launcher, one per look, once so many updates are made."""
    todo = list(numbers)

    def watch(status: Status) -> None:
        if todo and status.updates >= after:
            os.kill(os.getpid(), todo.pop(0))

    return watch


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all_in_order_and_the_run_can_go_on(number: int, tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGCHLD)
    with leaving_nothing():
        story = run(tmp_path / "run", "digits-mlp", "async", workers=2, steps=100_000, watch=sending(number))
    assert isinstance(story.error, KeyboardInterrupt)
    assert story.told("interrupted: ending in order")
    assert (
        signal.getsignal(signal.SIGINT),
        signal.getsignal(signal.SIGTERM),
        signal.getsignal(signal.SIGCHLD),
    ) == before
    saved = checkpoint.newest(story.directory.checkpoints, lambda _: None)
    assert saved is not None
    assert saved.step >= 50  # the last one: on the way none was due
    told = story.directory.result()
    assert told is not None
    assert told["updates"] == saved.step
    again = run(tmp_path / "run", "digits-mlp", "async", workers=2, steps=saved.step + 50, resume=True)
    finished(again, saved.step + 50)
    assert again.told(f"resuming from the checkpoint of update {saved.step:,}")


def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    with leaving_nothing():
        story = run(
            tmp_path / "run",
            "digits-mlp",
            "sync",
            workers=2,
            steps=100_000,
            hooks=[SlowEnd()],
            watch=sending(signal.SIGINT, signal.SIGINT),
        )
    assert isinstance(story.error, KeyboardInterrupt)
    assert story.seconds < 10


@dataclass(frozen=True)
class Stuck(Scheme, name="stuck"):
    """Waits for what never comes."""

    @on_server(when=lambda self, s, r: s.v >= r)
    def pull(self, s: State, r: int) -> tuple[Vector, int]:
        return s.x, s.v

    async def step(self, w: Worker) -> None:
        await w.grad(w.x)
        await self.pull(7)


def test_a_guard_that_never_opens_is_a_deadlock(tmp_path: Path) -> None:
    with leaving_nothing():
        story = run(tmp_path / "run", "digits-mlp", Stuck(), workers=2, seconds=60.0, patience=1.0)
    assert isinstance(story.error, Deadlock)
    text = str(story.error)
    line = next(n for n, one in enumerate(Path(__file__).read_text().splitlines(), 1) if "self.pull(7)" in one)
    for words in ("waited 1 s", f"test_endings.py:{line}", "pull(r=7)", "s.v >= r", "v = 0"):
        assert words in text
    assert text.startswith(("chief", "worker:"))
    assert 1.0 < story.seconds < 8.0


class Broken(Task):
    """Digits, but the gradient of worker 1 fails in its own way after 20 steps."""

    name = "broken"

    def __init__(self, fails: Callable[[], object]) -> None:
        self._digits, self._fails = build.task_of("digits-mlp", {}), fails
        self.batch = self._digits.batch
        self._rank = self._count = 0

    def start(self, seed: int) -> Vector:
        return self._digits.start(seed)

    def batches(self, rank: int, workers: int, seed: int, first: int = 0) -> Iterator[Batch]:
        self._rank = rank
        return self._digits.batches(rank, workers, seed, first)

    def grad(
        self, x: Vector, batch: Batch, out: Vector | None = None, buffers: dict[str, Tensor] | None = None
    ) -> tuple[float, Vector]:
        self._count += self._rank == 1
        if self._count > 20:
            self._fails()
        return self._digits.grad(x, batch, out, buffers)

    def evaluate(self, x: Vector, buffers: dict[str, Tensor] | None = None) -> dict[str, float]:
        return self._digits.evaluate(x, buffers)


def no_such_class() -> None:
    raise ValueError("label 10 is not among the classes")


def too_much_memory() -> Tensor:
    return torch.empty(1 << 60, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("fails", "words"),
    [
        (no_such_class, "ValueError: label 10 is not among the classes"),
        (too_much_memory, "can't allocate memory"),
    ],
)
def test_an_error_in_the_loss_names_role_and_step(fails: Callable[[], object], words: str, tmp_path: Path) -> None:
    with leaving_nothing():
        story = run(tmp_path / "run", Broken(fails), "async", workers=3, steps=100_000)
    assert isinstance(story.error, RunError)
    text = str(story.error)
    assert text.startswith("worker:1, step 20: ")
    assert words in text
    notes = "\n".join(story.error.__notes__)
    assert "in the gradient of worker:1, step 20" in notes
    assert "logs/worker-1.log" in notes
    assert story.error.result is not None
    for other in ("chief", "worker-2", "server-0"):  # ended in order
        assert (story.directory.logs / f"{other}.log").read_text() == ""
    assert story.seconds < 10


def broken() -> Task:
    """For the command line."""
    return Broken(no_such_class)


def test_the_command_line_says_so_and_exits_with_1(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["train", f"{__file__}:broken", "-s", "async", "-n", "2", "--steps", "9999", "--dir", str(tmp_path / "run")]
    with pytest.raises(SystemExit) as ended:
        main([*words, "--plain"])
    assert ended.value.code == 1
    told = capfd.readouterr().err
    assert "error: worker:1, step 20: ValueError: label 10 is not among the classes" in told


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_that_comes_too_late_changes_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """The run has reached its goal, and only its result is left to be told."""
    told, before = train.show, signal.getsignal(number)

    def late(*given: Any, **rest: Any) -> None:
        os.kill(os.getpid(), number)
        told(*given, **rest)

    monkeypatch.setattr(train, "show", late)
    with pytest.raises(SystemExit) as ended:
        main(["train", "digits-mlp", "--steps", "5", "--json", "--dir", str(tmp_path / "run")])
    assert ended.value.code == 0
    assert json.loads(capfd.readouterr().out)["updates"] == 5
    assert signal.getsignal(number) is before  # this process goes on


@dataclass
class DiskFull(Hook):
    """From some update on the chief can write no file of more than so many bytes; then a checkpoint is due."""

    roles: ClassVar[frozenset[Role]] = frozenset({"chief"})

    saved = False

    def after_step(self, session: Session) -> None:
        if session.updates >= 40 and not self.saved:  # from one look to the next it may rise by two
            self.saved = True
            session.save()
        if session.updates >= 80:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (1024, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
            session.save()


def test_a_full_disk_is_said_and_the_former_checkpoint_still_serves(tmp_path: Path) -> None:
    with leaving_nothing():
        story = run(tmp_path / "run", "digits-mlp", "sync", workers=2, steps=100_000, hooks=[DiskFull()])
    assert isinstance(story.error, RunError)
    assert story.error.exit_code == 1
    assert "chief" in str(story.error)
    assert "checkpoint of step 8" in str(story.error)
    assert str(story.directory.checkpoints) in str(story.error)
    assert "File too large" in str(story.error)
    saved = checkpoint.newest(story.directory.checkpoints, lambda _: None)
    assert saved is not None
    assert 40 <= saved.step < 80
    assert all(path.name.isdigit() for path in story.directory.checkpoints.iterdir())
    again = run(tmp_path / "run", "digits-mlp", "sync", workers=2, steps=100, resume=True)
    finished(again, 100)


def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path) -> None:
    finished(run(tmp_path / "run", "digits-mlp", "sync", workers=2, steps=100, checkpoint_steps=30), 100)
    *_, former, last = checkpoint.steps(tmp_path / "run" / "checkpoints")
    place = tmp_path / "run" / "checkpoints" / f"{last:010d}" / checkpoint.STATE
    content = bytearray(place.read_bytes())
    content[len(content) // 2] ^= 0xFF
    place.write_bytes(content)
    story = run(tmp_path / "run", "digits-mlp", "sync", workers=2, steps=150, checkpoint_steps=30, resume=True)
    finished(story, 150)
    assert story.told("passed over", f"{last:010d}", "damaged")
    assert story.told(f"resuming from the checkpoint of update {former:,}")


@pytest.mark.parametrize("place", ["file/run", "/proc/run", "taken"])
def test_a_directory_that_cannot_be_used_is_refused(
    place: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("a regular file")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "notes.txt").write_text("somebody's")
    with leaving_nothing(), pytest.raises(SystemExit) as ended:
        main(["train", "digits-mlp", "--steps", "5", "--dir", str(tmp_path / place)])
    assert ended.value.code == 2
    told = capfd.readouterr().err.strip()
    assert told.count("\n") == 0
    assert told.startswith("error: ")
    assert str(tmp_path / place) in told
    assert "--dir" in told
