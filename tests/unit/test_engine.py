"""The simulator's machine room: order of events, overlap, faults, and what it says when nothing can go on."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline import TorchTask, simulate
from paceline.errors import Deadlock, LossError, RunError, SchemeError, UsageError
from paceline.scheme import Scheme, State, Vector, on_server
from paceline.sim.cost import Cost, Exponential, Times, parse_link, parse_times
from paceline.sim.engine import Engine
from paceline.sim.faults import Fault
from paceline.task import Batch, Task
from paceline.tasks.quadratic import quadratic
from paceline.worker import Worker

HERE = Path(__file__).name
Step = Callable[[Any, Worker], Any]


def engine(
    scheme: Scheme,
    *,
    workers: int = 2,
    compute: str = "constant:1.0",
    network: str = "",
    faults: Sequence[Fault] = (),
    shrink: bool = True,
    task: Task | None = None,
    **cost: Any,
) -> Engine:
    task = task or quadratic(dim=4)
    prices = Cost(parse_times(compute), parse_link(network), **cost)
    return Engine(task, scheme, workers=workers, seed=0, cost=prices, faults=faults, shrink=shrink)


def server_of(**cells: Any) -> Any:
    return lambda self, x0, workers: State(x=x0, **cells)


@dataclass(frozen=True)
class Logging(Scheme, name="logging"):
    """Has a push, a wait with a guard, and remembers who called."""

    def server(self, x0: Vector, workers: int) -> State:
        return State(x=x0, log=torch.full((64,), -1), got=0, open=0)

    def worker(self, x0: Vector, workers: int) -> State:
        return State(x=x0, begun=0, done=0)

    @on_server
    def push(self, s: State, g: Vector, who: int) -> None:
        s.log[s.got] = who
        s.got += 1
        s.x -= 0.1 * g
        s.v += 1

    @on_server
    def pull(self, s: State) -> Vector:
        x: Vector = s.x
        return x

    @on_server(when=lambda self, s, r: s.open >= r)
    def wait(self, s: State, r: int) -> None: ...

    @on_server(when=lambda self, s: s.v > 100)
    def never(self, s: State) -> None: ...


def scheme_with(step: Step) -> Scheme:
    @dataclass(frozen=True)
    class Mine(Logging, name="mine"):
        async def step(self, w: Worker) -> None:
            await step(self, w)

    return Mine()


def line_of(mark: str) -> str:
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    return f"{HERE}:{1 + next(n for n, text in enumerate(lines) if text.endswith(f'# {mark}'))}"


def log(run: Engine) -> list[int]:
    kept: list[int] = run.centre.log[: run.centre.got].tolist()
    return kept


async def push_once(self: Any, w: Worker) -> None:
    g = await w.grad()
    await self.push(g, w.rank)


# order


def test_equal_times_are_settled_by_rank() -> None:
    run = engine(scheme_with(push_once), workers=4)
    run.run(12)
    assert log(run) == [0, 1, 2, 3] * 3
    assert run.now == 3.0


def test_earlier_comes_first_whatever_the_rank() -> None:
    run = engine(scheme_with(push_once), workers=3, speeds=(1.0, 1.25, 2.0))
    run.run(6)
    assert log(run) == [2, 1, 0, 2, 2, 1]  # at 0.5, 0.8, 1.0, 1.0, 1.5, 1.6: rank 0 before rank 2


def test_equal_times_of_one_worker_keep_their_order() -> None:
    async def step(self: Any, w: Worker) -> None:
        g = await w.grad()
        pending = [await w.start(self.push(g, k)) for k in range(5)]
        for one in pending:
            await one

    run = engine(scheme_with(step), workers=1)
    run.run(10)
    assert log(run) == [0, 1, 2, 3, 4] * 2


def test_a_stop_in_time_does_not_reorder_what_comes_at_one_moment() -> None:
    async def step(self: Any, w: Worker) -> None:
        g = await w.grad()
        pending = [await w.start(self.push(g, k)) for k in range(4)]
        for one in pending:
            await one

    whole, halted = (engine(scheme_with(step), network="latency=0.5") for _ in range(2))
    whole.run(24)
    for k in range(1, 60):
        halted.run(24, seconds=0.25 * k)
    assert log(whole) == log(halted)
    assert whole.now == halted.now


def test_what_is_held_back_keeps_its_order() -> None:
    """Messages of different moments, all released at one: first sent, first delivered."""

    async def step(self: Any, w: Worker) -> None:
        pending = []
        for k in range(8):
            g = await w.grad()
            pending.append(await w.start(self.push(g, k)))
        for one in pending:
            await one

    cut = Fault("partition", 0, 0.0, duration=2.7182818)
    run = engine(scheme_with(step), workers=1, compute="constant:0.1", faults=[cut])
    run.run(8)
    assert log(run) == list(range(8))
    assert run.now == 2.7182818


# overlap


def test_a_started_call_overlaps_with_computing() -> None:
    async def overlapped(self: Any, w: Worker) -> None:
        g = await w.grad()
        pending = await w.start(self.push(g, 0))
        await w.grad()
        await pending

    async def in_turn(self: Any, w: Worker) -> None:
        g = await w.grad()
        await self.push(g, 0)
        await w.grad()

    seconds = {}
    for step in (overlapped, in_turn):
        run = engine(scheme_with(step), workers=1, network="latency=0.4")
        run.run(5)
        seconds[step.__name__] = run.now
    assert seconds["in_turn"] == pytest.approx(4 * 2.8 + 1.4)
    assert seconds["overlapped"] == pytest.approx(4 * 2.0 + 1.4)


def test_arguments_are_copied_when_started() -> None:
    async def step(self: Any, w: Worker) -> None:
        await w.grad()
        w.x = 1
        pending = await w.start(self.push(w.x, 0))
        gradient = await w.start(w.grad(w.x))
        mean = await w.start(w.mean(w.x))
        w.x = 100
        await pending
        assert (await gradient).tolist() == [1.0] * 4  # of the quadratic: x itself
        assert (await mean).tolist() == [1.0] * 4
        w.done += 1

    run = engine(scheme_with(step), workers=1, network="latency=0.5")
    start = run.centre.x.clone()
    run.run(2)
    assert run.seats[0].worker.done == 1
    assert torch.allclose(run.centre.x, start - 0.2)


def test_nested_arguments_are_copied_when_started() -> None:
    @dataclass(frozen=True)
    class Pairs(Scheme, name="pairs"):
        @on_server
        def push(self, s: State, both: tuple[Vector, Vector]) -> None:
            s.x = both[0] + both[1]
            s.v += 1

        async def step(self, w: Worker) -> None:
            w.x = 1
            pending = await w.start(self.push((w.x, w.x)))
            w.x = 100
            await w.grad()
            await pending

    run = engine(Pairs(), workers=1)
    run.run(1)
    assert run.centre.x.tolist() == [2.0] * 4


def test_a_pending_that_is_done_costs_no_time() -> None:
    times = []

    async def step(self: Any, w: Worker) -> None:
        pending = await w.start(w.grad())
        await w.sleep(5.0)
        g = await pending
        again = await pending
        assert g is again
        times.append(run.now)
        await self.push(g, 0)

    run = engine(scheme_with(step), workers=1)
    run.run(2)
    assert times == [5.0, 10.0]


def test_sleep_takes_its_time_and_no_more() -> None:
    async def step(self: Any, w: Worker) -> None:
        await w.sleep(0)
        await w.sleep(2.5)
        await self.push(w.x, 0)

    run = engine(scheme_with(step), workers=1)
    run.run(2)
    assert run.now == 5.0


@pytest.mark.parametrize("seconds", [-1.0, math.inf, math.nan])
def test_nobody_sleeps_backwards_or_for_ever(seconds: float) -> None:
    async def step(self: Any, w: Worker) -> None:
        await w.sleep(seconds)

    with pytest.raises(SchemeError, match="give a finite number, at least 0"):
        engine(scheme_with(step)).run(1)


def test_an_operation_that_cannot_be_started() -> None:
    async def step(self: Any, w: Worker) -> None:
        await w.start(await w.start(w.sleep(1)))

    with pytest.raises(SchemeError, match="Pending cannot be started"):
        engine(scheme_with(step)).run(1)


def test_a_call_of_another_scheme_is_refused() -> None:
    async def step(self: Any, w: Worker) -> None:
        await Logging().pull()
        await Other().pull()

    @dataclass(frozen=True)
    class Other(Scheme, name="other"):
        @on_server
        def pull(self, s: State) -> None: ...

    with pytest.raises(SchemeError, match=r"worker:0 called pull\(\), which is not a method of its own scheme"):
        engine(scheme_with(step)).run(1)


# means


def means(weights: Mapping[int, float] | None = None, among: Callable[[int], Any] = lambda rank: None) -> Scheme:
    """Everybody brings rank + 1; `x` is what came back."""

    @dataclass(frozen=True)
    class Means(Scheme, name="means"):
        async def step(self, w: Worker) -> None:
            await w.sleep(w.rank)
            weight = 1.0 if weights is None else weights[w.rank]
            w.x = await w.mean(torch.full((4,), w.rank + 1.0), weight, among(w.rank))
            w.v += 1

    return Means()


def got(run: Engine) -> list[float]:
    return [seat.worker.x[0].item() for seat in run.seats]


def test_a_mean_is_everybodys() -> None:
    run = engine(means(), workers=4)
    run.run(park_at=1)
    assert got(run) == [2.5] * 4
    assert run.now == 3.0


def test_members_may_change_their_copies_of_a_mean() -> None:
    @dataclass(frozen=True)
    class Changing(Scheme, name="changing"):
        async def step(self, w: Worker) -> None:
            mean = await w.mean(torch.full((4,), w.rank + 1.0))
            mean += 10 * w.rank
            await w.sleep(1)
            w.x = mean
            w.v += 1

    run = engine(Changing(), workers=3)
    run.run(park_at=1)
    assert got(run) == [2.0, 12.0, 22.0]


def test_a_mean_with_weights() -> None:
    run = engine(means({0: 3.0, 1: 1.0, 2: 0.0}), workers=3)
    run.run(park_at=1)
    assert got(run) == [1.25] * 3


def test_a_mean_within_groups() -> None:
    run = engine(means(among=lambda rank: (0, 1) if rank < 2 else (2, 3)), workers=4)
    run.run(park_at=1)
    assert got(run) == [1.5, 1.5, 3.5, 3.5]


def test_one_weight_is_a_broadcast_bit_for_bit() -> None:
    @dataclass(frozen=True)
    class Broadcast(Scheme, name="broadcast"):
        async def step(self, w: Worker) -> None:
            w.x = torch.rand(4, generator=w.rng)
            w.x = await w.mean(w.x, weight=7.0 if w.rank == 1 else 0.0)
            w.v += 1

    run = engine(Broadcast(), workers=3)
    run.run(park_at=1)
    alone = Worker(1, 3, State(x=torch.zeros(4)), seed=0)
    theirs = torch.rand(4, generator=alone.rng)
    assert all(torch.equal(seat.worker.x, theirs) for seat in run.seats)


def test_all_weights_zero_is_refused() -> None:
    with pytest.raises(SchemeError, match="all 0"):
        engine(means({0: 0.0, 1: 0.0})).run(park_at=1)


def test_wrong_means_are_refused() -> None:
    with pytest.raises(SchemeError, match=r"worker:0 asks for a mean among \(1,\), where it is not a member"):
        engine(means(among=lambda rank: (1,))).run(park_at=1)

    @dataclass(frozen=True)
    class Uneven(Scheme, name="uneven"):
        async def step(self, w: Worker) -> None:
            await w.mean(torch.zeros(1 + w.rank))

    with pytest.raises(SchemeError, match="different lengths"):
        engine(Uneven()).run(park_at=1)

    @dataclass(frozen=True)
    class Twice(Scheme, name="twice"):
        async def step(self, w: Worker) -> None:
            await w.start(w.mean(w.x))
            if w.rank == 0:
                await w.start(w.mean(w.x))
            await w.sleep(1)

    with pytest.raises(SchemeError, match="worker:0 started a mean while its last one with the same members is open"):
        engine(Twice(), network="latency=0.1").run(park_at=2)


# nothing can go on


def test_a_deadlock_names_everybodys_line_and_guard() -> None:
    async def step(self: Any, w: Worker) -> None:
        g = await w.grad()
        await self.push(g, w.rank)
        if w.rank:
            await self.wait(7)  # waits here
        pending = await w.start(self.never())
        await pending  # waits for a pending

    with pytest.raises(Deadlock) as caught:
        engine(scheme_with(step), workers=3).run(10)
    text = str(caught.value)
    assert "deadlock at 1 s, after 3 updates: every living worker waits" in text
    assert f"worker:0 at {line_of('waits for a pending')} for never(): guard 's.v > 100' is false with v = 3" in text
    for rank in (1, 2):
        place = line_of("waits here")
        assert f"worker:{rank} at {place} for wait(r=7): guard 's.open >= r' is false with open = 0" in text


def test_a_deadlock_at_a_mean_names_who_is_missing() -> None:
    @dataclass(frozen=True)
    class Lonely(Logging, name="lonely"):
        async def step(self, w: Worker) -> None:
            if w.rank == 1:
                await self.never()
            await w.mean(w.x)  # the mean

    with pytest.raises(Deadlock) as caught:
        engine(Lonely(), workers=3).run(1)
    assert f"worker:0 at {line_of('the mean')} for mean: 2 of 3 have arrived, missing worker 1" in str(caught.value)


def test_a_deadlock_carries_what_was_reached() -> None:
    async def step(self: Any, w: Worker) -> None:
        g = await w.grad()
        await self.push(g, 0)
        await self.never()

    with pytest.raises(Deadlock) as caught:
        simulate(quadratic(), scheme_with(step), workers=2, steps=10)
    result = caught.value.result
    assert result is not None
    assert (result.updates, result.gradients, result.metrics) == (2, 2, {})


def test_all_dead_is_an_error() -> None:
    faults = [Fault("kill", 0, 1.5), Fault("kill", 1, 2.5)]
    with pytest.raises(RunError, match=r"no worker is left alive at 2\.5 s, after 3 updates") as caught:
        engine(scheme_with(push_once), faults=faults).run(10)
    assert not isinstance(caught.value, Deadlock)


def test_a_scheme_that_never_pushes_is_told_so() -> None:
    async def step(self: Any, w: Worker) -> None:
        await w.sleep(1)

    with pytest.raises(RunError, match="events without a change of the centre: nothing is ever pushed"):
        engine(scheme_with(step), workers=1).run(10)


def test_a_step_without_an_await_is_refused() -> None:
    async def step(self: Any, w: Worker) -> None: ...

    with pytest.raises(SchemeError, match=r"worker:0, step 0: step\(\) ended without awaiting anything"):
        engine(scheme_with(step)).run(1)


def test_a_scheme_without_a_step_is_refused() -> None:
    @dataclass(frozen=True)
    class Stepless(Scheme, name="stepless"): ...

    with pytest.raises(SchemeError, match=r"Stepless has no step\(\)"):
        engine(Stepless()).run(1)


def test_guards_are_not_asked_more_often_with_more_waiting() -> None:
    """What an event costs does not depend on how many wait: counted in evaluations of the guard."""
    counts = []
    for workers in (10, 100):
        asked: list[int] = []

        @dataclass(frozen=True)
        class Barrier(Scheme, name="barrier"):
            def server(self, x0: Vector, workers: int) -> State:
                return State(x=x0, got=0, workers=workers)

            @on_server(when=lambda self, s, r, asked=asked: asked.append(r) or s.v >= r)
            def pull(self, s: State, r: int) -> Vector:
                x: Vector = s.x
                return x

            @on_server
            def push(self, s: State, g: Vector) -> None:
                s.got += 1
                if s.got == s.workers:
                    s.got = 0
                    s.x -= 0.1 * g
                    s.v += 1

            async def step(self, w: Worker) -> None:
                w.x = await self.pull(w.t)
                g = await w.grad()
                await self.push(g)

        run = engine(Barrier(), workers=workers)
        run.run(5)
        counts.append(len(asked) - workers)  # the first pulls do not wait: each asks for itself
    assert counts[0] == counts[1] <= 15


# what survives a crash


def test_locals_do_not_survive_a_crash_but_cells_do() -> None:
    """The trap: after a restart the step begins anew, with the worker's cells and the count of its steps."""
    entries = []

    async def step(self: Any, w: Worker) -> None:
        w.begun += 1
        entries.append((w.t, w.begun, w.done))
        mine = await w.grad()
        w.done += 1
        await self.push(mine, w.rank)

    death = Fault("kill", 0, 4, "await", duration=5.0)  # at its second push
    run = engine(scheme_with(step), workers=1, faults=[death])
    run.run(3)
    assert entries == [(0, 1, 0), (1, 2, 1), (1, 3, 2), (2, 4, 3)]
    assert run.now == 2.0 + 5.0 + 2.0
    assert run.seats[0].worker.begun == 4


