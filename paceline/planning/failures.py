"""What failures of nodes cost, by formula: hours of failures are too long to simulate gradient by gradient.

With a rate of f failures per node and second, R seconds until a node is back, and a checkpoint every C seconds:

    a worker's node is there for the share  a = 1 / (1 + f (R + h)),  h: half a step, which is lost with it
    the run goes forward for the share      b = 1 / (1 + f k (R + C / 2)),  k: nodes without which it cannot go on
    throughput with failures = throughput * a * b

As paceline behaves: the death of a worker's node leaves the others going on, synchronous schemes with a smaller mean
(`--quorum shrink`); with `hold` all wait for it. The death of a server's node, or of the chief's, makes all return to
the newest checkpoint: it costs R and, on average, half of the time between two checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.config.options import Quorum

HOUR = 3600.0


@dataclass(frozen=True)
class Failures:
    """How often nodes fail, and what a failure takes. `rate`: per node and hour."""

    rate: float = 0.0
    restart: float = 60.0
    checkpoint: float = 60.0
    quorum: Quorum = "shrink"

    def workers_there(self, step: float) -> float:
        """The share of time that a worker's node is there. `step`: the seconds of a step, of which half is lost."""
        return 1 / (1 + self.rate / HOUR * (self.restart + step / 2))

    def going(self, servers: int, workers: int) -> float:
        """The share of time that the run goes forward. The chief is a worker: its node counts once."""
        every = self.rate / HOUR * (servers + 1) * (self.restart + self.checkpoint / 2)
        held = self.rate / HOUR * (workers - 1) * self.restart if self.quorum == "hold" else 0.0
        return 1 / (1 + every + held)

    def kept(self, *, workers: int, servers: int, step: float) -> float:
        """The share of the throughput that failures leave."""
        alone = 1.0 if self.quorum == "hold" else self.workers_there(step)
        return alone * self.going(servers, workers)
