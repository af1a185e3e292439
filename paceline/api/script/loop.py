"""A script's own loop as a worker: each `step` gives the session one gradient."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from paceline.api.script.loader_sharding import Loader, own_items, size_of
from paceline.errors import UsageError
from paceline.hook import Hook
from paceline.ops import Grad
from paceline.processes.memory import snapshot
from paceline.processes.memory.board import FAILED, RUNNING, STOP
from paceline.processes.roles.train_loop import GradientBuffers
from paceline.processes.roles.worker_session import WorkerSession
from paceline.result import Staleness
from paceline.state import Vector
from paceline.task import Batch, Task
from paceline.torch_task import FlatModule, checked_loss, seeded

Evaluate = Callable[[nn.Module], Mapping[str, float]]


class ScriptTask(Task):
    """A script's model as a task, to start from, to evaluate and to save. The loop computes the gradients."""

    def __init__(self, model: nn.Module, evaluate: Evaluate | None, name: str) -> None:
        self.name, self.flat, self._evaluate = name, FlatModule(model), evaluate
        self.loss = math.nan  # of the last step
        self.device = self.flat.parameters[0].device
        self._x, self._out = self.flat.vector(), torch.zeros(self.flat.size, dtype=self.dtype, device=self.device)
        self._scratch = self._out  # for gradients that are not used
        self._shared: dict[str, Tensor] = {}
        self._buffers = self.flat.buffers()

    @property
    def dtype(self) -> torch.dtype:
        return self.flat.parameters[0].dtype

    def start(self, seed: int) -> Vector:
        return self.flat.vector()

    def buffers(self) -> dict[str, Tensor]:
        return {name: buffer.detach().cpu().clone() for name, buffer in self.flat.buffers().items()}

    def batches(self, rank: int, workers: int, seed: int, first: int = 0) -> Iterator[Batch]:
        raise UsageError("the data of a script are its own")

    def grad(self, x: Vector, batch: Batch, out: Vector | None = None, buffers: Any = None) -> tuple[float, Vector]:
        raise UsageError("the gradients of a script are computed in its own loop")

    def evaluate(self, x: Vector, buffers: Mapping[str, Tensor] | None = None) -> dict[str, float]:
        """The metrics of the script's function at x; afterwards the model is as before."""
        if self._evaluate is None:
            return {"loss": self.loss}
        module = self.flat.module
        modes = [(one, one.training) for one in module.modules()]
        self.flat.bind(x.detach(), self._scratch)
        if buffers is not None:
            self.flat.bind_buffers(self._here(buffers))
        module.eval()
        try:
            with torch.no_grad(), seeded(0):
                found = self._evaluate(module)
        finally:
            for one, mode in modes:
                one.training = mode
            self.flat.bind(self._x, self._out)
            self.flat.bind_buffers(self._buffers)
        if not isinstance(found, Mapping):
            raise UsageError(f"evaluate() must give metrics by name, such as {{'accuracy': 0.97}}, not {found!r}")
        return {"loss": self.loss} | {name: float(value) for name, value in found.items()}

    def _here(self, buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: buffer.to(self.device) for name, buffer in buffers.items()}

    # for the loop

    def settle(self, buffers: dict[str, Tensor]) -> None:
        """Use the worker's buffers in shared memory from now on."""
        self._shared, self._buffers = buffers, self._here(buffers)
        self.bind(self._x, self._scratch)

    def bind(self, x: Vector, out: Vector) -> None:
        """Let the model compute at x, and write gradients to out."""
        # other tensors of the same memory: GradientBuffers counts references to a gradient
        self._x, self._out = x.detach(), out.detach()
        self.flat.bind(x, out)
        self.flat.bind_buffers(self._buffers)

    def gather(self, out: Vector) -> None:
        """Copy gradients that autograd or the script put elsewhere into `out`."""
        place, width = out.data_ptr(), out.element_size()
        views: tuple[Tensor, ...] = ()
        for number, parameter in enumerate(self.flat.parameters):
            grad = parameter.grad
            if grad is None or grad.data_ptr() != place:  # after a zero_grad(), which frees the gradients
                views = views or torch.split_with_sizes(out.detach(), self.flat.sizes)
                own = views[number].view(parameter.shape)
                if grad is not None:
                    own.copy_(grad)
                else:
                    own.zero_()
                parameter.grad = own
            place += parameter.numel() * width
        self.flat.keep_buffers(self._buffers)
        for name, buffer in self._buffers.items():
            if buffer is not self._shared[name]:  # on another device
                self._shared[name].copy_(buffer)

    def let_go(self, x: Vector | None = None, buffers: Mapping[str, Tensor] | None = None) -> None:
        """Give the model memory of its own again, with these parameters and buffers or the present ones."""
        x, buffers = self._x if x is None else x, self._buffers if buffers is None else buffers
        parts = torch.split_with_sizes(x.to(self.device), self.flat.sizes)
        for parameter, part in zip(self.flat.parameters, parts, strict=True):
            parameter.grad = None
            parameter.data = part.clone().view(parameter.shape)
        self.flat.bind_buffers({name: buffer.clone() for name, buffer in self._here(buffers).items()})


