"""What the benchmarks of whole runs compare: models, paceline's schemes, and the same training by other means.

Every number is samples per second of all workers together, or its share of the limit: as many processes that never
communicate. The speed of a machine drifts. So a run of paceline is measured in turn with the limit, in the same
processes (`alternate.py`); of the others the limit is measured before and after.
"""

from __future__ import annotations

import dataclasses
import os
import socket
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from alternate import RANK, Blocks, Loop, Ranks, alternating, barrier_alone
from torch import Tensor, nn

from paceline.api.execute import execute
from paceline.config import build
from paceline.config.validate import planned
from paceline.datasets import load
from paceline.runs.run_directory import RunDirectory
from paceline.torch_task import TorchTask

LR = 0.05
WINDOW = 10  # local steps between two means of local SGD
EVALUATED = 500  # test samples at the end of a run: its time is not measured
ASKED = 0.05  # seconds of training between two questions of processes that must stop at the same step


@dataclass(frozen=True)
class Workload:
    """A model with its data, and how long a gradient takes at most on a core of today."""

    name: str
    task: TorchTask
    gradient: float

    @property
    def warm(self) -> int:
        """Gradients of a worker before the clock starts."""
        return max(3, min(100, int(0.2 / self.gradient)))

    @property
    def block(self) -> int:
        """Gradients of a block of `alternate.py`: a multiple of the window."""
        return WINDOW * max(1, round(0.1 / self.gradient / WINDOW))

    @property
    def asked(self) -> int:
        """Steps between two questions whether all processes stop."""
        return max(1, min(50, int(ASKED / self.gradient)))


def workload(name: str, batch: int | None = None) -> Workload:
    """mnist-mlp (0.4 MB of parameters), mnist-cnn (13 MB), or wide-mlp (40 MB)."""
    if name == "wide-mlp":
        return Workload(name, wide_mlp(batch or 50).limited(EVALUATED), 0.06)
    seconds = {"mnist-mlp": (100, 0.001), "mnist-cnn": (50, 0.05)}
    if name not in seconds:
        raise SystemExit(f"no workload {name!r}: mnist-mlp, mnist-cnn, wide-mlp")
    usual, gradient = seconds[name]
    task = build.task_of(name, {}).configured(batch=batch or usual)
    assert isinstance(task, TorchTask)
    return Workload(name, task.limited(EVALUATED), gradient)


