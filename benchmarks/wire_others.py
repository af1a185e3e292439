"""Rows of wire.py that are not paceline's: Gloo, torch RPC, gRPC."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pairs import ALPHA, LOCAL, both, timed, view
from torch import Tensor

PIECE = 500_000  # floats: what is sent at a time where that is of use


def gloo(kilobytes: int, count: int, folder: Path) -> list[float]:
    """torch.distributed: a pair that sends and receives in pieces, all of them under way at once."""

    def group(rank: int) -> Any:
        made: Any = dist.ProcessGroupGloo
        options = made._Options()
        options._timeout = timedelta(seconds=60)
        options._devices = [made.create_device(hostname=LOCAL)]
        return made(dist.FileStore(str(folder / "store"), 2), rank, 2, options)

    def all_of(act: Callable[..., Any], vector: Tensor, other: int) -> None:
        for work in [act([piece], other, at) for at, piece in enumerate(vector.split(PIECE))]:
            work.wait()

    def serve() -> None:
        pair, x, g = group(1), torch.randn(kilobytes * 250), torch.empty(kilobytes * 250)
        for _ in range(count):
            all_of(pair.recv, g, 0)
            x.add_(g, alpha=ALPHA)
            all_of(pair.send, x, 0)

    def work() -> list[float]:
        pair, x, g = group(0), torch.empty(kilobytes * 250), torch.randn(kilobytes * 250)

        def exchange() -> None:
            all_of(pair.send, g, 1)
            all_of(pair.recv, x, 1)

        return timed(exchange, count)

    return both(serve, work, folder)


CENTRE: list[Tensor] = []  # of the process that serves torch RPC


def _add(g: Tensor) -> Tensor:
    CENTRE[0].add_(g, alpha=ALPHA)
    return CENTRE[0]


def torch_rpc(kilobytes: int, count: int, folder: Path) -> list[float]:
    """torch.distributed.rpc, over TCP as between machines."""
    from torch.distributed import rpc

    def begin(name: str, rank: int) -> None:
        options = rpc.TensorPipeRpcBackendOptions(
            init_method=f"file://{folder}/rpc", _transports=["uv"], _channels=["basic"]
        )
        os.environ["TP_SOCKET_IFNAME"] = "lo"
        rpc.init_rpc(name, rank=rank, world_size=2, rpc_backend_options=options)

    def serve() -> None:
        CENTRE.append(torch.randn(kilobytes * 250))
        begin("server", 1)
        rpc.shutdown()

    def work() -> list[float]:
        begin("worker", 0)
        g = torch.randn(kilobytes * 250)
        times = timed(lambda: rpc.rpc_sync("server", _add, args=(g,)), count)
        rpc.shutdown()
        return times

    return both(serve, work, folder)


def grpc_stream(kilobytes: int, count: int, folder: Path) -> list[float]:
    """gRPC: one stream each way for all exchanges, in pieces."""
    place = folder / "address"
    pieces = -(-kilobytes * 250 // PIECE)

    def serve() -> None:
        from concurrent.futures import ThreadPoolExecutor

        import grpc

        x, g = torch.randn(kilobytes * 250), torch.empty(kilobytes * 250)

        def exchange(requests: Iterator[bytes], _: Any) -> Iterator[bytes]:
            theirs = view(g)
            for number, data in enumerate(requests):
                at = number % pieces * 4 * PIECE
                theirs[at : at + len(data)] = data
                if number % pieces == pieces - 1:
                    x.add_(g, alpha=ALPHA)
                    yield from (bytes(view(piece)) for piece in x.split(PIECE))

        handler = grpc.stream_stream_rpc_method_handler(exchange)
        server = grpc.server(ThreadPoolExecutor(1))
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("wire", {"exchange": handler})])
        port = server.add_insecure_port(f"{LOCAL}:0")
        server.start()
        place.with_suffix(".new").write_text(str(port))
        place.with_suffix(".new").rename(place)
        server.wait_for_termination(60)

    def work() -> list[float]:
        import queue

        import grpc

        while not place.exists():
            time.sleep(0.01)
        x, g = torch.empty(kilobytes * 250), torch.randn(kilobytes * 250)
        ours: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        channel = grpc.insecure_channel(f"{LOCAL}:{place.read_text()}")
        answers = channel.stream_stream("/wire/exchange")(iter(ours.get, None))
        theirs = view(x)

        def exchange() -> None:
            for piece in g.split(PIECE):
                ours.put(bytes(view(piece)))
            for number in range(pieces):
                data = next(answers)
                theirs[number * 4 * PIECE : number * 4 * PIECE + len(data)] = data

        times = timed(exchange, count)
        ours.put(None)
        return times

    return both(serve, work, folder, ends=False)
