"""Replays one process life of a worker: its steps are driven as far as its log goes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from paceline.config import build
from paceline.errors import DataError
from paceline.ops import Call, Grad, Mean, Meet, Met, Op, Pending, Receive, Send, Start, copied, mapped
from paceline.runs.checkpoint import Checkpoint
from paceline.runs.order_history import History, WorkerLife
from paceline.runs.order_log import RecordKind
from paceline.runtime.messages import SEQUENCE, STEP, MessageCells, Place
from paceline.runtime.step_driver import StepDriver
from paceline.scheme import Scheme
from paceline.state import State
from paceline.task import Batch, Task
from paceline.worker import Worker

KEPT = 4  # meetings whose vectors are kept: others may come to one that this worker has left


class Parted(Exception):
    """The replay does something else than the log recorded."""


class _LifeEnded(Exception):
    """The log goes no further: the run ended, the worker died, or the run returned to a checkpoint."""


class WorkerReplay:
    """Replays one process life of a worker. `go` runs until it needs a reply or a mean."""

    def __init__(
        self,
        history: History,
        life: WorkerLife,
        scheme: Scheme,
        task: Task,
        x0: Tensor,
        device: torch.device,
        start: Checkpoint | None,
        judge: Callable[[WorkerReplay, float, float], None],
    ) -> None:
        """`start`: the checkpoint that this life resumed from; `judge` compares a loss with the recorded one."""
        self.life, self.rank, self.task, self.device = life, life.rank, task, device
        self.seed, self.workers, self._folder = history.plan.seed, history.plan.workers, history.path
        self._first_scheme, self._judge = scheme, judge
        self._records = iter(life.records)
        self._next = next(self._records, None)
        self.generation = life.begun["generation"]
        self.outbox: deque[tuple[Call[Any], Pending[Any]]] = deque()
        self.arrived: dict[int, tuple[Mean, Pending[Any]]] = {}  # number of a mean -> this worker's contribution
        self.offers: dict[int, Meet] = {}  # number of a meeting -> what this worker has given to its last few
        self.meeting: tuple[int, Pending[Any]] | None = None  # that it has come to and not left
        self.posting: tuple[Send, Pending[Any], int] | None = None  # a message, and the slot that it was put in
        self.collecting: tuple[Pending[Any], list[Place]] | None = None  # the messages that it received
        self.collected: set[Place] = set()
        self.awaited: Pending[Any] | None = None  # what the step waits for
        self.read: tuple[Call[Any], Pending[Any], int] | None = None  # at this position of the server
        self.returning: int | None = None  # waits for the return to a checkpoint that begins this generation
        self._answer: Any = None
        self.moves = 0  # number of times that a step was advanced
        self.over = False
        saved: dict[str, Tensor] = {}
        if life.begun["cells"]:
            saved = self._cells(life.begun["cells"])
        elif start is not None:
            saved = _part_of(start, self.rank)
        self._take(scheme.worker_state(x0, self.workers), task.buffers(), saved, life.begun)

    def _cells(self, name: str) -> dict[str, Tensor]:
        path = self._folder / name
        try:
            return load_file(path)
        except (OSError, SafetensorError) as error:
            raise DataError(f"{path} cannot be read: {error}") from error

    def _take(self, cells: State, buffers: dict[str, Tensor], saved: dict[str, Tensor], begun: dict[str, Any]) -> None:
        """Continue with these cells and buffers, or with the saved ones if there are any."""
        if saved:
            try:
                cells.restore({name: saved[f"cell.{name}"] for name in cells})
                buffers = {name: saved[f"buffer.{name}"] for name in buffers}
            except KeyError as error:
                where = f"what worker {self.rank} began with in {self._folder}"
                raise DataError(f"{where} has no {error.args[0]}") from error
        self._kinds, self._plain_buffers = cells, buffers
        # on a CPU another state of the same tensors
        self.worker = Worker(self.rank, self.workers, cells.on(self.device), self.seed)
        if self._first_scheme.sends_messages():
            self.messages = MessageCells(self.rank, self.worker.state)
        self.worker.t = begun["t"]
        if "rng" in saved:
            self.worker.rng.set_state(saved["rng"])
        self.buffers = {name: buffer.to(self.device) for name, buffer in buffers.items()}
        first = begun["gradients"]
        self._batches: Iterator[Batch] = self.task.batches(self.rank, self.workers, self.seed, first=first)
        self._driver = StepDriver(build.scheme_of(self._first_scheme, begun["overrides"]), self.worker)

    def go_back(self, generation: int, saved: Checkpoint) -> None:
        """Return to a checkpoint and drop what was under way, unless this life died before the return or took part
        only in a later one."""
        while self._next is not None and "return" not in self._next.note:
            self._consume()
        if self._next is None:
            self.over = True
            return
        if self._next.note["return"] > generation:
            self.returning = self._next.note["return"]
            return
        self.outbox.clear()
        self.arrived.clear()
        self.offers.clear()
        self.collected.clear()
        self.meeting = self.posting = self.collecting = None
        self.read = self.awaited = self.returning = self._answer = None
        self.generation = generation
        self._driver.close()
        t, gradients, _ = saved.tensors[f"person.{self.rank}"].tolist()
        begun = {"t": t, "gradients": gradients, "overrides": saved.numbers["overrides"]}
        self._take(self._kinds, self._plain_buffers, _part_of(saved, self.rank), begun)
        self._consume()

    def go(self, until: int | None) -> Iterator[None]:
        """Run until a reply or a mean is needed; yields at the end of each step. `until`: stop at this version of x."""
        while not (self.over or self.awaited is not None or self.returning is not None):
            record = self._next
            if record is None or record.kind == RecordKind.END:
                self.over = True
            elif "return" in record.note:
                self.returning = record.note["return"]
            elif record.kind in (RecordKind.NOTE, RecordKind.DECIDED, RecordKind.CHANGE):
                self._consume()
                if record.kind == RecordKind.CHANGE:
                    self._driver.scheme = build.scheme_of(self._driver.scheme, record.values[0])
                elif record.note.get("cells"):  # the worker has taken over the cells of another
                    self._take(self._kinds, self._plain_buffers, self._cells(record.note["cells"]), record.note)
            elif until is not None and not self._driver.running and self.worker.state.v >= until:
                self.over = True
            else:
                try:
                    stepped = self._advance()
                except _LifeEnded:
                    self.returning = None if self._next is None else self._next.note.get("return")
                    self.over = self.returning is None
                    return
                if stepped:
                    yield

    def _consume(self) -> None:
        self._next = next(self._records, None)

    def _expect(self, kind: RecordKind, what: str) -> tuple[Any, ...]:
        while self._next is not None and self._next.kind == RecordKind.DECIDED:  # known from the beginning
            self._consume()
        record = self._next
        if record is None or record.kind == RecordKind.END or "return" in record.note:
            raise _LifeEnded
        if record.kind != kind:
            raise Parted(f"it comes to {what}, which is not what was recorded")
        self._consume()
        return record.values

    def _advance(self) -> bool:
        """Run to the next operation of a step; True at the end of a step."""
        if not self._driver.running:
            self._driver.begin()
        answer, self._answer = self._answer, None
        self.moves += 1
        op = self._driver.advance(answer)
        if op is None:
            self.worker.t += 1
            if self._next is not None and self._next.kind == RecordKind.STEP:
                self._consume()
            return True
        if isinstance(op, Start):
            self._answer = self._begin(copied(op.op))
            return False
        pending = op if isinstance(op, Pending) else self._begin(op)
        self._answer, self.awaited = pending.result, None if pending.done else pending
        return False

    def _begin(self, op: Op[Any]) -> Pending[Any]:
        """Begin an operation. It is done at once, unless the engine has to give its result."""
        pending: Pending[Any] = Pending(op)
        if isinstance(op, Call):
            self._call(op, pending)
        elif isinstance(op, Mean):
            (number,) = self._expect(RecordKind.MEAN, "a mean")
            self.arrived[number] = Mean(op.v.cpu(), op.weight, op.among), pending
        elif isinstance(op, Meet):
            (number,) = self._expect(RecordKind.MEET, "a meeting")
            self.offers[number] = Meet(op.v.cpu().clone(), op.to, op.of, op.t, op.number, op.among)
            self.meeting = number, pending
            for old in [one for one in self.offers if one <= number - KEPT]:
                del self.offers[old]
        elif isinstance(op, Send):
            (slot,) = self._expect(RecordKind.SENT, "a message that it sends")
            if slot < 0:
                pending.done, pending.result = True, False
            else:
                self.posting = op, pending, slot
        elif isinstance(op, Receive):
            (number,) = self._expect(RecordKind.RECEIVED, "messages that it receives")
            places = [Place(*self._expect(RecordKind.TAKEN, "messages that it receives")) for _ in range(number)]
            if places:
                self.collecting = pending, places
            else:
                pending.done, pending.result = True, ()
        else:
            pending.done, pending.result = True, self._gradient(op) if isinstance(op, Grad) else None
        return pending

    def _gradient(self, op: Grad) -> Tensor | None:
        if self._next is not None and self._next.kind == RecordKind.STOPPED:
            self._consume()
            return None
        (recorded,) = self._expect(RecordKind.GRAD, "a gradient")
        batch = next(self._batches)
        self.worker.loss, g = self.task.grad(op.x, batch, torch.empty_like(self.worker.state.x), self.buffers or None)
        self._judge(self, recorded, self.worker.loss)
        return g

    def _call(self, op: Call[Any], pending: Pending[Any]) -> None:
        while op.method.reads and self._next is not None and self._next.kind == RecordKind.ASK:
            self._consume()
        if op.method.reads and self._next is not None and self._next.kind == RecordKind.READ:
            _, position = self._expect(RecordKind.READ, "a look at the server's state")
            self.read = op, pending, position
            return
        self._expect(RecordKind.POST, f"{op.method.name}()")
        if op.method.silent:  # the step goes on, and may change its tensors
            op, pending.done = Call(op.method, mapped(Tensor.clone, op.args)), True
        self.outbox.append((op, pending))

    def holds(self, place: Place) -> bool:
        """Whether this worker has sent the message of that place in a step that is finished, and not another since."""
        head = self.messages.heads[place.slot]
        return bool(head[SEQUENCE] == place.sequence and head[STEP] < self.worker.t)

    def receipts(self) -> Iterator[tuple[int, Place]]:
        """The messages that this life has received, each with its generation."""
        generation = self.life.begun["generation"]
        for record in self.life.records:
            generation = record.note.get("return", generation)
            if record.kind == RecordKind.TAKEN:
                yield generation, Place(*record.values)

    def post(self) -> None:
        """Put a message into its slot."""
        assert self.posting is not None
        (op, pending, slot), self.posting = self.posting, None
        self.messages.put(slot, op, self.worker.t, 0)
        self.give(pending, True)

    def collect(self, senders: Sequence[WorkerReplay]) -> None:
        """Take messages, each from its sender."""
        assert self.collecting is not None
        (pending, places), self.collecting = self.collecting, None
        pairs = zip(places, senders, strict=True)
        taken = [self.messages.take(place, sender.messages, self.worker.t, 0) for place, sender in pairs]
        self.collected.update(places)
        self.give(pending, tuple(taken))

    def give(self, pending: Pending[Any], result: Any) -> None:
        """The result of a call, of a read of the server's state, or of a mean."""
        if isinstance(result, Met):
            vectors = {rank: vector.to(self.device) for rank, vector in result.vectors.items()}
            result, self.meeting = Met(result.present, vectors, result.numbers), None
        else:
            result = mapped(lambda tensor: tensor.to(self.device), result)
        pending.done, pending.result = True, result
        if self.awaited is pending:
            self.awaited = self.read = None
            self._answer = pending.result


def _part_of(saved: Checkpoint, rank: int) -> dict[str, Tensor]:
    """A worker's part of a checkpoint, with the names that its own files use."""
    cells = {f"cell.{name}": tensor for name, tensor in saved.under(f"worker.{rank}.").items()}
    buffers = {f"buffer.{name}": tensor for name, tensor in saved.under(f"buffer.{rank}.").items()}
    return cells | buffers | {"rng": saved.tensors[f"rng.{rank}"]}