def test_a_message_under_way_dies_with_its_sender() -> None:
    death = Fault("kill", 0, 1.05, duration=10.0)
    run = engine(scheme_with(push_once), workers=1, network="latency=0.1", faults=[death])
    run.run(1)
    assert run.now == pytest.approx(1.05 + 10 + 1 + 0.1)


def test_faults_at_a_time_a_step_and_an_await() -> None:
    for fault, moment in (
        (Fault("kill", 1, 2.25), 2.25),
        (Fault("kill", 1, 3, "step"), 3.0),
        (Fault("kill", 1, 5, "await"), 2.0),  # two awaits a step: the fifth is the third gradient
        (Fault("kill", 1, 6, "await"), 3.0),
    ):
        run = engine(scheme_with(push_once), faults=[fault])
        run.run(9)
        assert not run.seats[1].worker.alive
        assert log(run).count(1) == int(moment) - (fault.unit == "await" and fault.when == 6), fault


def test_faults_of_different_units_do_not_wait_for_each_other() -> None:
    faults = [Fault("kill", 0, 50, "step"), Fault("kill", 0, 60, "await", 7.0)]  # await 60 is in step 29
    run = engine(scheme_with(push_once), workers=1, faults=faults)
    with pytest.raises(RunError, match="no worker is left alive at 58 s, after 50 updates"):
        run.run(60)


