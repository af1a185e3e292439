"""Replays a worker between its start and its end or death: its steps are driven as far as its log goes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from paceline.config import build
from paceline.errors import DataError
from paceline.ops import Call, Grad, Mean, Op, Pending, Sleep, Start, copied, mapped
from paceline.runs.checkpoint import Checkpoint
from paceline.runs.order_history import WorkerLife
from paceline.runs.order_log import ASK, CHANGE, DECIDED, END, GRAD, MEAN, NOTE, POST, READ, STEP
from paceline.runtime.step_driver import StepDriver
from paceline.scheme import Scheme
from paceline.state import State
from paceline.task import Batch, Task
from paceline.worker import Worker


def _cells(path: Path) -> dict[str, Tensor]:
    """The cells that a life began with."""
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error


class Parted(Exception):
    """What is repeated has gone another way than what was recorded."""


class _LifeEnded(Exception):
    """The log goes no further: here the run ended, the worker died, or everybody went back."""


class WorkerReplay:
    """Replays one process life of a worker. `go` runs until it needs a reply or a mean."""

    def __init__(
        self,
        life: WorkerLife,
        scheme: Scheme,
        task: Task,
        seed: int,
        workers: int,
        device: torch.device,
        judge: Callable[[WorkerReplay, float, float], None],
    ) -> None:
        self.life, self.task, self.seed, self.workers, self.device = life, task, seed, workers, device
        self.rank = life.rank
        self._first_scheme = scheme
        self._judge = judge  # compares a loss with the recorded one
        self._records = iter(life.records)
        self._next = next(self._records, None)
        self.generation = life.begun["generation"]
        self.outbox: deque[tuple[Call[Any], Pending[Any] | None]] = deque()
        self.arrived: dict[int, Mean] = {}  # number of a mean -> what this worker brings
        self.position: int | None = None  # waits to read at this position of the server
        self.method: Call[Any] | None = None
        self.mean: int | None = None  # waits for the mean of this number
        self.returning: int | None = None  # waits until everybody goes back to a checkpoint
        self.called = False  # waits for the answer to a call
        self._means: dict[int, Any] = {}  # those that are there
        self._pending_means: dict[int, int] = {}  # id of a pending mean -> its number
        self._answer: Any = None
        self.moves = 0  # how often it has gone on
        self.over = False

    def begin(self, start: Checkpoint | None, x0: Tensor, buffers: dict[str, Tensor], at: Path) -> None:
        """Take the cells that this life began with."""
        begun, self._at = self.life.begun, at
        cells = self._first_scheme.worker(x0, self.workers)
        saved: dict[str, Tensor] = {}
        if begun["cells"]:
            saved = _cells(at / begun["cells"])
        elif start is not None:
            saved = part_of(start, self.rank)
        self._take(cells, buffers, saved, begun)

    def _take(self, cells: State, buffers: dict[str, Tensor], saved: dict[str, Tensor], begun: dict[str, Any]) -> None:
        if saved:
            try:
                cells.restore({name: saved[f"cell.{name}"] for name in cells})
                buffers = {name: saved[f"buffer.{name}"] for name in buffers}
            except KeyError as error:
                raise DataError(f"what worker {self.rank} began with in {self._at} has no {error.args[0]}") from error
        self.scheme = build.scheme_of(self._first_scheme, begun["overrides"])
        self._kinds, self._plain_buffers = cells, buffers
        over = {name: cells.cell(name) for name in cells}
        if self.device.type != "cpu":
            over = {name: cell.to(self.device) if cell.dim() else cell for name, cell in over.items()}
        self.worker = Worker(self.rank, self.workers, State.over(over), self.seed)
        self.worker.t = begun["t"]
        if "rng" in saved:
            self.worker.rng.set_state(saved["rng"])
        self.buffers = {name: buffer.to(self.device) for name, buffer in buffers.items()}
        self.gradients = begun["gradients"]
        self._batches: Iterator[Batch] = self.task.batches(self.rank, self.workers, self.seed, first=self.gradients)
        self._driver = StepDriver(self.scheme, self.worker)

    def go_back(self, generation: int, saved: Checkpoint) -> bool:
        """Everybody goes back to a checkpoint: skip what was under way. False if this life does not reach that far, or
        went back only later, with those who went back once more."""
        while self._next is not None and not self._returns():
            self._next = next(self._records, None)
        if self._next is None:
            self.over = True
            return False
        if self._next.values[0]["return"] > generation:
            self.returning = self._next.values[0]["return"]
            return False
        self.outbox.clear()
        self.position = self.mean = self.returning = self.method = self._answer = None
        self.called, self.generation = False, generation
        self._driver.close()
        t, gradients, _ = saved.tensors[f"person.{self.rank}"].tolist()
        begun = {"t": t, "gradients": gradients, "overrides": saved.numbers["overrides"]}
        self._take(self._kinds, self._plain_buffers, part_of(saved, self.rank), begun)
        self._consume()
        return True

    def _returns(self) -> bool:
        record = self._next
        return record is not None and record.kind == NOTE and "return" in record.values[0]

    @property
    def blocked(self) -> bool:
        waits = (self.position, self.mean, self.returning)
        return self.over or self.called or any(one is not None for one in waits)

    def go(self, until: int | None) -> Iterator[None]:
        """Run until others are needed; pauses at the end of each step. `until`: stop at this version of x."""
        while not self.blocked:
            if self._next is None or self._next.kind == END:
                self.over = True
                return
            if self._next.kind == NOTE:
                told = self._next.values[0]
                if "return" in told:
                    self.returning = told["return"]
                    return
                self._consume()
                if told.get("cells"):  # it has taken over another's on the way
                    self._take(self._kinds, self._plain_buffers, _cells(self._at / told["cells"]), told)
                continue
            if self._next.kind == DECIDED:
                self._consume()
                continue
            if self._next.kind == CHANGE:
                self.scheme = build.scheme_of(self.scheme, self._next.values[0])
                self._driver.scheme = self.scheme
                self._consume()
                continue
            if until is not None and not self._driver.running and self.worker.state.v >= until:
                self.over = True
                return
            try:
                stepped = self._advance()
            except _LifeEnded:
                if self._next is not None and self._next.kind == NOTE:
                    self.returning = self._next.values[0]["return"]
                else:
                    self.over = True
                return
            if stepped:
                yield

    def _consume(self) -> None:
        self._next = next(self._records, None)

    def _expect(self, kind: int, what: str) -> tuple[Any, ...]:
        while self._next is not None and self._next.kind == DECIDED:  # known from the beginning
            self._consume()
        record = self._next
        if record is None or record.kind == END or (record.kind == NOTE and "return" in record.values[0]):
            raise _LifeEnded
        if record.kind != kind:
            raise Parted(f"it comes to {what}, which is not what was recorded")
        self._consume()
        return record.values

    def _advance(self) -> bool:
        """To the next thing that a step waits for; True at the end of a step."""
        if not self._driver.running:
            self._driver.begin()
            self._answer = None
        answer, self._answer = self._answer, None
        self.moves += 1
        op = self._driver.advance(answer)
        if op is None:
            self.worker.t += 1
            if self._next is not None and self._next.kind == STEP:
                self._consume()
            return True
        self._perform(op)
        return False

    def _perform(self, op: Op[Any]) -> None:
        if isinstance(op, Grad):
            self._answer = self._gradient(op.x)
        elif isinstance(op, Call):
            self._call(op)
        elif isinstance(op, Mean):
            self._arrive(op)
        elif isinstance(op, Sleep):
            self._answer = None
        elif isinstance(op, Start):
            self._answer = self._start(copied(op.op))
        elif isinstance(op, Pending):
            self._await(op)

    def _gradient(self, x: Tensor) -> Tensor:
        (recorded,) = self._expect(GRAD, "a gradient")
        batch = next(self._batches)
        loss, g = self.task.grad(x, batch, torch.empty_like(self.worker.state.x), self.buffers or None)
        self.gradients += 1
        self.worker.loss = loss
        self._judge(self, recorded, loss)
        return g

    def _call(self, op: Call[Any]) -> None:
        while op.method.reads and self._next is not None and self._next.kind == ASK:
            self._consume()
        if op.method.reads and self._next is not None and self._next.kind == READ:
            _, self.position = self._expect(READ, "a look at the server's state")
            self.method = op
            return
        self._expect(POST, f"{op.method.name}()")
        if op.method.silent:
            op = Call(op.method, tuple(a.clone() if isinstance(a, Tensor) else a for a in op.args))
            self.outbox.append((op, None))
            self._answer = None
        else:
            self.outbox.append((op, None))
            self.called = True

    def _arrive(self, op: Mean) -> int:
        (number,) = self._expect(MEAN, "a mean")
        self.arrived[number] = Mean(op.v.cpu(), op.weight, op.among)
        self.mean = number
        return int(number)

    def _start(self, op: Op[Any]) -> Pending[Any]:
        pending: Pending[Any] = Pending(op)
        if isinstance(op, Grad):
            pending.done, pending.result = True, self._gradient(op.x)
        elif isinstance(op, Call):
            self._expect(POST, f"{op.method.name}()")
            self.outbox.append((op, pending))
        elif isinstance(op, Mean):
            self._pending_means[id(pending)] = self._arrive(op)
            self.mean = None
        else:
            pending.done = True
        return pending

    def _await(self, pending: Pending[Any]) -> None:
        if id(pending) in self._pending_means:
            number = self._pending_means.pop(id(pending))
            if number in self._means:
                self._answer = self._means.pop(number)
            else:
                self.mean = number
        elif pending.done:
            self._answer = pending.result
        else:
            self.called = True

    def give(self, result: Any, pending: Pending[Any] | None = None) -> None:
        """The answer to a call, to a read."""
        result = mapped(lambda tensor: tensor.to(self.device), result)
        if pending is not None:
            pending.done, pending.result = True, result
            if not self.called:
                return
        self.called, self.position, self.method = False, None, None
        self._answer = result

    def met(self, number: int, result: Tensor) -> None:
        """A mean is there."""
        del self.arrived[number]
        result = result.to(self.device)
        if self.mean == number:
            self.mean, self._answer = None, result
        else:
            self._means[number] = result


def part_of(saved: Checkpoint, rank: int) -> dict[str, Tensor]:
    """A worker's part of a checkpoint, named as its own files name it."""
    part: dict[str, Tensor] = {}
    for kind, prefix in (("cell", f"worker.{rank}."), ("buffer", f"buffer.{rank}.")):
        for name, tensor in saved.tensors.items():
            if name.startswith(prefix):
                part[f"{kind}.{name.removeprefix(prefix)}"] = tensor
    part["rng"] = saved.tensors[f"rng.{rank}"]
    return part
