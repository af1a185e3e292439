"""The same training by engines that are no dependency of paceline: Ray, torchft, TensorFlow. Each needs its package.

Every function gives samples per second of all workers together, as `peers.others` does.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from peers import LR, Workload, clock, free_port, module, steps, torch_ddp, workload

HERE = Path(__file__).resolve().parent


def ray_ddp(work: Workload, workers: int, seconds: float) -> float:
    """DistributedDataParallel over Gloo in tasks of Ray."""
    import ray

    port = free_port()
    paths = os.pathsep.join([str(HERE), *sys.path])
    ray.init(
        num_cpus=workers,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": paths, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}},
    )
    try:
        play = ray.remote(num_cpus=1)(_in_ray)
        given = (work.name, work.task.batch, workers, seconds)
        return float(sum(ray.get([play.remote(rank, *given) for rank in range(workers)])))
    finally:
        ray.shutdown()


def _in_ray(rank: int, name: str, batch: int, workers: int, seconds: float) -> float:
    torch.set_num_threads(1)
    work, counts = workload(name, batch), [0.0] * workers
    torch_ddp(work, rank, workers, clock(work, rank, seconds, counts), None)
    return counts[rank]


def torchft_ddp(work: Workload, workers: int, seconds: float) -> float:
    """torchft's DistributedDataParallel over Gloo: every worker is a replica group of its own."""
    from torchft.coordination import LighthouseServer

    with _silence():  # it would tell of every step
        return _replicas(LighthouseServer(bind="127.0.0.1:0", min_replicas=workers), work, workers, seconds)


@contextmanager
def _silence() -> Iterator[None]:
    """Discard what this process, and others that it starts, write to their output."""
    nothing, before = os.open(os.devnull, os.O_WRONLY), [os.dup(1), os.dup(2)]
    for number in (1, 2):
        os.dup2(nothing, number)
    try:
        yield
    finally:
        for number, own in zip((1, 2), before, strict=True):
            os.dup2(own, number)
            os.close(own)
        os.close(nothing)


def _replicas(lighthouse: Any, work: Workload, workers: int, seconds: float) -> float:
    context = get_context("spawn")
    counts, over = context.Array("d", workers), context.Semaphore(0)
    given = (work.name, work.task.batch, workers, seconds, counts, over, lighthouse.address())
    crew = [context.Process(target=_replica, args=(rank, *given)) for rank in range(workers)]
    try:
        for process in crew:
            process.start()
        for _ in crew:
            if not over.acquire(timeout=60 + seconds):
                raise SystemExit("torchft has not finished in time")
        return float(sum(counts))
    finally:
        for process in crew:
            process.kill()
            process.join()
        lighthouse.shutdown()


def _replica(
    rank: int, name: str, batch: int, workers: int, seconds: float, counts: Any, over: Any, lighthouse: str
) -> None:
    """Trains on after its time is over: a replica that leaves makes the others wait. The caller ends all of them."""
    from torch.distributed import TCPStore
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    torch.set_num_threads(1)
    work = workload(name, batch)
    model = module(work)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(),
        load_state_dict=model.load_state_dict,
        state_dict=model.state_dict,
        min_replica_size=workers,
        replica_id=f"replica_{rank}_",
        store_addr="127.0.0.1",
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=lighthouse,
        init_sync=False,
    )
    optimizer = Optimizer(manager, torch.optim.SGD(model.parameters(), lr=LR))
    more, told, mine = clock(work, rank, seconds, own := [0.0] * workers), False, rank
    for _ in steps(DistributedDataParallel(manager, model), work, rank, workers, optimizer):
        if not told and not more():
            told, counts[mine] = True, own[mine]
            over.release()


def tensorflow(work: Workload, workers: int, seconds: float) -> float:
    """MultiWorkerMirroredStrategy of TensorFlow."""
    places = [f"127.0.0.1:{free_port()}" for _ in range(workers)]
    crew = []
    for rank in range(workers):
        cluster = {"cluster": {"worker": places}, "task": {"type": "worker", "index": rank}}
        told = json.dumps(
            {"model": work.name, "batch": work.task.batch, "seconds": seconds, "warm": work.warm, "lr": LR}
        )
        crew.append(
            subprocess.Popen(
                [sys.executable, str(HERE / "tensorflow_worker.py"), told],
                env=os.environ | {"TF_CONFIG": json.dumps(cluster), "TF_CPP_MIN_LOG_LEVEL": "3"},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    said = [process.communicate() for process in crew]
    if any(process.returncode for process in crew):
        raise SystemExit(f"TensorFlow failed: {said[0][1][-800:]}")
    return sum(float(out.strip().splitlines()[-1]) for out, _ in said)


ENGINES: dict[str, Callable[[Workload, int, float], float]] = {
    "TensorFlow mirrored": tensorflow,
    "Ray, torch DDP": ray_ddp,
    "torchft DDP": torchft_ddp,
}
_PACKAGES = {"TensorFlow mirrored": "tensorflow", "Ray, torch DDP": "ray", "torchft DDP": "torchft"}


def reason_to_skip(name: str) -> str | None:
    """Why an engine cannot run here; None: it can."""
    package = _PACKAGES[name]
    return None if importlib.util.find_spec(package) else f"{package} is not installed"