def test_a_partition_holds_messages_but_not_computing() -> None:
    times: list[float] = []

    async def step(self: Any, w: Worker) -> None:
        g = await w.grad()
        if w.rank == 1:
            times.append(run.now)
        await self.push(g, w.rank)

    run = engine(scheme_with(step), faults=[Fault("partition", 1, 0.5, duration=4.0)])
    run.run(9)
    assert log(run) == [0, 0, 0, 0, 1, 0, 1, 0, 1]  # rank 1's push of 1.0 arrives at 4.5, the next at 5.5
    assert times[:2] == [1.0, 5.5]


def test_a_delay_holds_everything() -> None:
    times: list[float] = []

    async def step(self: Any, w: Worker) -> None:
        g = await w.grad()
        if w.rank == 1:
            times.append(run.now)
        await self.push(g, w.rank)

    run = engine(scheme_with(step), faults=[Fault("delay", 1, 0.5, duration=4.0)])
    run.run(9)
    assert times[:2] == [4.5, 5.5]


def test_dead_workers_are_not_waited_for_unless_the_quorum_holds() -> None:
    run = engine(means(), workers=3, faults=[Fault("kill", 1, 0.5)])
    run.run(park_at=1)
    assert [got(run)[rank] for rank in (0, 2)] == [2.0, 2.0]
    held = engine(means(), workers=3, faults=[Fault("kill", 1, 0.5)], shrink=False)
    with pytest.raises(Deadlock, match="missing worker 1"):
        held.run(1)


