"""`batched`: gradients in flight are computed at once. Times and orders are those of single gradients, values close."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from small_models import DATA, net, normed, task
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

from paceline import Hook, simulate
from paceline.compute_times import Exponential, parse_times
from paceline.config import build
from paceline.errors import LossError, UsageError
from paceline.ops import Grad
from paceline.rules import SGD, Momentum
from paceline.sampling import Stream, permute
from paceline.schemes.async_ import AsyncSGD
from paceline.simulator.cost import Cost, parse_link
from paceline.simulator.engine import SimulationEngine
from paceline.simulator.faults import parse_fault
from paceline.simulator.gradients import GradientsInFlight
from paceline.state import State
from paceline.task import GradientBlock
from paceline.tasks.cnn import grey_net
from paceline.torch_task import TorchTask, many_gradients
from paceline.torch_task.drawn_together import GatheredBatches, StackedBatches
from paceline.torch_task.index_tables import IndexTable, permuted
from paceline.worker import Worker


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """As `simulate` has it: small blocks gain nothing from more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Course:
    """What happened in a run: the moment, update, worker, loss of every gradient."""

    def __init__(self, engine: SimulationEngine) -> None:
        self.order: list[tuple[Any, ...]] = []
        self.losses: list[float] = []
        taken, engine._lane = engine._drawn.take, None

        def take(seat: Any, op: Grad) -> Any:
            found = taken(seat, op)
            self.order.append((engine.now, engine.updates, seat.worker.rank, seat.worker.t, seat.gradients, found.size))
            self.losses.append(found.loss)
            return found

        engine._drawn.take = take  # type: ignore[method-assign]


def course(job: Any, scheme: str, hyper: dict[str, Any], *, batched: bool, steps: int = 20, **settings: Any) -> Any:
    faults = [parse_fault(text) for text in settings.pop("faults", ())]
    cost = Cost(
        compute_law=parse_times(settings.pop("compute", "exponential:1")),
        network=parse_link(settings.pop("network", "")),
        access=parse_times("exponential:0.3"),
        speeds=settings.pop("speeds", ()),
    )
    chosen = build.scheme_of(scheme, hyper)
    engine = SimulationEngine(job, chosen, seed=3, cost=cost, faults=faults, batched=batched, **settings)
    seen = Course(engine)
    engine.run(steps)
    return engine, seen


def assert_same(job: Any, scheme: str, hyper: dict[str, Any], tolerance: float = 1e-4, **settings: Any) -> None:
    (one, alone), (other, at_once) = (
        course(job, scheme, hyper, batched=batched, **dict(settings)) for batched in (False, True)
    )
    assert alone.order == at_once.order
    assert one.now == other.now
    assert one.events == other.events
    assert one.staleness == other.staleness
    assert (one.gradients, one.samples, one.updates) == (other.gradients, other.samples, other.updates)
    assert one.accounts == other.accounts
    np.testing.assert_allclose(alone.losses, at_once.losses, rtol=tolerance)
    for seat, twin in zip(one.seats, other.seats, strict=True):
        for name in seat.worker.state:
            torch.testing.assert_close(
                seat.worker.state.cell(name), twin.worker.state.cell(name), rtol=tolerance, atol=tolerance
            )
    torch.testing.assert_close(one.centre.x, other.centre.x, rtol=tolerance, atol=tolerance)


@dataclass(frozen=True)
class Several(AsyncSGD):
    """Three gradients of a worker in flight."""

    async def step(self, w: Worker) -> None:
        w.x, w.v = await self.pull()
        begun = [await w.start(w.grad(w.x * (1 + k))) for k in range(3)]
        for one in begun:
            await self.push(await one, w.v)


SCHEMES = [
    ("async", {"lr": 0.05}),
    ("async", {"rule": "adam", "lr": 0.01}),
    ("sync", {}),
    ("allreduce", {}),
    ("averaging", {"window": 3}),
    ("downpour", {"n_push": 2, "n_fetch": 3}),
    ("agn", {"window": 3}),
    ("adag", {"window": 2}),
    ("dynsgd", {}),
    ("easgd", {}),
    ("aeasgd", {"window": 2}),
    ("aeamsgd", {"window": 2, "delta": 0.5}),
    ("hogwild", {"chunks": 4, "lr": 0.05}),
    ("groups", {}),
    ("sync-repeat", {}),
]


