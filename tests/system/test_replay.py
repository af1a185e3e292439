"""Recorded runs of real processes, killed on the way, and repeated in this one: the same bits.

Data: scikit-learn's digits.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from beds.short_windows import short
from processes import Story, finished, run
from test_kills_servers import FrailAsync, FrailSync, shoot

from paceline import Batch, Hook, load, replay
from paceline.config import build, discovery
from paceline.errors import DataError, UsageError
from paceline.hook import Session
from paceline.result import digest
from paceline.runs import checkpoint, file_sums, fingerprint, order_history, order_log
from paceline.runs.order_log import OrderLogWriter, place
from paceline.runs.run_directory import RunDirectory
from paceline.scheme import Scheme, State, Vector
from paceline.schemes.async_ import AsyncSGD
from paceline.torch_task import Samples, TorchTask
from paceline.worker import Worker

STEPS = 160
NO_ORDER = {"hogwild"}
WHOLE = {name for name in discovery.schemes() if discovery.scheme(name)().whole()}


def recorded(directory: Path, scheme: Any, kills: tuple[str, ...] = (), **settings: Any) -> Story:
    settings = {"workers": 2, "steps": STEPS, "checkpoint_seconds": 0.25} | settings
    story = run(directory, settings.pop("task", "digits-mlp"), scheme, kills=kills, **settings)
    finished(story, settings["steps"])
    return story


@pytest.mark.parametrize("collective", ["shared", "tcp"])
def test_a_worker_that_dies_after_its_log_and_before_its_mean_was_in_none(
    collective: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next life brings another vector to the mean of the same number."""
    plain, added, mark = OrderLogWriter.flush, OrderLogWriter.add, tmp_path / "struck"
    logged: list[bool] = []
    kinds: list[order_log.RecordKind] = []

    def add(log: OrderLogWriter, kind: order_log.RecordKind, *values: Any) -> None:
        kinds.append(kind)
        added(log, kind, *values)

    def struck(log: OrderLogWriter) -> None:
        mean = order_log.RecordKind.MEAN in kinds
        kinds.clear()
        plain(log)
        if mean and b"worker:1" in Path("/proc/self/cmdline").read_bytes() and not mark.exists():
            logged.append(mean)
            if len(logged) == 20:
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(OrderLogWriter, "add", add)
    monkeypatch.setattr(OrderLogWriter, "flush", struck)
    story = run(tmp_path / "run", "digits-mlp", "groups", workers=4, steps=300, collective=collective)
    assert finished(story, 300).restarts == 1
    numbers = [
        {record.values[0] for record in order_log.read(path).records if record.kind == order_log.RecordKind.MEAN}
        for path in sorted(place(tmp_path / "run", 1).glob("worker-1-*.log"))
    ]
    assert len(numbers[0] & numbers[1]) == 1
    told = replay(tmp_path / "run")
    assert told.match, told.difference


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short asynchronous run with a few checkpoints; never changed by a test."""
    path = tmp_path_factory.mktemp("calm") / "run"
    recorded(path, "async", checkpoint_steps=40)
    return path


@pytest.fixture
def spoilt(calm: Path, tmp_path: Path) -> Path:
    """A copy of it that may be."""
    return Path(shutil.copytree(calm, tmp_path / "run"))


@pytest.mark.parametrize("name", sorted(set(discovery.schemes()) - NO_ORDER))
def test_every_scheme_is_repeated_bit_for_bit(name: str, tmp_path: Path) -> None:
    scheme = discovery.scheme(name)
    workers = 1 if scheme.alone else 4 if name == "groups" else 3
    kills: tuple[str, ...] = ("chief", "chief") if scheme.alone else ("worker:1", "chief")
    servers = 1 if name in WHOLE else 2
    if scheme.methods:
        kills = ("worker:1", f"server:{servers - 1}", "chief", "server:0")
    number = servers if scheme.methods else 0
    story = recorded(tmp_path / "run", name, kills, workers=workers, servers=number, hyper=short(name))
    assert story.result is not None
    told = replay(tmp_path / "run")
    assert told.match, told.difference
    assert (told.updates, told.digest) == (story.result.updates, story.result.digest)
    assert told.checkpoints[-1] == told.updates
    assert not told.cut
    for log in place(tmp_path / "run", 1).glob("*.log"):  # those of killed processes too are cut to what was written
        assert log.stat().st_size % order_log.PIECE, log


@pytest.mark.parametrize(("scheme", "servers"), [(FrailAsync, 1), (FrailAsync, 2), (FrailSync, 1)])
def test_a_return_to_a_checkpoint_is_repeated_too(scheme: Any, servers: int, tmp_path: Path) -> None:
    victims = ["worker:1", "chief"] if servers == 1 else ["server:1", "server:0"]  # who performs the calls
    story = shoot(tmp_path, scheme, victims, servers=servers)
    assert story.result is not None
    assert story.result.rolled_back_updates
    told = replay(story.directory.path, scheme=scheme(victim=str(tmp_path / "nobody")))
    assert told.match, told.difference
    assert told.digest == story.result.digest


def test_changes_by_hooks_and_another_rule(tmp_path: Path) -> None:
    hooks = ["learning-rate:kind=step,base=0.1,over=40,every=10,gamma=0.5"]
    story = recorded(tmp_path / "run", "agn", ("worker:1",), hooks=hooks, hyper={"rule": "momentum", "window": 3})
    assert story.result is not None
    assert replay(tmp_path / "run").match


def test_a_run_that_went_on(tmp_path: Path) -> None:
    recorded(tmp_path / "run", "downpour", steps=80)
    (tmp_path / "run.gate").unlink()  # the next one has a death to wait for
    story = recorded(tmp_path / "run", "downpour", ("worker:1",), steps=200, resume=True)
    assert story.result is not None
    told = replay(tmp_path / "run")
    assert told.match, told.difference
    assert (told.updates, told.digest) == (200, story.result.digest)
    assert 80 in told.checkpoints


def test_until_gives_the_state_of_that_update(calm: Path) -> None:
    steps = checkpoint.steps(calm / "checkpoints")
    for step in steps[1:]:
        told = replay(calm, until=step)
        saved = checkpoint.find(calm / "checkpoints", step)
        assert saved is not None
        assert told.updates == step
        assert told.digest == digest(checkpoint.load(saved).tensors["model"])
    with pytest.raises(UsageError, match=f"the record ends at update {STEPS}; there is no update {STEPS + 1} in it"):
        replay(calm, until=STEPS + 1)
    assert replay(calm, until=0).digest == digest(checkpoint.load(calm / "checkpoints" / "0000000000").tensors["model"])


def test_what_if(calm: Path) -> None:
    same = replay(calm, what_if={"lr": 0.1})
    assert same.digest == json.loads((calm / "result.json").read_text())["digest"]
    late, early = replay(calm, what_if={"lr": 0.0}, since=40), replay(calm, until=40)
    assert late.updates == STEPS
    assert torch.equal(late.vector, early.vector)  # a rate of 0 leaves x as it is, whatever is pushed
    assert set(late.metrics) == {"loss", "accuracy"}
    with pytest.raises(UsageError, match="no hyper-parameter"):
        replay(calm, what_if={"rate": 1})


def test_the_first_step_that_differs(spoilt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    push = AsyncSGD.methods["push"]
    original = push.function

    def other(self: Any, s: Any, g: Any, v: int) -> None:
        original(self, s, g * (1 + 1e-6) if s.v == 50 else g, v)

    monkeypatch.setattr(push, "function", other)
    told = replay(spoilt)
    assert not told.match
    assert told.difference is not None
    assert 50 <= told.difference.update <= 50 + order_log.SELDOM  # by a loss, or by the next checksum
    assert told.hints == ["the versions, the threads, the kind of CPU and the data are the same: the code may differ"]
    monkeypatch.setattr(fingerprint, "versions", lambda threads, device: {"torch": "9.9", "threads": 8})
    assert any("torch was" in hint and "is 9.9" in hint for hint in replay(spoilt).hints)


def test_other_data(calm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = build.task_of("digits-mlp", {})
    assert isinstance(task, TorchTask)
    assert task.train.tensors is not None
    images, labels = task.train.tensors
    task.train = Samples((images.flip(0), labels.flip(0)), "train")
    monkeypatch.setattr(discovery, "task", lambda _: task)
    told = replay(calm)
    assert not told.match
    assert told.hints == ["the data are not those of the run"]


def killed_at(log: Path, size: int) -> None:
    """The log of a process that was killed at this byte, with a launcher that was killed too: room lies behind it."""
    log.write_bytes(log.read_bytes()[:size] + bytes(-size % order_log.PIECE + order_log.PIECE))


@pytest.mark.parametrize("name", ["server-1.log", "worker-1-1.log", "about.json"])
@pytest.mark.parametrize("damage", ["altered", "shortened by a frame", "gone"])
def test_a_record_with_other_sums_than_those_of_its_end_is_refused(name: str, damage: str, spoilt: Path) -> None:
    path = place(spoilt, 1) / name
    content = path.read_bytes()
    path.unlink() if damage == "gone" else path.write_bytes(
        content[:-7] if damage != "altered" else content[:-1] + b"x"
    )
    with pytest.raises(DataError, match=f"order/001/{name} is (missing|not what was written)"):
        replay(spoilt)


class TestLogsThatAreNotWhole:
    """Of a run whose launcher was killed too, so that no sums of its end were noted."""

    @pytest.fixture(autouse=True)
    def _no_end(self, spoilt: Path) -> None:
        (spoilt / file_sums.FILE).unlink()

    def test_a_cut_log_is_repeated_as_far_as_it_goes(self, spoilt: Path) -> None:
        log = place(spoilt, 1) / "server-1.log"
        killed_at(log, log.stat().st_size - 700)
        told = replay(spoilt)
        assert told.match
        assert told.cut
        assert STEPS // 2 < told.updates < STEPS

    def test_a_workers_cut_log(self, spoilt: Path) -> None:
        log = place(spoilt, 1) / "worker-1-1.log"
        killed_at(log, log.stat().st_size // 2)
        told = replay(spoilt)
        assert told.match
        assert told.cut
        assert told.updates < STEPS

    @pytest.mark.parametrize("content", [b"", bytes(order_log.PIECE)])
    def test_of_who_was_killed_while_it_made_its_own(self, spoilt: Path, content: bytes) -> None:
        for name in ("worker-1-2.log", "server-2.log"):
            (place(str(spoilt), 1) / name).write_bytes(content)
        assert replay(spoilt).match

    @pytest.mark.parametrize("name", ["server-1.log", "worker-1-1.log"])
    def test_cut_off_by_something_else_than_a_death(self, spoilt: Path, name: str) -> None:
        log = place(spoilt, 1) / name
        log.write_bytes(log.read_bytes()[:-3])
        with pytest.raises(DataError, match=f"{name} is not what was written"):
            replay(spoilt)

    def test_altered(self, spoilt: Path) -> None:
        log = place(spoilt, 1) / "server-1.log"
        content = bytearray(log.read_bytes())
        content[len(content) // 2] ^= 1
        log.write_bytes(content)
        with pytest.raises(DataError, match=r"server-1\.log is not what was written"):
            replay(spoilt)

    def test_of_another_version(self, spoilt: Path) -> None:
        about = place(spoilt, 1) / order_log.ABOUT
        about.write_text(json.dumps(json.loads(about.read_text()) | {"format": 0}))
        with pytest.raises(DataError, match="is of format 0; this version of paceline reads 1"):
            replay(spoilt)

    def test_missing(self, spoilt: Path) -> None:
        (place(spoilt, 1) / "worker-1-1.log").unlink()
        with pytest.raises(DataError, match="log of worker 1 is missing"):
            replay(spoilt)
        shutil.rmtree(spoilt / "order")
        with pytest.raises(DataError, match="has no order log"):
            replay(spoilt)


def test_a_changed_result_is_noticed(spoilt: Path) -> None:
    told = json.loads((spoilt / "result.json").read_text())
    RunDirectory(spoilt).write_result(told | {"digest": "0" * 64})
    found = replay(spoilt)
    assert not found.match
    assert found.difference is not None
    assert found.difference.where == "the end"


def test_hogwild_says_why_not(tmp_path: Path) -> None:
    run(tmp_path / "run", "digits-mlp", "hogwild", workers=2, steps=30)
    with pytest.raises(UsageError, match=r"hogwild has no order.*its atomic form is `async`"):
        replay(tmp_path / "run")


class Doubled(Hook):
    """Gives other batches than the task does."""

    def feed(self, session: Session, batch: Batch) -> Batch:
        return Batch(tuple(torch.cat([part, part]) for part in batch.data), 2 * batch.size, batch.seed)


def test_hooks_that_change_batches(tmp_path: Path) -> None:
    recorded(tmp_path / "run", "async", hooks=[Doubled()], steps=30)
    with pytest.raises(UsageError, match=r"hooks have changed the run's batches \(Doubled\)"):
        replay(tmp_path / "run")


def test_without_a_record(tmp_path: Path) -> None:
    recorded(tmp_path / "run", "async", record=False, steps=30)
    assert not (tmp_path / "run" / "order").exists()
    with pytest.raises(DataError, match="has no order log: it was run with --no-record"):
        replay(tmp_path / "run")


def test_objects_have_to_be_given_again(tmp_path: Path) -> None:
    recorded(tmp_path / "run", AsyncSGD(lr=0.2), steps=30)
    with pytest.raises(UsageError, match=r"given its scheme as an object.*paceline.replay\(run, scheme=…\)"):
        replay(tmp_path / "run")
    assert replay(tmp_path / "run", scheme=AsyncSGD(lr=0.2)).match
    assert not replay(tmp_path / "run", scheme=AsyncSGD(lr=0.3)).match


def test_the_repeated_model_is_the_one_that_loads(calm: Path) -> None:
    model = load(calm)
    weights = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    assert torch.equal(weights, replay(calm).vector)


@dataclass(frozen=True)
class Doomed(Scheme, name="doomed"):
    """Worker 1 kills the chief, which is a step behind, and itself in the middle of its next step."""

    folder: str = ""
    at: int = 6

    def worker(self, x0: Vector, workers: int) -> State:
        return State(x=x0)

    async def step(self, w: Worker) -> None:
        pid, mark = Path(self.folder, "pid"), Path(self.folder, "struck")
        if w.rank == 0 and w.t == self.at - 1 and not mark.exists():
            pid.write_text(str(os.getpid()))
        if w.rank == 1 and w.t == self.at and not mark.exists():
            mark.touch()
            os.kill(int(pid.read_text()), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        g = await w.grad(w.x)
        mean = await w.mean(g)
        if w.rank == 0 and w.t == self.at - 1 and not mark.exists():
            await w.sleep(60)
        w.x -= 0.1 * mean
        w.v += 1


@dataclass
class StopsWhenBack(Hook):
    """The chief's second life ends the run, after the update that worker 1 had made before."""

    mark: Path

    def begin(self, session: Session) -> None:
        if session.worker.rank == 0 and self.mark.exists():
            session.stop("enough")


def test_an_update_that_was_lost_with_all_workers_is_not_compared(tmp_path: Path) -> None:
    """It is lost if the chief is back before worker 1, which is chance: the run is made again until it was."""
    for attempt in range(5):
        place = tmp_path / str(attempt)
        place.mkdir()
        scheme, hooks = Doomed(folder=str(place)), [StopsWhenBack(place / "struck")]
        story = run(place / "run", "digits-mlp", scheme, workers=2, steps=30, hooks=hooks)
        assert story.error is None, story.logs()
        assert story.result is not None
        assert story.result.restarts == 2
        assert story.result.updates >= scheme.at  # more, if worker 1 has trained alone before the chief was back
        told = replay(place / "run", scheme=scheme)
        assert told.match, told.difference
        assert told.digest == story.result.digest
        history = order_history.read_all(place / "run")[0]
        first = next(life for life in history.lives if (life.rank, life.number) == (1, 1))
        if history.abandoned(first, 0, scheme.at):
            return
    raise AssertionError("the chief was never back before worker 1")
