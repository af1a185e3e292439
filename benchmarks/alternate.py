"""Blocks of a run's gradients in turn with blocks of the same training without communication, in the same processes.

A machine's speed drifts by more than what is to be measured, so both are measured within moments of each other. After
`block` gradients every worker waits for the others; then all train by themselves for as many gradients: the same loop
as by hand. Then they wait again, and the run continues. Waiting is not counted.
"""

from __future__ import annotations

import mmap
import os
import signal
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from paceline.hook import Hook, Session
from paceline.processes.memory.board import STOP
from paceline.processes.parent_death import die_with_parent
from paceline.task import Batch, Task

Loop = Callable[[], None]  # one gradient of the training by hand
MOST = 400  # blocks of a worker that are kept
LINE = 8  # words of a cache line


@dataclass
class Blocks:
    """What all workers of a run measure. Made before they are forked."""

    workers: int
    block: int  # gradients
    begin: Callable[[Any], Loop]  # the training by hand, made in a worker's process; of the task that is measured
    warm: int = 300_000_000  # ns before the blocks that count
    _memory: mmap.mmap = field(init=False)

    def __post_init__(self) -> None:
        words = self.workers * (LINE + 1 + 2 * MOST)
        self._memory = mmap.mmap(-1, 8 * words)
        self._words = memoryview(self._memory).cast("q")

    def row(self, rank: int) -> memoryview:
        """Of a worker: how many blocks it has measured, then ns of each of the run's and of the loop's in turn."""
        first = self.workers * LINE + rank * (1 + 2 * MOST)
        return self._words[first : first + 1 + 2 * MOST]

    def meet(self, rank: int, number: int) -> None:
        """Wait until all workers have come here for the same time."""
        self._words[rank * LINE] = number
        while min(self._words[: self.workers * LINE : LINE]) < number:
            os.sched_yield()
            if STOPPED[0]():  # others have seen that the run ends, and do not come
                self.leave(rank)
                return

    def meet_again(self, rank: int, number: int) -> None:
        """The same, for meetings between those of `turns`."""
        self._words[rank * LINE + 1] = number
        while min(self._words[1 : self.workers * LINE : LINE]) < number:
            os.sched_yield()

    def turns(self, step: Loop, rank: int) -> Iterator[None]:
        """To be asked before each gradient of the run: lets the training by hand have its turns."""
        row, meetings = self.row(rank), 0
        step()
        first = time.perf_counter_ns()
        while True:
            meetings += 2
            self.meet(rank, meetings - 1)
            began = time.perf_counter_ns()
            for _ in range(self.block):
                step()
            hand = time.perf_counter_ns() - began
            self.meet(rank, meetings)
            began = time.perf_counter_ns()
            for _ in range(self.block):
                yield
            mine = time.perf_counter_ns() - began
            if (number := row[0]) < MOST and began - first > self.warm:
                row[1 + 2 * number], row[2 + 2 * number], row[0] = mine, hand, number + 1

    def leave(self, rank: int) -> None:
        """This worker comes no more: no one waits for it."""
        self._words[rank * LINE] = self._words[rank * LINE + 1] = 1 << 62

    def times(self) -> Iterator[tuple[float, float]]:
        """Seconds of a gradient of the run, and by hand: of every block, the means over the workers."""
        rows = [self.row(rank) for rank in range(self.workers)]
        for number in range(min(row[0] for row in rows)):
            yield tuple(  # type: ignore[misc]
                statistics.mean(row[1 + 2 * number + part] for row in rows) / self.block / 1e9 for part in range(2)
            )

    def result(self) -> dict[str, float]:
        """Medians over the blocks: milliseconds of a gradient, and the share of the speed by hand."""
        pairs = list(self.times())
        if not pairs:
            raise SystemExit("the run was too short: no block was measured")
        mine, hand = (statistics.median(one) for one in zip(*pairs, strict=True))
        shares = sorted(by_hand / in_run for in_run, by_hand in pairs)
        return {
            "ms_per_step": mine * 1000,
            "plain_ms": hand * 1000,
            "share": statistics.median(shares),
            "least": shares[len(shares) // 10],
            "most": shares[-1 - len(shares) // 10],
            "blocks": len(pairs),
        }


class _Alternating:
    """Mixed into the class of a task."""

    blocks: Blocks
    _turns: Iterator[None] | None = None

    def grad(self, x: Any, batch: Batch, out: Any = None, buffers: Any = None) -> Any:
        if self._turns is None:
            self._turns = self.blocks.turns(self.blocks.begin(self), RANK[0])
        next(self._turns)
        return super().grad(x, batch, out, buffers)  # type: ignore[misc]


RANK = [0]  # of the worker of this process
STOPPED: list[Callable[[], bool]] = [lambda: False]  # whether its run ends


def alternating(task: Task, blocks: Blocks) -> Task:
    """The same task, measured."""
    kind = type("Alternating", (_Alternating, type(task)), {"blocks": blocks})
    made: Task = kind.__new__(kind)
    vars(made).update(vars(task))
    return made


def barrier_alone(blocks: Blocks, seconds: float, every: int = 1) -> dict[str, float]:
    """What waiting for the slowest worker costs by itself: loops that meet after every so many gradients and exchange
    nothing, in turn with the same loops that never meet."""
    children, parent = [], os.getpid()
    for rank in range(blocks.workers):
        if not (child := os.fork()):
            die_with_parent(signal.SIGKILL, parent)
            code = 1
            try:
                _meet(blocks, rank, seconds, every)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                blocks.leave(rank)  # whatever happened: the others must not wait for this process
                os._exit(code)
        children.append(child)
    codes = [os.waitpid(child, 0)[1] for child in children]
    if any(codes):
        raise SystemExit("a process that measures a barrier has failed")
    return blocks.result()


def _meet(blocks: Blocks, rank: int, seconds: float, every: int) -> None:
    RANK[0] = rank
    step = blocks.begin(None)
    turns, number = blocks.turns(step, rank), 0
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        next(turns)
        step()
        number += 1
        if number % every == 0:
            blocks.meet_again(rank, number)


@dataclass
class Ranks(Hook):
    """Tells the process of each worker its rank, and the others when it has left. Every measured run needs it."""

    blocks: Blocks

    def begin(self, session: Session) -> None:
        RANK[0] = session.worker.rank
        words = session._memory.board.run  # type: ignore[attr-defined]
        STOPPED[0] = lambda: bool(words[STOP])

    def end(self, session: Session) -> None:
        self.blocks.leave(session.worker.rank)