@pytest.mark.parametrize(("scheme", "hyper"), SCHEMES, ids=lambda one: one if isinstance(one, str) else "")
def test_times_and_orders_are_those_of_single_gradients(scheme: str, hyper: dict[str, Any]) -> None:
    assert_same(task(), scheme, hyper, workers=6)


@pytest.mark.parametrize(("scheme", "hyper"), SCHEMES[:4], ids=lambda one: one if isinstance(one, str) else "")
def test_equal_times_are_settled_as_with_single_gradients(scheme: str, hyper: dict[str, Any]) -> None:
    assert_same(task(), scheme, hyper, workers=6, compute="constant:1", steps=40)


def small_images(**options: Any) -> TorchTask:
    generator = torch.Generator().manual_seed(4)
    images = torch.randint(0, 256, (40, 28, 28), generator=generator, dtype=torch.uint8)

    def prepare(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return images.unsqueeze(1).float() / 255, labels

    data = (images, torch.arange(40) % 10)
    return TorchTask(lambda: grey_net(0.5), cross_entropy, data, batch=2, prepare=prepare, **options)


def test_the_convolutional_network_with_dropout_draws_the_same_masks() -> None:
    assert_same(small_images(), "async", {"lr": 0.02}, tolerance=1e-3, workers=3, steps=5)


def test_digits_with_a_network_between_workers_and_server() -> None:
    job = build.task_of("digits-mlp", {})
    assert_same(job, "async", {"lr": 0.05}, workers=9, steps=60, network="latency=0.1,bandwidth=1e6")


def state_of(engine: SimulationEngine) -> list[Any]:
    """All counts of a run."""
    assert engine.scheduler is not None
    seats = [
        (seat.worker.t, seat.worker.v, seat.gradients, seat.samples, seat.issued, seat.awaits) for seat in engine.seats
    ]
    ledger = [engine.scheduler.ledger.cells.cell(name).tolist() for name in engine.scheduler.ledger.cells]
    return [engine.now, engine.events, engine.gradients, engine.samples, engine.updates, engine.scheduler.calls,
            engine.staleness, seats, ledger]  # fmt: skip


UNEQUAL = (1.0, 2.0, 0.3, *[1.0] * 9)


@pytest.mark.parametrize(
    ("compute", "speeds"),
    [("constant:1", ()), ("constant:1", UNEQUAL), ("exponential:1", UNEQUAL), ("uniform:0.5,1.5", ())],
)
def test_many_pushes_and_pulls_at_once_leave_the_engine_as_single_ones_do(compute: str, speeds: Any) -> None:
    cost = Cost(compute_law=parse_times(compute), speeds=speeds)
    alone, at_once = (
        SimulationEngine(task(), build.scheme_of("async", {}), workers=12, seed=5, cost=cost, batched=batched)
        for batched in (False, True)
    )
    assert at_once._lane is not None
    seen: tuple[list[Any], list[Any]] = ([], [])
    calls = []
    at_once._drawn.take = lambda *given, take=at_once._drawn.take: calls.append(1) or take(*given)  # type: ignore
    for run, told in zip((alone, at_once), seen, strict=True):
        run.run(31)
        told.append(state_of(run))
        run.run(150, seconds=9.25)  # ends by its time, or by its updates
        told.append(state_of(run))
        run.run(240, watch=lambda run, told=told: told.append((run.updates, run.now)), watch_every=60)
        in_lane = run.gradients - len(calls)
        told.append(state_of(run))
        if compute == "constant:1":
            run.run(park_at=25)
            told.append(state_of(run))
    assert [one for one in seen[0] if not isinstance(one, tuple) or one[0] in (60, 120, 180, 240)] == [
        one for one in seen[1] if not isinstance(one, tuple) or one[0] in (60, 120, 180, 240)
    ]
    assert in_lane > 120  # of 240 and some: most did not go through an event
    torch.testing.assert_close(alone.centre.x, at_once.centre.x, rtol=1e-4, atol=1e-5)
    for seat, twin in zip(alone.seats, at_once.seats, strict=True):
        torch.testing.assert_close(seat.worker.x, twin.worker.x, rtol=1e-4, atol=1e-5)
        assert seat.worker.loss == pytest.approx(twin.worker.loss, rel=1e-4)
    assert alone.loss == pytest.approx(at_once.loss, rel=1e-4)


@pytest.mark.parametrize(
    ("scheme", "settings"),
    [
        (build.scheme_of("async", {"rule": "momentum"}), {}),
        (build.scheme_of("async", {"rule": "sgd", "rule.weight_decay": 0.1}), {}),
        (build.scheme_of("async", {"lr": "cosine:0.1,over=100"}), {}),
        (build.scheme_of("sync", {}), {}),
        (Several(), {}),
        (build.scheme_of("async", {}), {"servers": 2}),
        (build.scheme_of("async", {}), {"checkpoint_every": 5}),
        (build.scheme_of("async", {}), {"cost": Cost(network=parse_link("latency=0.1"))}),
    ],
)
def test_other_runs_have_an_event_for_each_call(scheme: Any, settings: dict[str, Any]) -> None:
    given = {"workers": 3, "seed": 0, "cost": Cost(), "batched": True} | settings
    assert SimulationEngine(task(), scheme, **given)._lane is None


def test_hooks_are_called_for_each_gradient() -> None:
    seen: list[Any] = []
    simulate(task(), "async", workers=4, steps=40, hooks=[Watcher(seen)], batched=True)
    assert len(seen) == 80


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_row_of_updates_is_the_updates_one_by_one(device: str) -> None:
    """`meta` takes the way of a GPU, here on the CPU."""
    x, gradients = torch.randn(50), torch.randn(9, 50)
    state, expected = State(x=x), []
    for g in gradients:
        SGD().apply(state, g, 0.1)
        expected.append(state.x.clone())
    start = x if device == "cpu" else Elsewhere(x)
    found = SGD().row(start, gradients, 0.1)
    assert found is not None
    torch.testing.assert_close(found, torch.stack(expected))
    assert SGD(weight_decay=0.1).row(x, gradients, 0.1) is None
    assert Momentum().row(x, gradients, 0.1) is None


class Elsewhere(Tensor):
    """Says that it is on another device."""

    @property
    def device(self) -> Any:
        return torch.device("meta")


@pytest.mark.parametrize("feed", ["shared", "shard", "slice"])
def test_every_feed(feed: Any) -> None:
    assert_same(task(feed=feed, batch=17), "async", {}, workers=7, steps=40)


class Rows(Dataset[Any]):
    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> Any:
        return DATA[0][index] + 0.1 * torch.rand(()), DATA[1][index]


KINDS = {
    "noise in prepare": lambda: task(prepare=lambda x, y: (x + 0.1 * torch.rand_like(x), y)),
    "a data set that draws": lambda: TorchTask(net, cross_entropy, Rows(), batch=4),
    "a loader": lambda: TorchTask(net, cross_entropy, DataLoader(Rows(), batch_size=4, shuffle=True)),
    "clipped": lambda: task(clip=0.1),
    "double": lambda: task(dtype=torch.float64),
    "mixed precision": lambda: task(autocast=torch.bfloat16),
    "tied": lambda: task(model=Tied),
    "frozen": lambda: task(model=frozen),
    "by name": lambda: TorchTask(Named, None, {"x": DATA[0], "y": DATA[1]}, batch=4),
    "whole batch in prepare": lambda: task(prepare=lambda x, y: (x - x.mean(0), y)),
}


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.out = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 3)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.b(torch.tanh(self.a(x)))))


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"loss": cross_entropy(self.net(x), y)}