def test_the_chiefs_deputy_keeps_the_centre() -> None:
    """Without a server the centre is the chief's; when it dies, the next one's."""
    run = engine(means(), workers=3, faults=[Fault("kill", 0, 2, "step")])
    run.run(5)
    assert run.updates == 5
    assert run.centre is run.seats[1].worker.state


def test_a_parked_worker_that_dies_and_returns_begins_once() -> None:
    run = engine(scheme_with(push_once), workers=2)
    run.run(park_at=2)
    run.kill(1)
    run.restart(1)
    run.run(8)
    assert log(run) == [0, 1, 0, 1, 0, 1, 0, 1]


def test_killing_the_dead_and_waking_the_living_is_nothing() -> None:
    run = engine(scheme_with(push_once), workers=2)
    run.run(2)
    run.restart(1)
    run.kill(1)
    run.kill(1)
    run.run(6)
    assert log(run).count(1) == 1
    assert run.seats[1].generation == 1


# the loss


class Spoilt(Task):
    """The loss is not a number from the third mini-batch on."""

    name = "spoilt"
    batch = 1

    def __init__(self, loss: float = math.nan, batches: int = 10**9, error: Exception | None = None) -> None:
        self.bad, self.number, self.error = loss, batches, error

    def start(self, seed: int) -> Vector:
        return torch.ones(2)

    def batches(self, rank: int, workers: int, seed: int, first: int = 0) -> Iterator[Batch]:
        for number in count(first):
            if number == self.number:
                return
            yield Batch((), 1, number)

    def grad(
        self, x: Vector, batch: Batch, out: Vector | None = None, buffers: Mapping[str, Tensor] | None = None
    ) -> tuple[float, Vector]:
        assert out is not None
        out.copy_(x)
        if batch.seed == 2 and self.error is not None:
            raise self.error
        return (self.bad if batch.seed >= 2 else 1.0), out

    def evaluate(self, x: Vector, buffers: Mapping[str, Tensor] | None = None) -> dict[str, float]:
        return {"loss": float(x.square().sum())}


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_ends_the_run(loss: float) -> None:
    with pytest.raises(LossError, match=f"worker:0, step 2, update 4: the loss is {loss}; a smaller lr") as caught:
        simulate(Spoilt(loss), "async", workers=2, steps=100)
    result = caught.value.result
    assert result is not None
    assert (result.updates, result.gradients) == (4, 4)
    assert torch.isfinite(result.vector).all()
    assert math.isnan(result.loss)


