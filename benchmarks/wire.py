"""How fast a worker and a server of another node exchange vectors: paceline over TCP, beside bare sockets and others.

One exchange: a worker sends a gradient, the server does `x.add_(g, alpha=…)`, and the worker has x. Two processes with
one thread each, connected over loopback. All rows are measured in one run, in turn for a few rounds, because the
machine's speed drifts; medians in milliseconds, and the speed as a share of the first row's:

    python benchmarks/wire.py --sizes 400,4000,40000 --rounds 5
    python benchmarks/wire.py --rows 'bare sockets,paceline' --json

gRPC takes part if grpcio is installed.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import importlib.util
import json
import os
import select
import socket
import ssl
import statistics
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pairs import ALPHA, LOCAL, both, forked, timed, view
from rich.console import Console
from rich.table import Table
from torch import Tensor
from wire_others import gloo, grpc_stream, torch_rpc

from paceline.api.execute import execute
from paceline.config.endpoint import Endpoint
from paceline.config.validate import planned
from paceline.hook import Hook, Session
from paceline.network.nodes import agent
from paceline.network.nodes.coordinator import Coordinator
from paceline.network.nodes.join import JoinRequest
from paceline.network.secure import secret as secrets
from paceline.network.secure import tls
from paceline.network.secure.admission import unpaced
from paceline.processes.supervisor.supervisor import Supervisor
from paceline.runs.run_directory import RunDirectory
from paceline.scheme import Scheme, State, Vector, on_server
from paceline.task import Batch, Task
from paceline.worker import Worker

WARM = 5  # exchanges that do not count
HEADER = struct.Struct("<qq")


# bare sockets


def sockets(
    kilobytes: int, count: int, folder: Path, *, blocking: bool, copies: bool = False, encrypted: bool = False
) -> list[float]:
    """A header and the vector in one `sendmsg`, received where they belong. `copies`: of x before it is sent, and of
    the answer, as paceline makes them."""
    listening = socket.create_server((LOCAL, 0))
    serving, calling = tls.contexts(tls.generated(folder)) if encrypted else (None, None)

    def serve() -> None:
        connection, _ = listening.accept()
        if serving is not None:
            connection = serving.wrap_socket(connection, server_side=True)
        x, g = torch.randn(kilobytes * 250), torch.empty(kilobytes * 250)
        sent = x.clone() if copies else x
        ours, theirs, header = view(sent), view(g), bytearray(HEADER.size)
        _tune(connection, blocking)
        for _ in range(count):
            _receive(connection, memoryview(header))
            _receive(connection, theirs)
            x.add_(g, alpha=ALPHA)
            if copies:
                sent.copy_(x)
            _send(connection, ours)

    def work() -> list[float]:
        connection = socket.create_connection(listening.getsockname())
        if calling is not None:
            connection = calling.wrap_socket(connection)
        x, g = torch.empty(kilobytes * 250), torch.randn(kilobytes * 250)
        kept = torch.zeros(kilobytes * 250)
        ours, theirs, header = view(g), view(x), bytearray(HEADER.size)
        _tune(connection, blocking)

        def exchange() -> None:
            _send(connection, ours)
            _receive(connection, memoryview(header))
            _receive(connection, theirs)
            if copies:
                kept.copy_(x)

        return timed(exchange, count)

    with listening:
        return both(serve, work, folder)


def _tune(connection: socket.socket, blocking: bool) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    unpaced(connection)
    connection.setblocking(blocking)


def _send(connection: socket.socket, data: memoryview) -> None:
    parts = [memoryview(HEADER.pack(1, len(data))), data]
    if isinstance(connection, ssl.SSLSocket):
        for part in parts:
            connection.sendall(part)
        return
    while parts:
        try:
            sent = connection.sendmsg(parts)
        except BlockingIOError:
            _ready(connection, writing=True)
            continue
        while parts and sent >= len(parts[0]):
            sent -= len(parts.pop(0))
        if parts:
            parts[0] = parts[0][sent:]


def _receive(connection: socket.socket, into: memoryview) -> None:
    while len(into):
        try:
            count = connection.recv_into(into)
        except BlockingIOError:
            _ready(connection, writing=False)
            continue
        if not count:
            raise ConnectionResetError("the other side has ended")
        into = into[count:]


def _ready(connection: socket.socket, *, writing: bool) -> None:
    poll = select.poll()
    poll.register(connection, select.POLLOUT if writing else select.POLLIN)
    poll.poll()


# paceline


class Vectors(Task):
    """Nothing to learn: a vector of some length, and gradients that cost nothing."""

    name, batch = "vectors", 1

    def __init__(self, length: int) -> None:
        self._length = length

    def start(self, seed: int) -> Vector:
        return torch.randn(self._length, generator=torch.Generator().manual_seed(seed))

    def batches(self, rank: int, workers: int, seed: int, first: int = 0) -> Iterator[Batch]:
        while True:
            yield Batch((), 1)

    def grad(
        self, x: Vector, batch: Batch, out: Vector | None = None, buffers: Mapping[str, Tensor] | None = None
    ) -> tuple[float, Vector]:
        return 0.0, torch.randn(self._length) if out is None else out

    def evaluate(self, x: Vector, buffers: Mapping[str, Tensor] | None = None) -> dict[str, float]:
        return {"loss": 0.0}


TIMES: list[float] = []  # of the worker's process


@dataclass(frozen=True)
class Exchange(Scheme, name="exchange"):
    """A push and a pull in one call, timed by the worker."""

    @on_server
    def exchange(self, s: State, g: Vector) -> Vector:
        s.x.add_(g, alpha=ALPHA)
        s.v += 1
        x: Vector = s.x
        return x

    async def step(self, w: Worker) -> None:
        g = await w.grad(w.x)
        began = time.perf_counter()
        x = await self.exchange(g)
        TIMES.append(time.perf_counter() - began)
        del x


@dataclass
class Times(Hook):
    """Writes down what the steps took."""

    file: str

    def end(self, session: Session) -> None:
        Path(self.file).write_text(json.dumps(TIMES))


def paceline(kilobytes: int, count: int, folder: Path, *, record: bool, encrypted: bool = False) -> list[float]:
    """A run of one worker and one server, each on a node of its own."""
    file = folder / "times"
    plan, scheme, objects = planned(
        Vectors(kilobytes * 250),
        Exchange(),
        hooks=[Times(str(file))],
        workers=1,
        steps=count,
        summaries=False,
        record=record,
        checkpoint_seconds=3600.0,
    )
    place = RunDirectory.create(folder / "run", "benchmark")
    plan = dataclasses.replace(plan, directory=str(place.path))
    secret, certificates = secrets.fresh(), tls.generated(folder) if encrypted else None
    agents = []

    def launcher(*args: Any, **rest: Any) -> Supervisor:
        node = Endpoint(address=LOCAL, secret=secret, certificates=certificates, share=False)  # as on two machines
        ports: list[int] = []
        listening = lambda _, port: ports.append(port)  # noqa: E731
        policy = {"join": 30.0, "join_policy": "fail"}
        hub = Coordinator(*args, node=node, port=0, here={"chief"}, listening=listening, **policy, **rest)
        plain = {name: one for name, one in objects.items() if name != "ready"}

        def serve() -> None:
            gc.freeze()  # what earlier runs have left must not close descriptors that are this node's by then
            os.closerange(3, 4096)  # what the hub has opened is not that node's
            way = JoinRequest(LOCAL, ports[0], ("server:0",), node)
            agent.serve(lambda: way, 20.0, lambda _: None, plain)

        agents.append(forked(serve))
        return hub.supervisor

    execute(plan, scheme, objects, tell=lambda *_: None, watch=lambda _: None, launcher=launcher)
    for pid in agents:
        os.waitpid(pid, 0)
    times: list[float] = json.loads(file.read_text())
    return times


ROWS: dict[str, Callable[[int, int, Path], list[float]]] = {
    "bare sockets": lambda *given: sockets(*given, blocking=True),
    "bare sockets, not blocking": lambda *given: sockets(*given, blocking=False),
    "bare sockets and two copies": lambda *given: sockets(*given, blocking=True, copies=True),
    "bare sockets, TLS": lambda *given: sockets(*given, blocking=True, encrypted=True),
    "paceline": lambda *given: paceline(*given, record=True),
    "paceline, no order log": lambda *given: paceline(*given, record=False),
    "paceline, TLS": lambda *given: paceline(*given, record=True, encrypted=True),
    "Gloo send and recv": gloo,
    "torch RPC": torch_rpc,
    "gRPC stream": grpc_stream,
}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--sizes", default="400,4000,40000", help="in thousands of bytes")
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--rows", default=",".join(name.replace(",", ";") for name in ROWS), help="; for , in a name")
    options.add_argument("--json", action="store_true")
    given = options.parse_args()
    torch.set_num_threads(1)
    rows = [name.replace(";", ",") for name in given.rows.split(",")]
    if importlib.util.find_spec("grpc") is None and "gRPC stream" in rows:
        rows.remove("gRPC stream")
        print("gRPC stream is left out: grpcio is not installed", file=sys.stderr)
    sizes = list(map(int, given.sizes.split(",")))
    found: dict[str, dict[int, float]] = {name: {} for name in rows}
    for kilobytes in sizes:
        count = WARM + max(10, min(300, 400_000 // kilobytes))
        times: dict[str, list[float]] = {name: [] for name in rows}
        for _ in range(given.rounds):
            for name in rows:
                with tempfile.TemporaryDirectory() as folder:
                    times[name] += ROWS[name](kilobytes, count, Path(folder))[WARM:]
        for name in rows:
            found[name][kilobytes] = 1000 * statistics.median(times[name])
    if given.json:
        print(json.dumps({"milliseconds": found, "rounds": given.rounds}, indent=1))
        return
    table = Table("", *(f"{kilobytes:,} kB" for kilobytes in sizes), title="an exchange, ms (share of bare sockets)")
    for name, row in found.items():
        table.add_row(name, *(f"{row[size]:.2f} ({found[rows[0]][size] / row[size]:.2f})" for size in sizes))
    Console().print(table)


if __name__ == "__main__":
    main()