def frozen() -> nn.Module:
    model = net()
    model[0].bias.requires_grad_(False)
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_tasks_of_every_kind(kind: str) -> None:
    assert_same(KINDS[kind](), "async", {}, tolerance=2e-2 if kind == "mixed precision" else 1e-4, workers=5, steps=25)


def test_samples_in_memory_are_gathered_and_others_stacked() -> None:
    assert isinstance(task().batched(3, 0)._batches, GatheredBatches)
    assert isinstance(KINDS["whole batch in prepare"]().batched(3, 0)._batches, GatheredBatches)
    for kind in ("noise in prepare", "a data set that draws", "a loader"):
        assert isinstance(KINDS[kind]().batched(3, 0)._batches, StackedBatches)


FAULTS = [
    ["kill:1@step=2,back=3"],
    ["kill:0@time=2.5,back=1", "stop:2@update=5,for=4"],
    ["kill:server:0@call=20,back=1"],
    ["partition:1@time=2,for=3", "delay:2@time=1,by=0.5,for=4"],
    ["random:seed=7,count=6"],
]


@pytest.mark.parametrize(("faults", "servers"), [*((one, 1) for one in FAULTS[:3]), *((one, 2) for one in FAULTS[3:])])
def test_faults_and_virtual_checkpoints(faults: list[str], servers: int) -> None:
    results = [
        simulate(
            task(), "agn", workers=4, steps=30, compute="exponential:1", faults=faults, servers=servers, seed=2,
            checkpoint_steps=8, batched=batched,
        )
        for batched in (False, True)
    ]  # fmt: skip
    one, other = (dataclasses.replace(one, batched=False, vector=torch.zeros(1), metrics={}) for one in results)
    assert repr(one) == repr(other)
    assert one.fates == other.fates
    torch.testing.assert_close(results[0].vector, results[1].vector, rtol=1e-4, atol=1e-5)


