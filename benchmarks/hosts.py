"""Training on two hosts with a network between them: paceline beside torch's DDP over Gloo, in one run.

The hosts are network namespaces of this machine (tests/beds), so this needs root and iproute2; elsewhere it says so and
ends. Each host has one worker with one thread; servers are on the hosts in turn, the first on the first host. Samples
per second of both workers together, medians of a few rounds, and the speed as a share of DDP's in the same round:

    python benchmarks/hosts.py --rate 1gbit --models mnist-cnn,wide-mlp --rounds 3 --seconds 6
    python benchmarks/hosts.py --schemes "allreduce,sync servers=2" --rate 1gbit
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peers import LR, workload
from rich.console import Console
from rich.table import Table
from torch.nn.parallel import DistributedDataParallel

from paceline.hook import Hook, Session
from paceline.torch_task import TorchTask

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from beds.hosts import Host, several

DDP = "torch DDP (Gloo)"
SCHEMES = ("allreduce", "sync", "sync servers=2", "async", "async servers=2", "averaging window=10")
SERVERLESS = ("allreduce", "averaging")
WARM = 1.5  # seconds of training of all workers before the clock starts
LATE = 4.0  # seconds by which a worker may begin after the chief
LIMIT = 120.0  # seconds that one run may take


def mnist_cnn() -> TorchTask:
    return workload("mnist-cnn", 50).task


def wide_mlp() -> TorchTask:
    return workload("wide-mlp", 50).task


MODELS = {"mnist-cnn": mnist_cnn, "wide-mlp": wide_mlp}


@dataclass
class Pace(Hook):
    """Notes when each gradient of a worker was there, and stops the run after some seconds."""

    folder: str
    seconds: float

    def begin(self, session: Session) -> None:
        self._times: list[float] = []

    def after_gradient(self, session: Session, loss: float) -> None:
        self._times.append(time.perf_counter())
        if session.worker.rank == 0 and self._times[-1] - self._times[0] > LATE + WARM + self.seconds:
            session.stop("enough")

    def end(self, session: Session) -> None:
        Path(self.folder, f"times-{session.worker.rank}").write_text(json.dumps(self._times))


def rate(folder: Path, batch: int) -> float:
    """Samples per second of all workers together, from the times of their gradients: while all train."""
    workers = [json.loads(path.read_text()) for path in folder.glob("times-*")]
    if len(workers) < 2 or not all(workers):
        raise SystemExit("a worker has made no gradient")
    begin, end = max(times[0] for times in workers) + WARM, min(times[-1] for times in workers)
    if begin >= end:
        raise SystemExit("the workers have trained together for too short a time; give more --seconds")
    return batch * sum(begin < one <= end for times in workers for one in times) / (end - begin)


def paceline(model: str, words: str, seconds: float, hosts: dict[str, Host], folder: Path, tls: bool) -> None:
    """A run of two workers, the chief on the first host and one on the second. `words`: a scheme and its settings, of
    which `servers` is how many servers there are."""
    scheme, *pairs = words.split()
    given = dict(pair.split("=") for pair in pairs)
    servers = int(given.pop("servers", 1)) if scheme not in SERVERLESS else 0
    environment = os.environ | {
        "PACELINE_CLUSTER": f"chief=1,worker=1{f',server={servers}' if servers else ''}",
        "PACELINE_HUB": "h1:7070",
        "PACELINE_SECRET": secrets.token_hex(32),
    }
    command = [sys.executable, "-m", "paceline", "train", f"{__file__}:{model.replace('-', '_')}", "--scheme", scheme]
    command += ["--plain", "--steps", "10000000", "--checkpoint-seconds", "3600", "--dir", str(folder / "run")]
    command += ["--hook", f"{__file__}:Pace:folder={folder},seconds={seconds}", f"lr={LR}"]
    command += [f"{name}={value}" for name, value in given.items()]
    command += ["--tls", "generated"] if tls else []
    tasks = [("h1", "chief"), ("h2", "worker:0"), *((f"h{1 + k % 2}", f"server:{k}") for k in range(servers))]
    together([(hosts[name], command, environment | {"PACELINE_TASK": task}) for name, task in tasks], folder)


def ddp(model: str, seconds: float, hosts: dict[str, Host], folder: Path) -> None:
    environment = os.environ | {"MASTER_ADDR": "h1", "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": "eth0"}
    words = [sys.executable, __file__, "--ddp", str(folder), "--models", model, "--seconds", str(seconds)]
    ranks = enumerate(["h1", "h2"])
    together(
        [(hosts[name], words, environment | {"RANK": str(rank), "WORLD_SIZE": "2"}) for rank, name in ranks], folder
    )


def together(commands: Sequence[tuple[Host, list[str], dict[str, str]]], folder: Path) -> None:
    """Start commands on hosts, and wait until all have ended."""
    with contextlib.ExitStack() as stack:
        log = stack.enter_context((folder / "log").open("a"))
        tasks = []
        for host, words, environment in commands:
            tasks.append(host.start(words, env=environment, stdout=log, stderr=subprocess.STDOUT))
            stack.callback(tasks[-1].kill)
        for task in tasks:
            if task.wait(LIMIT):
                raise SystemExit(f"a command failed:\n{(folder / 'log').read_text()[-4000:]}")


def ddp_worker(model: str, seconds: float, folder: Path) -> None:
    """One of DDP's processes: the same model, data and steps."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    task = MODELS[model]()
    module = DistributedDataParallel(task.flat.module)
    optimizer = torch.optim.SGD(module.parameters(), lr=LR)
    batches, times = task.batches(rank, 2, 0), []
    loss_of: Any = task.loss
    go_on = torch.ones(1)
    for batch in batches:
        *inputs, target = batch.data
        optimizer.zero_grad()
        loss = loss_of(module(*inputs), target)
        loss.backward()
        optimizer.step()
        loss.item()
        times.append(time.perf_counter())
        if len(times) % 5 == 0:  # all must stop at the same step
            go_on[0] = float(times[-1] - times[0] < WARM + seconds)
            dist.broadcast(go_on, 0)
            if not go_on.item():
                break
    (folder / f"times-{rank}").write_text(json.dumps(times))
    dist.destroy_process_group()