def test_an_error_in_the_task_says_where() -> None:
    with pytest.raises(ZeroDivisionError, match="oh") as caught:
        simulate(Spoilt(error=ZeroDivisionError("oh")), "async", workers=2, steps=100)
    assert caught.value.__notes__ == ["in the gradient of worker:0, step 2"]


def test_a_task_that_runs_dry_says_so() -> None:
    with pytest.raises(RunError, match="worker:0, step 1: the task has no more mini-batches"):
        simulate(Spoilt(batches=1), "async", workers=2, steps=100)


# calls in pieces


def hogwild(chunks: int, speeds: tuple[float, ...] = (2.0, 1.0, 1.0), access: Times | float = 1.0) -> list[list[float]]:
    """What a fast worker reads while slow ones add 1 to every coordinate."""
    reads: list[list[float]] = []

    @dataclass(frozen=True)
    class Torn(Scheme, name="torn"):
        chunks: int = 1

        @on_server(atomic=False)
        def read(self, s: State) -> Vector:
            x: Vector = s.x
            return x

        @on_server(atomic=False)
        def add(self, s: State, g: Vector) -> None:
            s.x += g
            s.v += 1

        async def step(self, w: Worker) -> None:
            await w.sleep(0.3 + 0.1 * w.rank)
            if w.rank:
                await self.add(torch.ones(4))
            else:
                reads.append((await self.read()).tolist())

    task = Spoilt()
    task.start = lambda seed: torch.zeros(4)  # type: ignore[method-assign]
    run = engine(Torn(chunks), task=task, workers=3, access=access, speeds=speeds)
    run.run(20)
    assert len(reads) > 5
    assert run.centre.x[-1] == 20.0  # additions are never lost: a chunk is atomic
    return reads