def wide_mlp(batch: int) -> TorchTask:
    """MNIST, a network of 784-2816-2720-10: 9,897,850 parameters."""
    data = load("mnist", None)

    def model() -> nn.Module:
        return nn.Sequential(
            *(nn.Flatten(), nn.Linear(784, 2816), nn.ReLU()),
            *(nn.Linear(2816, 2720), nn.ReLU(), nn.Linear(2720, 10)),
        )

    def prepare(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return images.float() / 255, labels

    return TorchTask(
        model, nn.functional.cross_entropy, data.train, data.test, batch=batch, prepare=prepare, name="wide-mlp"
    )


class Speed(NamedTuple):
    """Samples per second of all workers together."""

    run: float
    limit: float | None = None  # of as many processes that never communicate, if it was measured in turn with the run


def paced(work: Workload, words: str, workers: int, servers: int, seconds: float) -> Speed:
    """A scheme of paceline (`words`: its name and hyper-parameters), in turn with the limit in the same processes."""
    name, *pairs = words.split()
    blocks = Blocks(workers, work.block, partial(by_hand, work.task))
    plan, scheme, objects = planned(
        alternating(work.task, blocks),
        name,
        hyper=build.pairs(pairs),
        workers=workers,
        servers=servers,
        seconds=2 * seconds + 0.5,
        steps=None,
        hooks=[Ranks(blocks)],
    )
    with tempfile.TemporaryDirectory() as folder:
        place = RunDirectory.create(Path(folder) / "run", "benchmark")
        plan = dataclasses.replace(plan, directory=str(place.path), batch=work.task.batch)
        execute(plan, scheme, objects, tell=lambda *_: None, watch=lambda _: None)
    return _speed(work, blocks)


def _speed(work: Workload, blocks: Blocks) -> Speed:
    found = blocks.result()
    limit = 1000 * blocks.workers * work.task.batch / found["plain_ms"]
    return Speed(found["share"] * limit, limit)


def barrier(work: Workload, every: int, workers: int, seconds: float) -> Speed:
    """A barrier after every so many gradients, at which nothing is exchanged: what means without any cost would be."""
    blocks = Blocks(workers, work.block, partial(by_hand, work.task))
    barrier_alone(blocks, 2 * seconds + 0.5, every)
    return _speed(work, blocks)


def by_hand(task: TorchTask, _: Any = None) -> Loop:
    """SGD in a process by itself."""
    x = task.start(0)
    out, batches = torch.empty_like(x), task.batches(0, 1, 1 + RANK[0])

    def step() -> None:
        task.grad(x, next(batches), out)
        x.add_(out, alpha=-LR)

    return step


More = Callable[[], bool]  # called after each gradient: counts it, and says whether there is time for another
Play = Callable[[Workload, int, int, More, Any], None]  # of workload, rank, workers, more, what they share


def others(play: Play, work: Workload, workers: int, seconds: float) -> float:
    """As many processes that each run `play`."""
    context = get_context("fork")
    counts = context.Array("d", workers)
    shared = module(work).share_memory() if play is torch_hogwild else None
    port = free_port()
    names = [*range(workers), *([workers] if play is torch_rpc else [])]  # the last one is the server
    crew = [
        context.Process(target=_begin, args=(play, work, rank, workers, seconds, counts, shared, port))
        for rank in names
    ]
    for process in crew:
        process.start()
    for process in crew:
        process.join()
        if process.exitcode:
            raise SystemExit(f"{play.__name__} failed with exit code {process.exitcode}")
    return sum(counts)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _begin(
    play: Play, work: Workload, rank: int, workers: int, seconds: float, counts: Any, shared: Any, port: int
) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    play(work, rank, workers, clock(work, rank, seconds, counts), shared)


def clock(work: Workload, rank: int, seconds: float, counts: Any) -> More:
    """Counts the gradients after the first ones, and says when the time is over."""
    state = {"gradients": 0, "since": 0.0}
    warm, batch = work.warm, work.task.batch

    def more() -> bool:
        state["gradients"] += 1
        if state["gradients"] == warm:
            state["since"] = time.perf_counter()
        if state["gradients"] <= warm:
            return True
        passed = time.perf_counter() - state["since"]
        counts[rank] = (state["gradients"] - warm) * batch / passed
        return passed < seconds

    return more


def no_communication(work: Workload, rank: int, workers: int, more: More, _: Any) -> None:
    """The limit: SGD in every process by itself."""
    x = work.task.start(0)
    out = torch.empty_like(x)
    with torch.no_grad():
        for batch in work.task.batches(rank, workers, 0):
            work.task.grad(x, batch, out)
            x.add_(out, alpha=-LR)
            if not more():
                return


def module(work: Workload) -> nn.Module:
    return work.task.module(work.task.start(0)).train()


def steps(model: nn.Module, work: Workload, rank: int, workers: int, optimizer: Any = None) -> Iterator[None]:
    """A user's own loop in torch: one step of SGD for each item."""
    optimizer, loss = optimizer or torch.optim.SGD(model.parameters(), lr=LR), work.task.loss
    assert loss is not None
    for batch in work.task.batches(rank, workers, 0):
        optimizer.zero_grad()
        loss(model(batch.data[0]), batch.data[1]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        yield


def torch_hogwild(work: Workload, rank: int, workers: int, more: More, model: nn.Module) -> None:
    """A module in shared memory that every process changes, as in torch's own example."""
    for _ in steps(model, work, rank, workers):
        if not more():
            return


class _Together:
    """Ends all processes of a group at the same step."""

    def __init__(self, every: int) -> None:
        self.every, self.step, self.going = every, 0, torch.ones(1)

    def over(self, more: bool) -> bool:
        if not more:
            self.going.zero_()
        self.step += 1
        if self.step % self.every:
            return False
        dist.all_reduce(self.going, op=dist.ReduceOp.MIN)
        return not self.going.item()


def torch_ddp(work: Workload, rank: int, workers: int, more: More, _: Any) -> None:
    """DistributedDataParallel over Gloo."""
    dist.init_process_group("gloo", rank=rank, world_size=workers)
    together = _Together(work.asked)
    for _ in steps(nn.parallel.DistributedDataParallel(module(work)), work, rank, workers):
        if together.over(more()):
            break
    dist.destroy_process_group()


def local_sgd(work: Workload, rank: int, workers: int, more: More, _: Any) -> None:
    """Local SGD: after every WINDOW steps the mean of the parameters by Gloo's all_reduce."""
    dist.init_process_group("gloo", rank=rank, world_size=workers)
    x = work.task.start(0)
    out, together = torch.empty_like(x), _Together(max(work.asked, WINDOW))
    with torch.no_grad():
        for number, batch in enumerate(work.task.batches(rank, workers, 0), 1):
            work.task.grad(x, batch, out)
            x.add_(out, alpha=-LR)
            if number % WINDOW == 0:
                dist.all_reduce(x)
                x.div_(workers)
            if together.over(more()):
                break
    dist.destroy_process_group()


CENTRE: list[Tensor] = []  # of the process that is the server of torch RPC


def _push(g: Tensor) -> Tensor:
    CENTRE[0].add_(g, alpha=-LR)
    return CENTRE[0]


def torch_rpc(work: Workload, rank: int, workers: int, more: More, _: Any) -> None:
    """Asynchronous SGD with a parameter server of torch.distributed.rpc: one call pushes a gradient and pulls x."""
    from torch.distributed import rpc

    warnings.filterwarnings("ignore", message="You are using a Backend")  # torch warns of its own call
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=max(4, workers))
    name = "server" if rank == workers else f"worker{rank}"
    if rank == workers:
        CENTRE.append(work.task.start(0))
    rpc.init_rpc(name, rank=rank, world_size=workers + 1, rpc_backend_options=options)
    if rank < workers:
        x = work.task.start(0)
        out = torch.empty_like(x)
        with torch.no_grad():
            for batch in work.task.batches(rank, workers, 0):
                work.task.grad(x, batch, out)
                x = rpc.rpc_sync("server", _push, args=(out,))
                if not more():
                    break
    rpc.shutdown()


BARRIER = "a barrier alone"
PEERS: dict[str, Play] = {
    "torch DDP (Gloo)": torch_ddp,
    "torch HogWild": torch_hogwild,
    "torch RPC server": torch_rpc,
    f"Gloo local SGD window={WINDOW}": local_sgd,
}


@dataclass
class Shares:
    """Of each contender: its part of the limit, once for every round; and the limits in samples per second."""

    shares: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    limits: list[float] = dataclasses.field(default_factory=list)

    @property
    def limit(self) -> float:
        return statistics.median(self.limits)

    def as_dict(self) -> dict[str, Any]:
        rows = {
            name: {"median": round(statistics.median(each), 4), "rounds": [round(one, 4) for one in each]}
            for name, each in self.shares.items()
        }
        return {"limit_samples_per_second": round(self.limit), "shares": rows}


def contenders(
    work: Workload,
    schemes: Sequence[str],
    peers: Mapping[str, Play],
    workers: int,
    servers: int,
    seconds: float,
    barriers: Sequence[int] = (),
) -> dict[str, Callable[[], Speed]]:
    """Functions that measure paceline's schemes, barriers alone, then the others, by name."""
    runs: dict[str, Callable[[], Speed]] = {}
    for words in schemes:
        runs[words] = lambda words=words: paced(work, words, workers, servers, seconds)  # type: ignore[misc]
    for every in barriers:
        name = BARRIER if every == 1 else f"{BARRIER} window={every}"
        runs[name] = lambda every=every: barrier(work, every, workers, seconds)  # type: ignore[misc]
    for name, play in peers.items():
        runs[name] = lambda play=play: Speed(others(play, work, workers, seconds))  # type: ignore[misc]
    return runs


def share_rounds(
    work: Workload, runs: Mapping[str, Callable[[], Speed]], workers: int, seconds: float, rounds: int, found: Shares
) -> None:
    """Measure every contender once in each round, in turn. The limit is measured before and after those that do not
    measure it themselves."""
    for number in range(rounds):
        before: float | None = None
        for name, run in runs.items():
            if before is None:
                before = others(no_communication, work, workers, seconds)
                found.limits.append(before)
            speed = run()
            if speed.limit is None:
                after = others(no_communication, work, workers, seconds)
                found.limits.append(after)
                share, before = speed.run / ((before + after) / 2), after
            else:
                share = speed.run / speed.limit
                found.limits.append(speed.limit)
            found.shares.setdefault(name, []).append(share)
            where = f"{work.name}, {workers} workers, round {number + 1}"
            print(f"{where}: {name}: {share:.3f}", file=sys.stderr, flush=True)
