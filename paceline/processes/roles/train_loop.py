"""The training loop of a worker: it computes the gradients that its session asks for."""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from pathlib import Path

import torch

from paceline.processes.roles import spare_cores
from paceline.processes.roles.stoppable import gradient_unless
from paceline.processes.roles.stopwatch import Category
from paceline.processes.roles.worker_session import WorkerSession
from paceline.processes.transport import StreamedGradients
from paceline.state import Vector
from paceline.task import Batch, Task


def run_to_end(session: WorkerSession, task: Task) -> None:
    """Train, and leave the run."""
    try:
        train(session, task)
    except BaseException as error:
        session.hooks.failed(error)
        raise
    else:
        session.finish()
    finally:
        session.log.close()


def train(session: WorkerSession, task: Task) -> None:
    """Compute gradients until the session asks for no more, or the data are exhausted."""
    rank = session.rank
    buffers = session.cells.live or None
    gradients, supply = GradientBuffers(session), session.profile.batches(BatchSupply(session, task))
    grad = session.profile.timed(Category.GRADIENT, task.grad)
    early = EarlyGradients(session.streamed, task) if session.streamed and task.follows else None
    feeding = session.hooks.feeding
    request = session.begin()
    session.waiting.meanwhile = supply.prepare
    with torch.no_grad(), closing(supply):
        while request is not None:
            with session.turn:
                drawn = supply.next()
                if drawn is None:
                    session.view.say(f"worker:{rank} leaves: its data have run out")
                    return
                batch = session.hooks.feed(drawn) if feeding else drawn
                out = gradients.free()
                usual = request.until is None and request.within is None
                useless = None if usual else session.useless(request)
                if early is not None and useless is None:
                    early.begin(out)
                try:
                    if useless is None:
                        found: tuple[float, Vector] | None = grad(request.x, batch, out, buffers)
                    else:
                        found = gradient_unless(useless, task, grad, request.x, batch, out, buffers)
                except Exception as error:
                    error.add_note(f"in the gradient of worker:{rank}, step {session.worker.t}")
                    raise
            del out
            if found is None:
                supply.put_back(drawn)
                request = session.stopped()
                continue
            loss, g = found
            del found
            if early is not None and useless is None:
                early.computed(g)
            request = session.give(loss, g, batch.size)
            del g


class EarlyGradients:
    """Lets gradients travel while the rest of them is computed, to where the last ones have gone."""

    def __init__(self, ways: Sequence[StreamedGradients], task: Task) -> None:
        self._ways, self._task = ways, task

    def begin(self, out: torch.Tensor) -> None:
        """A gradient is about to be computed into `out`."""
        ready = [tell for way in self._ways if (tell := way.early(out)) is not None]

        def final(index: int, version: int) -> None:
            for tell in ready:
                tell(index, version)

        self._task.follow(final if ready else None)

    def computed(self, g: torch.Tensor) -> None:
        for way in self._ways:
            way.computed(g)


class BatchSupply:
    """A worker's mini-batches. The next one is prepared while the worker would only wait for other processes. Where a
    core is free, the task may have a thread read them ahead."""

    def __init__(self, session: WorkerSession, task: Task) -> None:
        self._session = session
        self._begin = task.threaded if spare_cores.for_batches(session.memory) else task.prefetched
        self._batches: Iterator[Batch] = iter(())
        self._returns = -1
        self._ready: list[Batch | None] = []

    def next(self) -> Batch | None:
        """The next mini-batch; None when the data are exhausted."""
        if self._returns != self._session.membership.returns:  # at first, and after a return to a checkpoint
            self._ready.clear()
            self._end_reading()
            self._returns = self._session.membership.returns
            plan, rank = self._session.memory.plan, self._session.rank
            first = self._session.board.gradients[rank]
            self._batches = self._begin(rank, plan.workers, plan.seed, first, Path(plan.directory))
        return self._ready.pop() if self._ready else next(self._batches, None)

    def put_back(self, batch: Batch) -> None:
        """A mini-batch whose gradient was given up is the next one."""
        self._ready.append(batch)

    def close(self) -> None:
        """No batch is wanted any more."""
        self._session.waiting.meanwhile = None
        self._end_reading()

    def _end_reading(self) -> None:
        """End the processes or the thread that read ahead, if there are any. What they have read is dropped."""
        if isinstance(self._batches, Generator):
            self._batches.close()

    def prepare(self) -> None:
        if not self._ready and self._returns == self._session.membership.returns:
            with self._session.turn:
                self._ready.append(next(self._batches, None))


class GradientBuffers:
    """Where gradients are written: in shared memory, so that a push is a signal and no copy."""

    def __init__(self, session: WorkerSession) -> None:
        self._like = session.worker.state.x
        shared = session.cells.device.type == "cpu" or session.memory.on_gpu
        names = [f"grad.{session.rank}.{k}" for k in range(2)] if shared else []
        # other objects than those that the memory gives to all that use these places: references to these are counted
        self._places = [place.view(place.shape) for place in map(session.memory.tensor, names)]
        self._returned = session.returned
        found = [session.memory.segment.offset(place) for place in self._places]
        self._offsets = [offset for offset in found if offset is not None]
        # references to a buffer that no step holds
        self._idle = sys.getrefcount(self._places[0]) if self._places else 0

    def free(self) -> torch.Tensor:
        """A buffer that no step holds any more; a step may keep a gradient as long as it likes."""
        for k, offset in enumerate(self._offsets):  # by number: a variable would be one more reference to the buffer
            # the first one whenever it is free: it is still in the core's cache
            if sys.getrefcount(self._places[k]) <= self._idle and self._returned(offset):
                return self._places[k]
        return torch.empty_like(self._like)
