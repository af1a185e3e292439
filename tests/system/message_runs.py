"""Runs whose workers send messages: a scheme that counts them, and what must hold of its checkpoints."""

from __future__ import annotations

from pathlib import Path

from paceline.runs import checkpoint
from paceline.runs.checkpoint import Checkpoint
from paceline.runs.replay.accounting import account, audit
from paceline.runs.replay.replay import replay
from paceline.runtime.messages import under_way
from paceline.state import State

WORKERS = 3
ANY = {"partner": "any-step"}
TOSSING = '''
import os
import signal
from dataclasses import dataclass
from pathlib import Path

from paceline.scheme import Scheme, State

HERE = Path(__file__).parent
PLACES = ("received", "halved", "sent", "taken", "counted")  # the chief dies at the odd ones


@dataclass(frozen=True)
class Tossing(Scheme, name="tossing"):
    """Every worker gives half of its weight to the next one in each step, and is killed at some places, once each.
    Worker 1 receives nothing before step `deaf`."""

    deaf: int = 0
    decentralised = True

    def sends_messages(self):
        return True

    def worker(self, x0, workers):
        return State(x=x0, weight=1.0, came=0, sent=0)

    async def step(self, w):
        for message in await w.receive() if w.rank != 1 or w.t >= self.deaf else ():
            killed(w, "received")
            assert message.v.eq(message.number).all(), "a message that is not whole"
            w.weight += message.number
            w.came += 1
            killed(w, "taken")
        await w.grad(w.x)
        half = w.weight / 2
        if await w.send((w.rank + 1) % w.workers, w.x * 0 + half, half):
            killed(w, "sent")
            w.sent += 1
            w.weight -= half
            killed(w, "halved")
        w.v += 1
        killed(w, "counted")
        if w.t < 140 and len([*HERE.glob("*-[01]")]) < len(PLACES):
            await w.sleep(0.05)  # nobody is at its goal before all have died


def killed(w, where):
    """Die here if it is this worker's turn; once."""
    turn = PLACES.index(where)
    gate = HERE / f"{where}-{w.rank}"
    if w.rank == turn % 2 and w.t >= 5 + 2 * turn and not gate.exists():
        gate.touch()
        os.kill(os.getpid(), signal.SIGKILL)
'''


def states(saved: Checkpoint) -> list[State]:
    return [State.over(saved.under(f"worker.{rank}.")) for rank in range(WORKERS)]


def weight(saved: Checkpoint) -> float:
    """All weights of a checkpoint, those of messages under way too."""
    workers = states(saved)
    return sum(one.weight for one in workers) + sum(message.number for _, message in under_way(workers))


def checkpoints(directory: Path) -> list[Checkpoint]:
    at = directory / "checkpoints"
    return [checkpoint.of_step(at, step) for step in checkpoint.steps(at)]


def check_replay(directory: Path, digest: str) -> None:
    repeated = replay(directory)
    assert repeated.difference is None, repeated.difference
    assert repeated.digest == digest
    assert audit(directory) == []
    told = account(directory)
    assert told.drawn == told.used + told.dropped + told.lost + told.rolled_back
