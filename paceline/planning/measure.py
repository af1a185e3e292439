"""What a plan measures on this machine: gradients, the arithmetic of a scheme, and what messages cost the processor."""

from __future__ import annotations

import resource
import socket
import statistics
import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from paceline.api.simulate import torch_threads
from paceline.compute_times import ComputeTime, Constant
from paceline.errors import UsageError
from paceline.ops import Op
from paceline.planning.laws import fitted
from paceline.planning.timing_task import TimingTask
from paceline.runs.atomic_files import read_json, write_json
from paceline.runtime.step_driver import StepDriver
from paceline.scheme import Scheme
from paceline.simulator.cost import Cost
from paceline.simulator.engine import SimulationEngine
from paceline.task import Task

GRADIENTS, WARM_UP = 60, 5
SECONDS = 10.0  # that the gradients may take; at least three are measured
PORTION = 1 << 22  # bytes of a large message on loopback
SMALLEST = 64
ROUNDS = 300  # small messages, there and back


@dataclass(frozen=True)
class GradientTimes:
    """The times of single gradients, and the law that fits them. `given`: by the user, not measured."""

    seconds: tuple[float, ...]
    law: ComputeTime
    device: str = "cpu"
    given: bool = False
    torn: int = 0  # gradients during which others had this core: of them the time of the processor counts

    @property
    def mean(self) -> float:
        return statistics.fmean(self.seconds)

    @property
    def variation(self) -> float:
        """The coefficient of variation: the standard deviation divided by the mean."""
        return statistics.pstdev(self.seconds) / self.mean if self.mean else 0.0


@dataclass(frozen=True)
class Arithmetic:
    """Seconds of a scheme's own arithmetic: at a worker for each gradient, and at the server for each call."""

    worker: float
    calls: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Software:
    """What a message costs the processor of each end: seconds, and seconds per byte."""

    per_message: float
    per_byte: float


def given_gradients(seconds: float) -> GradientTimes:
    return GradientTimes((seconds,), Constant(seconds), given=True)


def gradient_times(task: Task, device: str, threads: int) -> GradientTimes:
    """Compute gradients of a worker, as a run does."""
    place = torch.device(device)
    job = task if device == "cpu" else task.on(place)
    x, batches, buffers = job.start(0).to(place), job.batches(0, 1, 0), job.buffers() or None
    out, found, torn = torch.empty_like(x), [], 0
    with torch_threads(threads):
        until = time.perf_counter() + SECONDS
        for number in range(WARM_UP + GRADIENTS):
            watch = CoreTimer(place)
            job.grad(x, next(batches), out, buffers)
            seconds = watch.seconds()
            if number >= WARM_UP:
                found.append(seconds)
                torn += watch.torn
            if time.perf_counter() > until and len(found) >= 3:
                break
    return GradientTimes(tuple(found), fitted(found), device, torn=torn)


def kept_gradients(task: Task, device: str, directory: Path) -> GradientTimes:
    """The gradient times of an earlier call in this directory, or those of now, which are kept there: simulations that
    were made with them can go on only with the same times."""
    path = directory / f"gradients-{device}.json"
    about = {"task": task.name, "batch": task.batch}
    if path.is_file():
        known = read_json(path)
        if known.get("about") == about:
            seconds = tuple(map(float, known["seconds"]))
            return GradientTimes(seconds, fitted(seconds), device, torn=int(known["torn"]))
    found = gradient_times(task, device, 1)
    directory.mkdir(parents=True, exist_ok=True)
    write_json(path, {"about": about, "seconds": list(found.seconds), "torn": found.torn})
    return found


class _TimedDriver(StepDriver):
    """A step driver that adds up the seconds inside the scheme's own code."""

    __slots__ = ("place", "seconds")

    def __init__(self, scheme: Scheme, worker: Any, place: torch.device) -> None:
        super().__init__(scheme, worker)
        self.seconds, self.place = 0.0, place

    def advance(self, answer: Any) -> Op[Any] | None:
        watch = CoreTimer(self.place)
        try:
            return super().advance(answer)
        finally:
            self.seconds += watch.seconds()


