"""The loop of a script as a worker, whatever its framework: each gradient goes to the session, which says where the
next one is wanted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from paceline.api.script.loader_sharding import Loader, Shard, samples_in
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
from paceline.torch_task.random_numbers import Seeding, all_seeded


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


class ScriptLoop:
    """The training of a script: `with paceline.attach(model, …) as pace: for … in pace.share(loader): …`"""

    seeding: Seeding = staticmethod(all_seeded)  # the random numbers that loaders draw orders from
    shows_loss = "pass it, as in pace.step(loss.detach())"  # how a script that gives no loss can do so

    def __init__(self, session: WorkerSession, task: ScriptTask, hooks: Sequence[Hook], around: ExitStack) -> None:
        session.profile.script(session)
        self._session, self._task, self._around = session, task, around
        self._board = session.board
        self._fed = any(type(hook).feed is not Hook.feed for hook in hooks)
        self._room = GradientBuffers(session)
        self._out: Vector | None = None  # where the next gradient goes
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
            self._guarded()
            self._task.settle(self._session.cells.buffers)
            with torch.no_grad():
                # a worker that was restarted after the last checkpoint has only the rest of the script to do
                self._turn(None if self._board.get("over") else self._session.begin())
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def _guarded(self) -> None:
        """The block begins: watch for what would go past the scheme."""

    def share(self, loader: Loader, epochs: int | None = None) -> SharedItems:
        """This worker's shard of the data, epoch after epoch until the run ends: item i of an epoch belongs to worker
        i % workers. `loader`: a DataLoader, a list, a function that gives an iterator, or an iterator (which is read
        once: then this worker leaves). len() is that of an epoch, `epoch` the number of the present one, from 0.

        epochs: end after that many; the next call for the same loader continues with the next epoch."""
        self._inside("share()")
        shard = self._shards.get(id(loader))
        if shard is None:
            shard = Shard(loader, self.rank, self.workers, self._session.memory.plan.seed, self.seeding)
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
            item, size = self._with_hooks(item, samples_in(item))
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

    def _give(self, loss: float | None, size: int | None) -> None:
        """Give the gradient in `_out` to the session, and set the model to the parameters of the next step."""
        g, self._out = self._out, None
        assert g is not None
        task, session = self._task, self._session
        task.loss = loss
        size, self._seen = size or self._seen or 1, 0
        if self.chief and not self._board.gradients[0]:
            session.control.send({"batch": size})
            if loss is None:
                self.say(f"the loss is not shown: {self.shows_loss}")
        with torch.no_grad():
            request = session.give(loss, g, size)
            del g  # or its buffer would never be free
            self._turn(request)

    def _turn(self, request: Grad | None) -> None:
        """Prepare for the next gradient."""
        if request is None:
            self._out, self.done = None, True
            return
        if self._returns != self._session.membership.returns:
            self._returns = self._session.membership.returns
            self._task.settle(self._session.cells.buffers)
        self._out = self._room.free()
        self._place(request.x, self._out)

    def _place(self, x: Vector, out: Vector) -> None:
        self._task.bind(x, out)

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