def measured(given: argparse.Namespace, schemes: list[str], model: str) -> dict[str, list[float]]:
    """Samples per second of DDP and of each scheme, round by round."""
    found: dict[str, list[float]] = {name: [] for name in (DDP, *schemes)}
    with several(2) as hosts, contextlib.ExitStack() as stack:
        if given.rate:
            stack.enter_context(hosts["h2"].limited(given.rate))
        for _ in range(given.rounds):
            for name in found:
                with tempfile.TemporaryDirectory() as place:
                    folder = Path(place)
                    if name == DDP:
                        ddp(model, given.seconds, hosts, folder)
                    else:
                        paceline(model, name, given.seconds, hosts, folder, given.tls)
                    found[name].append(rate(folder, 50))
    return found


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rate", default="1gbit", help="of the cable, as tc writes it; empty: no limit")
    options.add_argument("--models", default=",".join(MODELS))
    options.add_argument("--schemes", default=",".join(SCHEMES))
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--seconds", type=float, default=6.0)
    options.add_argument("--tls", action="store_true", help="paceline encrypts, DDP cannot")
    options.add_argument("--json", action="store_true")
    options.add_argument("--ddp", help=argparse.SUPPRESS)
    given = options.parse_args()
    torch.set_num_threads(1)
    if given.ddp:
        ddp_worker(given.models, given.seconds, Path(given.ddp))
        return
    os.environ["OMP_NUM_THREADS"] = "1"
    table = Table(
        "model", "", "samples/s", "share of DDP", "least", "most", title=f"two hosts, {given.rate or 'no limit'}"
    )
    everything = {}
    for model in given.models.split(","):
        try:
            everything[model] = found = measured(given, given.schemes.split(","), model)
        except pytest.skip.Exception as why:
            raise SystemExit(f"nothing was measured: {why.msg}") from None
        for name, rates in found.items():
            shares = [one / base for one, base in zip(rates, found[DDP], strict=True)]
            middle = (f"{statistics.median(rates):,.0f}", f"{statistics.median(shares):.2f}")
            table.add_row(model, name, *middle, f"{min(shares):.2f}", f"{max(shares):.2f}")
    if given.json:
        print(json.dumps(everything))
    else:
        Console().print(table)


if __name__ == "__main__":
    main()
