"""The speed of a run of paceline between two moments that its launcher tells of: without its start and its end.

The result's own speed counts what the run has kept. In a run of seconds, a window that was not finished matters.
"""

from __future__ import annotations

from typing import Any


class Speed:
    def __init__(self) -> None:
        self.seen: list[tuple[float, int]] = []  # seconds, samples

    def watch(self, status: Any) -> None:
        """For `paceline.train(watch=…)`."""
        workers = [role.step for role in status.roles if role.name.startswith(("chief", "worker"))]
        going = workers and min(workers) > 0  # not before all have begun,
        if going and status.samples > (self.seen[-1][1] if self.seen else 0):  # nor while the run ends
            self.seen.append((status.seconds, status.samples))

    def samples_per_second(self, warm: float) -> float | None:
        """After `warm` seconds of training; None if the run was too short."""
        if not self.seen:
            return None
        whole = self.seen[:-1]  # the run may have stopped before the last look
        counted = [place for place in whole if place[0] >= self.seen[0][0] + warm]
        if len(counted) < 2:
            return None
        (begin, before), (end, after) = counted[0], counted[-1]
        return (after - before) / (end - begin)
