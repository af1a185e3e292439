"""A script's own loop as a worker: each `step` gives the session one gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.api.script.loader_sharding import Loader, Shard
from paceline.api.script.optimizer_guard import OptimizerGuard, ScriptOptimizer
from paceline.api.script.script_task import ScriptTask
from paceline.errors import UsageError
from paceline.hook import Hook
from paceline.ops import Grad
from paceline.processes.memory import snapshot
from paceline.processes.memory.board import FAILED, RUNNING, STOP
from paceline.processes.roles.stopwatch import Category
from paceline.processes.roles.train_loop import GradientBuffers
from paceline.processes.roles.worker_session import WorkerSession
from paceline.result import Staleness
from paceline.state import Vector
from paceline.task import Batch
from paceline.torch_task import checked_loss
from paceline.torch_task.batch_parts import size_of


class SharedItems:
    """What `pace.share` gives: the items of one worker, for the loop of a script. Other attributes are the loader's."""

    def __init__(self, shard: Shard, items: Callable[[], Iterator[Any]]) -> None:
        self._shard, self._items = shard, items

    def __iter__(self) -> Iterator[Any]:
        return self._items()

    def __len__(self) -> int:
        """Items of this worker in one epoch."""
        return len(self._shard)

    @property
    def epoch(self) -> int:
        """The epoch that the last item is of, from 0."""
        return self._shard.epoch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._shard.loader, name)


class Pace:
    """The training of a script: `with paceline.attach(model, …) as pace: for … in pace.share(loader): …`"""

    def __init__(
        self,
        session: WorkerSession,
        task: ScriptTask,
        hooks: list[Hook],
        around: ExitStack,
        optimizers: Sequence[Optimizer] = (),
        named: Mapping[str, Optimizer] | None = None,
    ) -> None:
        session.profile.script(session)
        self._session, self._task, self._around = session, task, around
        self._board = session.board
        self._guard = OptimizerGuard(task.flat.parameters, optimizers)
        self._turns = {
            name: [p for group in one.param_groups for p in group["params"]] for name, one in (named or {}).items()
        }
        self._fed = any(type(hook).feed is not Hook.feed for hook in hooks)
        self._room = GradientBuffers(session)
        self._out: Vector | None = None  # where the next gradient goes
        self._probe: Tensor | None = None  # a view of it
        self._clean = 0  # its version before any backward pass
        self._losses: float | None = None  # of the backward passes since the last step
        self._seen = 0  # samples that share() has given since the last step
        self._returns = 0
        self._shards: dict[int, Shard] = {}
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

    @property
    def optimizer(self) -> ScriptOptimizer:
        """An optimizer whose step() is `pace.step()`, for GradScaler and the like. The scheme has the learning rate."""
        return ScriptOptimizer(self._task.flat.parameters, self.step)

    @property
    def optimizers(self) -> dict[str, ScriptOptimizer]:
        """The same for optimizers that are stepped in turns: the step() of each is `pace.step(of=NAME)`."""
        return {name: ScriptOptimizer(own, partial(self.step, of=name)) for name, own in self._turns.items()}

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
        self._around.enter_context(self._guard.watching())
        try:
            self._task.settle(self._session.cells.buffers)
            with torch.no_grad():
                # a worker that was restarted after the last checkpoint has only the rest of the script to do
                self._turn(None if self._board.get("over") else self._session.begin())
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def share(self, loader: Loader, epochs: int | None = None) -> SharedItems:
        """This worker's shard of the data, epoch after epoch until the run ends: item i of an epoch belongs to worker
        i % workers. `loader`: a DataLoader, a list, a function that gives an iterator, or an iterator (which is read
        once: then this worker leaves). len() is that of an epoch, `epoch` the number of the present one, from 0.

        epochs: end after that many; the next call for the same loader continues with the next epoch."""
        self._inside("share()")
        shard = self._shards.get(id(loader))
        if shard is None:
            shard = Shard(loader, self.rank, self.workers, self._session.memory.plan.seed)
            self._shards[id(loader)] = shard  # which holds the loader, so that no other has its id
            if shard.note and self.chief:
                self.say(shard.note)
        return SharedItems(shard, partial(self._shared, shard, epochs))

    def _shared(self, shard: Shard, epochs: int | None) -> Iterator[Any]:
        items = shard.items(epochs)
        nothing = object()
        draw = self._session.profile.timed(Category.DATA, lambda: next(items, nothing))
        while not self.done:
            item = draw()
            if item is nothing:
                if epochs is None:
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

    def backward(self, loss: Tensor) -> None:
        """`loss.backward()`, for a step of several backward passes. The run shows the sum of their losses: divide each
        by their number, as for the gradient."""
        self._inside("backward()")
        if self._out is not None:
            self._backward(loss)
            self._losses = loss.item() if self._losses is None else self._losses + loss.item()

    def step(self, loss: Tensor | float | None = None, size: int | None = None, of: str | None = None) -> bool:
        """Give the gradient to the session, and set the model to the parameters of the next step; False at the end.

        loss: of autograd: its backward pass is run first. A number, or a tensor without a graph (`loss.detach()`): the
              script has run the backward pass itself, and this is shown. None: that of `pace.backward`, or none.
        size: samples that the gradient is of; default: those from share() since the last step.
        of:   the optimizer that makes this step, where attach() was given several by name. Gradients of parameters that
              are not its own are dropped."""
        self._inside("step()")
        if self._out is None:
            return False
        if of not in (self._turns or {None}):
            known = (
                f"one of {', '.join(map(repr, self._turns))}" if self._turns else "None: attach() was given no names"
            )
            raise UsageError(f"of={of!r} is no optimizer of this run; it must be {known}")
        if isinstance(loss, Tensor) and (loss.requires_grad or not self._touched()):
            self.backward(loss)
        elif loss is not None:
            shown = float(loss)
            self._losses = shown if self._losses is None else self._losses + shown
        self._task.check_parameters()
        self._guard.check_rates()
        touched = self._touched()
        if not (self._task.gather(self._out) or touched):
            raise UsageError(
                "there is no gradient to give: no backward pass since the last step. Call loss.backward() first, or "
                "pass the loss: pace.step(loss)"
            )
        if of is not None:
            self._task.drop_gradients(self._turns[of])
        g, self._out = self._out, None
        self._task.loss, self._losses = self._losses, None
        size, self._seen = size or self._seen or 1, 0
        session = self._session
        if self.chief and not self._board.gradients[0]:
            session.control.send({"batch": size})
            if self._task.loss is None:
                self.say("the loss is not shown: pass it, as in pace.step(loss.detach())")
        with torch.no_grad():
            request = session.give(self._task.loss, g, size)
            del g  # or its buffer would never be free
            self._turn(request)
        return not self.done

    def _backward(self, loss: Tensor) -> None:
        try:
            checked_loss(loss, trains=True).backward()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            if "backward through the graph a second time" in str(error):
                error.add_note("pace.step(loss) runs the backward pass: after your own, write pace.step(loss.detach())")
            raise

    def _touched(self) -> bool:
        """Whether a backward pass has added to the gradient in place."""
        return self._probe is not None and self._probe._version != self._clean

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
        self._probe = self._task.flat.parameters[0].grad  # a view: all views of the vector have one version
        self._clean = self._probe._version if self._probe is not None else 0

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