def test_reads_are_torn_with_several_chunks() -> None:
    """Overtaking a worker that adds, one sees its addition in the first chunks and not in the last."""
    torn = [x for x in hogwild(4) if len(set(x)) > 1]
    assert torn
    assert all(x == sorted(x, reverse=True) for x in torn)


def test_reads_are_whole_with_one_chunk() -> None:
    assert all(len(set(x)) == 1 for x in hogwild(1))


def test_a_pass_takes_as_long_as_the_worker_is_slow() -> None:
    cost = Cost(access=0.5, speeds=(1.0, 2.0))
    assert [cost.pass_over(rank, 2, seed=0) for rank in (0, 1)] == [[0.0, 0.25], [0.0, 0.125]]
    assert Cost(access=0.5).pass_over(3, 5, seed=0) == [0.0, 0.1, 0.2, pytest.approx(0.3), 0.4]


def test_random_passes_tear_reads_of_equally_fast_workers_too() -> None:
    """The default: pieces take exponential times, a pass `access` on average, the same for equal seeds."""
    passes = [Cost().pass_over(0, 10, seed=k) for k in range(2000)]
    assert passes[0] == Cost().pass_over(0, 10, seed=0)
    assert passes[0] != passes[1]
    assert all(one[0] == 0.0 and one == sorted(one) and len(one) == 10 for one in passes)
    assert sum(one[-1] for one in passes) / 2000 == pytest.approx(0.1 * 9 / 10, rel=0.03)
    assert any(len(set(x)) > 1 for x in hogwild(4, speeds=(), access=Exponential(1.0)))