def test_several_gradients_of_one_worker_in_flight() -> None:
    """Their batches go by the order in which they are due, not by that of their starts."""
    cost = Cost(compute_law=Exponential(1.0))
    runs = []
    for batched in (False, True):
        engine = SimulationEngine(task(), Several(lr=0.05), workers=4, seed=1, cost=cost, batched=batched)
        seen = Course(engine)
        engine.run(60)
        runs.append((engine, seen))
    assert runs[0][1].order == runs[1][1].order
    np.testing.assert_allclose(runs[0][1].losses, runs[1][1].losses, rtol=1e-4)
    torch.testing.assert_close(runs[0][0].centre.x, runs[1][0].centre.x)


class Watcher(Hook):
    def __init__(self, seen: list[Any]) -> None:
        self.seen = seen

    def after_gradient(self, session: Any, loss: float) -> None:
        self.seen.append((session.worker.rank, session.updates, session.seconds, round(loss, 3)))
        norm = session.gradient_norm()
        self.seen.append(None if norm != norm else round(norm, 3))


def test_hooks_see_the_same_losses_norms_and_moments() -> None:
    seen: tuple[list[Any], list[Any]] = ([], [])
    for batched, told in zip((False, True), seen, strict=True):
        simulate(task(), "async", workers=4, steps=20, compute="exponential:1", hooks=[Watcher(told)], batched=batched)
    assert seen[0] == seen[1]
    assert len(seen[0]) >= 40


def test_a_loss_that_is_not_finite_ends_the_run_where_it_is_due() -> None:
    told = []
    for batched in (False, True):
        with pytest.raises(LossError) as caught:
            simulate(task(), "async", workers=3, steps=200, lr=3e38, batched=batched)
        told.append(str(caught.value))
    assert told[0] == told[1]


class Drawing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x + torch.randn_like(x))


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) if x.sum().item() > 0 else self.net(-x)


class Feeding(Hook, name="feeding"):
    def feed(self, session: Any, batch: Any) -> Any:
        return batch


