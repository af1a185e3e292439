"""The same training by engines that are no dependency of paceline: Ray, torchft, TensorFlow. Each needs its package.

Every function gives samples per second of all workers together, as `peers.others` does.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
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
    from torchft import LighthouseServer

    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=workers)
    try:
        context = get_context("spawn")
        counts = context.Array("d", workers)
        given = (work.name, work.task.batch, workers, seconds, counts, lighthouse.address())
        crew = [context.Process(target=_replica, args=(rank, *given)) for rank in range(workers)]
        for process in crew:
            process.start()
        for process in crew:
            process.join()
        if any(process.exitcode for process in crew):
            raise SystemExit(f"torchft failed with exit codes {[process.exitcode for process in crew]}")
        return float(sum(counts))
    finally:
        lighthouse.shutdown()


def _replica(rank: int, name: str, batch: int, workers: int, seconds: float, counts: Any, lighthouse: str) -> None:
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
    more, over = clock(work, rank, seconds, counts), False
    for _ in steps(DistributedDataParallel(manager, model), work, rank, workers, optimizer):
        over = over or not more()
        if over:
            break
    # the other replica may be inside a step that waits for this one: it has its count, and so ends at once
    sys.stdout.flush()
    os._exit(0)


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