class Pace:
    """The training of a script: `with paceline.attach(model, …) as pace: for … in pace.share(loader): …`"""

    def __init__(self, session: WorkerSession, task: ScriptTask, hooks: list[Hook], around: ExitStack) -> None:
        self._session, self._task, self._around = session, task, around
        self._board = session.board
        self._fed = any(type(hook).feed is not Hook.feed for hook in hooks)
        self._room = GradientBuffers(session)
        self._out: Vector | None = None  # where the next gradient goes
        self._seen = 0  # samples that share() has given since the last step
        self._returns = 0
        self.rank, self.workers, self.chief = session.rank, session.worker.workers, session.chief
        self.resumed = bool(self._board.begun[self.rank] or session.worker.t)  # restarted, or from a checkpoint
        self.begun = self.done = self.ended = False

    @property
    def updates(self) -> int:
        """Updates of the centre so far."""
        return self._session.view.updates

    @property
    def staleness(self) -> Staleness:
        """The staleness of the gradients that have entered the centre."""
        return self._session.view.staleness

    def say(self, text: str) -> None:
        """Show a message to the user; what a script prints goes to the log of its role."""
        self._session.view.say(text)

    def stop(self, reason: str) -> None:
        """End the run for all workers (`break` ends only this worker)."""
        self._session.view.stop(reason)

    def __enter__(self) -> Self:
        if self.begun:
            raise UsageError("the block of this attach() has been entered before; a script trains once")
        self.begun = True
        try:
            self._task.settle(self._session.cells.buffers)
            with torch.no_grad():
                # a worker that was restarted after the last checkpoint has only the rest of the script to do
                self._turn(None if self._board.get("over") else self._session.begin())
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def share(self, loader: Loader) -> Iterator[Any]:
        """This worker's shard of the data, epoch after epoch until the run ends: item i of an epoch belongs to worker
        i % workers. `loader`: a DataLoader, a list, a function that gives an iterator, or an iterator (which is read
        once: then this worker leaves)."""
        self._inside("share()")
        return self._shared(own_items(loader, self.rank, self.workers, self._session.memory.plan.seed))

    def _shared(self, items: Iterator[Any]) -> Iterator[Any]:
        nothing = object()
        while not self.done:
            item = next(items, nothing)
            if item is nothing:
                self._session.view.say(f"worker:{self.rank} leaves: its data have run out")
                self._turn(None)
                return
            item, size = self._with_hooks(item, size_of(item))
            self._seen += size
            yield item

    def _with_hooks(self, item: Any, size: int) -> tuple[Any, int]:
        if not self._fed:
            return item, size
        parts = (item,) if isinstance(item, Tensor) else item
        if not (isinstance(parts, tuple | list) and all(isinstance(part, Tensor) for part in parts)):
            raise UsageError(f"a hook wants to see the mini-batches; a {type(item).__name__} is no tuple of tensors")
        fed = self._session.hooks.feed(Batch(tuple(parts), size))
        if isinstance(item, Tensor):
            return fed.data[0], fed.size
        return list(fed.data) if isinstance(item, list) else fed.data, fed.size

    def step(self, loss: Tensor, size: int | None = None) -> bool:
        """Compute the gradient of the loss, give it to the session, and set the model to the parameters of the next
        step; False at the end. `size`: the samples of the loss (default: those from share() since the last step)."""
        self._inside("step()")
        if self._out is None:
            return False
        checked_loss(loss, trains=True).backward()  # type: ignore[no-untyped-call]
        self._task.gather(self._out)
        self._task.loss = loss.item()
        g, self._out = self._out, None
        size, self._seen = size or self._seen or 1, 0
        session = self._session
        if self.chief and not self._board.gradients[0]:
            session.control.send({"batch": size})
        with torch.no_grad():
            request = session.give(self._task.loss, g, size)
            del g  # or its buffer would never be free
            self._turn(request)
        return not self.done

    def _turn(self, request: Grad | None) -> None:
        """Prepare for the next gradient."""
        if request is None:
            self._out, self.done = None, True
            return
        if self._returns != self._session.membership.returns:
            self._returns = self._session.membership.returns
            self._task.settle(self._session.cells.buffers)
        self._out = self._room.free()
        self._out.zero_()
        self._task.bind(request.x, self._out)

    def _inside(self, what: str) -> None:
        if not self.begun:
            raise UsageError(f"pace.{what} belongs inside the block: `with paceline.attach(model, …) as pace:`")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        left, self.done, self._out = not self.done, True, None
        with torch.no_grad():
            if error is not None:
                with ExitStack() as rest:
                    rest.callback(self._around.__exit__, kind, error, trace)
                    rest.callback(self._session.hooks.failed, error)
                    self._task.let_go()
                return
            if left and self._board.run[STOP] == RUNNING:
                self.say(f"worker:{self.rank} leaves: its loop has ended at step {self._session.worker.t}")
            with self._around:
                self._finish()
                self.ended = True

    def _finish(self) -> None:
        session, board, memory = self._session, self._board, self._session.memory
        if not board.get("over"):
            session.finish()
        # the chief ends last: all models get the parameters that it saves
        memory.wakeup.wait(lambda: bool(board.get("over") or board.run[STOP] == FAILED))
        if board.run[STOP] == FAILED:
            raise SystemExit(0)  # another process reported a failure: the rest of the script must not run
        x = snapshot.model_of(memory, prefix=snapshot.KEEP)
        self._task.let_go(x, snapshot.buffers_of(memory, self._task.buffer_policy, prefix=snapshot.KEEP))