@pytest.mark.parametrize(
    ("job", "settings", "why"),
    [
        ("toy", {}, "task 'toy' computes its gradients one by one; omit batched"),
        (task(normed), {}, "has buffers that a gradient may change, such as those of BatchNorm"),
        (task(Drawing), {}, "its model draws random numbers otherwise than by dropout"),
        (task(Branching), {}, "cannot run under torch.func.vmap"),
        (task(compile=True), {}, "is compiled, and batched runs its model by vmap"),
        (task(), {"exact": True}, "an exact run has the bits of single gradients"),
        (task(), {"hooks": [Feeding()]}, "the hook 'feeding' changes a batch"),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_what_cannot_be_batched_is_refused(job: Any, settings: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        simulate(job, "sync", workers=2, steps=5, batched=True, **settings)


def test_a_result_says_that_it_was_batched() -> None:
    result = simulate(task(), "async", workers=4, steps=8, batched=True)
    assert result.batched
    assert result.as_dict()["batched"] is True
    assert ("gradients in flight", "computed at once") in list(result.rows())
    assert "batched" not in simulate(task(), "async", workers=4, steps=8).as_dict()


def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(UsageError, match="device must be cpu, cuda or cuda:K"):
        simulate(task(), "async", device="tpu")
    if not torch.cuda.is_available():
        with pytest.raises(UsageError, match="torch finds no GPU here"):
            simulate(task(), "async", device="cuda")


def test_the_course_does_not_depend_on_the_size_of_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = simulate(task(), "async", workers=9, steps=50, batched=True)
    for room in (1, 40_000, 100_000):
        monkeypatch.setattr(many_gradients, "CPU_BYTES", room)
        cut = simulate(task(), "async", workers=9, steps=50, batched=True)
        assert cut.staleness == whole.staleness
        torch.testing.assert_close(cut.vector, whole.vector)


def test_a_block_that_finds_no_memory_is_halved(monkeypatch: pytest.MonkeyPatch) -> None:
    many = task().batched(8, 0)
    plain, sizes = many._at, []

    def scarce(points: Tensor, *rest: Any) -> Any:
        sizes.append(len(points))
        if len(points) > 3:
            raise torch.OutOfMemoryError("out of memory")
        return plain(points, *rest)

    points = torch.stack([task().start(k) for k in range(8)])
    expected = many.compute(points, list(range(8)), [2] * 8)
    monkeypatch.setattr(many, "_at", scarce)
    found = many.compute(points, list(range(8)), [2] * 8)
    assert sizes == [8, 4, 2, 2, 2, 2]
    assert torch.equal(torch.tensor(found.sizes), torch.tensor(expected.sizes))
    torch.testing.assert_close(found.gradients, expected.gradients)
    torch.testing.assert_close(found.losses, expected.losses)


class Counting:
    """Gradients that are all ones, and the sizes of the blocks that were asked for."""

    def __init__(self, room: int = 100) -> None:
        self.room, self.blocks = room, []

    def capacity(self) -> int:
        return self.room

    def compute(self, points: Tensor, ranks: Any, numbers: Any) -> GradientBlock:
        self.blocks.append(len(ranks))
        return GradientBlock(torch.zeros(len(ranks)), torch.ones_like(points), [1] * len(ranks))


@pytest.mark.parametrize(("steps", "blocks"), [(12, [4, 4, 4]), (10, [4, 4, 2]), (3, [3])])
def test_one_call_serves_all_workers_and_nothing_is_computed_for_later(steps: int, blocks: list[int]) -> None:
    engine = SimulationEngine(task(), build.scheme_of("async", {}), workers=4, seed=0, cost=Cost())
    counting = Counting()
    engine._drawn = GradientsInFlight(counting, 4, engine._useful)
    engine.run(steps)
    assert counting.blocks == blocks


def test_the_memory_of_a_block_is_not_kept_by_one_slow_worker() -> None:
    engine = SimulationEngine(
        task(), build.scheme_of("async", {}), workers=8, seed=0, cost=Cost(speeds=(*[1.0] * 7, 0.01))
    )
    engine._drawn = flight = GradientsInFlight(Counting(), 8, engine._useful)
    engine.run(20)
    slow = [one for one in flight._ready.values() if one.begun.seat.worker.rank == 7]
    assert [one.gradient.g._base for one in slow] == [None]


@pytest.mark.parametrize("n", [1, 2, 7, 60, 1437, 60_000])
def test_the_orders_of_many_workers_are_those_of_their_streams(n: int) -> None:
    rng = np.random.default_rng(n)
    for feed, shuffle, drop_last in (("shared", True, False), ("shared", False, False), ("shared", True, True)):
        batch = min(9, n)
        streams = [Stream(n, batch, feed, shuffle, rank, 5, 3, drop_last=drop_last) for rank in range(5)]  # type: ignore[arg-type]
        table = IndexTable(streams, torch.device("cpu"))
        for _ in range(6):
            places, numbers = rng.permutation(5)[:3], rng.integers(0, 60, 3)
            found = table.indices(places, numbers).numpy()
            assert (found == [streams[p].indices(int(k)) for p, k in zip(places, numbers, strict=True)]).all()


def test_the_permutation_of_a_gpu_is_that_of_the_cpu() -> None:
    for n in (1, 5, 1437, 60_000, 10_000_019):
        places = np.arange(min(n, 2000), dtype=np.uint64)
        keys = np.random.default_rng(n).integers(0, 1 << 63, len(places), np.uint64)
        found = permuted(torch.from_numpy(places.astype(np.int64)), n, torch.from_numpy(keys.astype(np.int64)))
        assert (found.numpy() == permute(places, n, keys).astype(np.int64)).all()