def test_pieces_stay_in_order_when_they_are_held_up() -> None:
    """A delay releases all pieces of a pass at one moment: they are still put together in their order."""

    @dataclass(frozen=True)
    class Reader(Scheme, name="reader"):
        chunks: int = 7

        @on_server(atomic=False)
        def read(self, s: State) -> Vector:
            x: Vector = s.x
            return x

        @on_server
        def push(self, s: State) -> None:
            s.x += 1
            s.v += 1

        async def step(self, w: Worker) -> None:
            w.x = await self.read()
            assert torch.equal(w.x, torch.arange(21.0) + w.t), w.x
            await self.push()

    for k in range(50):
        task = Spoilt()
        task.start = lambda seed: torch.arange(21.0)  # type: ignore[method-assign]
        delay = Fault("delay", 0, 0.01 * k, duration=1.0 + 0.377 * k)
        run = engine(Reader(), task=task, workers=1, access=0.9, faults=[delay])
        run.run(3)


def test_a_piece_wakes_a_guard() -> None:
    @dataclass(frozen=True)
    class Mixed(Scheme, name="mixed"):
        chunks: int = 2

        @on_server(atomic=False)
        def add(self, s: State, g: Vector) -> None:
            s.x += g
            s.v += 1

        @on_server(when=lambda self, s, r: s.v >= r)
        def wait(self, s: State, r: int) -> None: ...

        async def step(self, w: Worker) -> None:
            await self.add(w.x)
            await self.wait(2 * (w.t + 1))

    run = engine(Mixed())
    run.run(8)
    assert run.updates == 8


# buffers


def batch_norm(policy: Any) -> TorchTask:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 3, generator=generator) + torch.tensor([0.0, 5.0, -3.0])
    y = x.sum(1, keepdim=True)
    model = lambda: nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))  # noqa: E731
    return TorchTask(model, nn.functional.mse_loss, (x, y), batch=8, buffer_policy=policy)


