"""Two processes that exchange vectors, and how long that takes: what the rows of wire.py have in common."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

LOCAL = "127.0.0.1"
ALPHA = -0.001


def view(tensor: Tensor) -> memoryview:
    return memoryview(tensor.numpy()).cast("B")


def timed(exchange: Callable[[], object], count: int) -> list[float]:
    times = []
    for _ in range(count):
        began = time.perf_counter()
        exchange()
        times.append(time.perf_counter() - began)
    return times


def forked(play: Callable[[], object]) -> int:
    sys.stdout.flush()
    pid = os.fork()
    if not pid:
        code = 1
        try:
            torch.set_num_threads(1)
            play()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return pid


def both(serve: Callable[[], object], work: Callable[[], list[float]], folder: Path, *, ends: bool = True) -> Any:
    """Two processes; what the worker's gives. `ends`: the server's ends by itself."""
    file = folder / "times"
    server, worker = forked(serve), forked(lambda: file.write_text(json.dumps(work())))
    _, status = os.waitpid(worker, 0)
    if status or not ends:
        os.kill(server, 9)
    os.waitpid(server, 0)
    if status:
        raise SystemExit("a worker has failed")
    return json.loads(file.read_text())