class _MeasuringEngine(SimulationEngine):
    """A simulation of two workers that measures how long arithmetic takes: of steps, and of the server's calls."""

    def __init__(self, task: Task, scheme: Scheme, place: torch.device) -> None:
        super().__init__(task, scheme, workers=2, seed=0, cost=Cost(), device=place)
        self.calls: dict[str, list[float]] = defaultdict(list)
        self.drivers = []
        for seat in self.seats:
            seat.driver = driver = _TimedDriver(self.scheme, seat.worker, place)
            self.drivers.append(driver)
        if self.servers is not None:
            submit = self._submit

            def timed(rank: int, call: Any, ticket: Any = None) -> Any:
                watch = CoreTimer(place)
                answers = submit(rank, call, ticket)
                self.calls[call.method.name].append(watch.seconds())
                return answers

            self._submit = timed


def arithmetic_of(scheme: Scheme, task: Task, device: str, threads: int, gradients: int = 24) -> Arithmetic:
    """Measured on a vector of the task's length. The server's calls are those of the simulator, which are the real
    ones: the same scheduler performs them in processes."""
    shapes = tuple((name, tuple(shape)) for name, shape in task.parameters())
    length = len(task.start(0))
    twin = TimingTask(length, 1, shapes, fill=1e-6)
    place = torch.device(device)
    with torch_threads(threads):
        engine = _MeasuringEngine(twin, scheme, place)

        def enough(running: SimulationEngine) -> None:
            if running.gradients >= gradients:
                running.stopped = "measured"

        per_worker = scheme.gradients_per_update(2) or 2.0
        # a whole window is long: the arithmetic of its gradients is known after some of them
        limit = float("inf") if per_worker <= gradients else gradients / 2
        engine.run(watch=enough, seconds=limit)
    done = max(engine.gradients, 1)
    calls = {name: statistics.median(times) for name, times in engine.calls.items()}
    return Arithmetic(sum(driver.seconds for driver in engine.drivers) / done, calls)


def loopback() -> Software:
    """Send messages through a TCP connection of this machine to itself, and take the processor's time at one end, which
    does not depend on who else uses this machine."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        here = socket.create_connection(listener.getsockname())
        there, _ = listener.accept()
    with here, there:
        for end in (here, there):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            end.settimeout(30)
        echo = threading.Thread(target=_echo, args=(there,), daemon=True)
        echo.start()
        small = statistics.median(_round_trip(here, SMALLEST) for _ in range(ROUNDS))
        large = min(_round_trip(here, PORTION) for _ in range(8))
        here.shutdown(socket.SHUT_WR)
        echo.join()
    # an end sends and receives each message
    return Software(small / 2, max(large - small, 0.0) / (2 * PORTION))


def _echo(end: socket.socket) -> None:
    data = bytearray(PORTION)
    while True:
        size = end.recv_into(memoryview(data)[:4])
        if not size:
            return
        while size < 4:
            size += end.recv_into(memoryview(data)[size:4])
        whole = int.from_bytes(data[:4], "little")
        size = 0
        while size < whole:
            size += end.recv_into(memoryview(data)[size:whole])
        end.sendall(memoryview(data)[:whole])


def _round_trip(end: socket.socket, size: int) -> float:
    data = bytearray(size)
    begin = time.thread_time()
    end.sendall(size.to_bytes(4, "little"))
    end.sendall(data)
    done = 0
    while done < size:
        done += end.recv_into(memoryview(data)[done:])
    return time.thread_time() - begin


def device_of(gpu: bool) -> str:
    if gpu and not torch.cuda.is_available():
        raise UsageError(
            "plan: torch finds no GPU here, so gradients cannot be measured on one; say how long one takes there with "
            "--gradient-time 35ms"
        )
    return "cuda" if gpu else "cpu"


class CoreTimer:
    """Wall time since its start; the processor's time where the system gave the core to others in between. A plan is
    for nodes that have nothing else to do, and the machine that measures may not be idle."""

    def __init__(self, place: torch.device) -> None:
        self._place, self.torn = place, False
        self._begin = self._now()

    def _now(self) -> tuple[float, float, int]:
        if self._place.type == "cuda":
            torch.cuda.synchronize(self._place)
        switches = resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw
        return time.perf_counter(), time.thread_time(), switches

    def seconds(self) -> float:
        wall, cpu, switches = (now - then for now, then in zip(self._now(), self._begin, strict=True))
        self.torn = switches > 0 and self._place.type == "cpu"
        return cpu if self.torn else wall