@pytest.mark.parametrize("policy", ["average", "chief"])
def test_every_worker_trains_with_buffers_of_its_own(policy: str) -> None:
    seen: list[dict[str, list[Tensor]]] = []

    def keep(run: Engine) -> None:
        seen.append({name: [seat.buffers[name].clone() for seat in run.seats] for name in run.seats[0].buffers})

    task = batch_norm(policy)
    result = simulate(task, "async", workers=3, steps=12, lr=0.01, seed=1, watch=keep)
    last = seen[-1]
    assert not torch.equal(last["0.running_mean"][0], last["0.running_mean"][1])
    assert [int(n) for n in last["0.num_batches_tracked"]] == [4, 4, 4]
    chosen = {
        name: rows[0] if policy == "chief" else torch.stack(rows).mean(0) if rows[0].is_floating_point() else rows[0]
        for name, rows in last.items()
    }
    assert result.metrics == task.evaluate(result.vector, chosen)
    assert result.metrics != task.evaluate(result.vector)


def test_the_two_buffer_policies_differ_in_evaluation_only() -> None:
    average, chief = (simulate(batch_norm(p), "sync", workers=3, steps=6, lr=0.01) for p in ("average", "chief"))
    assert average.digest == chief.digest
    assert average.loss != chief.loss


# simulate's own arguments


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"workers": 0}, "workers must be at least 1, not 0"),
        ({"steps": 0}, "steps must be at least 1, not 0"),
        ({"seconds": 0.0}, "seconds must be above 0"),
        ({"seconds": math.nan}, "seconds must be above 0"),
        ({"threads": 0}, "threads must be at least 1"),
        ({"batch": 0}, "batch must be at least 1"),
        ({"quorum": "maybe"}, "quorum must be shrink or hold, not 'maybe'"),
        ({"feed": "spoon"}, "feed must be one of shared, shard, slice, not 'spoon'"),
        ({"speeds": [1.0]}, "1 speeds were given for 2 workers"),
        ({"links": ["5:0.1"]}, "a link was given for worker 5"),
        ({"aggregate": 3}, "aggregate is 3, but 2 workers give one gradient each per update; add repeat=true"),
        ({"aggregate": 0}, "aggregate must be at least 1"),
        ({"window": 3}, "no hyper-parameter of sync 'window'"),
    ],
)
def test_wrong_requests_are_refused_before_the_run(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        simulate("toy", "sync", **{"workers": 2, "steps": 3, **wrong})
    assert message in str(caught.value)


def test_a_window_of_0_is_refused() -> None:
    with pytest.raises(UsageError, match="downpour-easy: window must be at least 1, not 0"):
        simulate("toy", "downpour-easy", window=0)


def test_more_gradients_than_workers_with_repeat() -> None:
    result = simulate("toy", "sync", workers=2, steps=4, aggregate=3, repeat=True)
    assert result.updates == 4
    assert sum(result.staleness.histogram.values()) == 12


def test_seconds_end_a_run() -> None:
    result = simulate("toy", "async", workers=2, steps=1000, seconds=3.5, warn=lambda text: None)
    assert (result.updates, result.virtual_seconds) == (6, 3.5)


def test_the_history_has_a_point_every_so_many_updates() -> None:
    watched: list[int] = []
    result = simulate("toy", "async", workers=2, steps=7, every=3, lr=0.1, watch=lambda e: watched.append(e.updates))
    assert [point.update for point in result.history] == [3, 6]
    assert watched == list(range(1, 8))
    assert result.history[0].metrics["loss"] > result.history[1].metrics["loss"]


def test_crossing_a_limit_of_stability_warns() -> None:
    said: list[str] = []
    result = simulate("toy", "async", workers=8, steps=2, lr=0.4, warn=said.append)
    assert result.warnings == said
    assert "crosses" in said[0]
    with pytest.warns(UserWarning, match="crosses"):
        simulate("toy", "async", workers=8, steps=2, lr=0.4)


def test_threads_and_grad_mode_are_as_before() -> None:
    threads = torch.get_num_threads()
    simulate("toy", "async", workers=2, steps=2, threads=1)
    assert torch.get_num_threads() == threads
    assert torch.is_grad_enabled()
