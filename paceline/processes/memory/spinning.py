"""How long a process spins on a word of shared memory before it sleeps.

A process that spins sees a change at once, and needs no system call of the one that makes it. But it keeps a core busy.
So it spins only if the processes of the run that compute have a core each, if the kernel has not lately made this
process wait for a core, and if its waits are usually short.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

LONG = 2_000_000  # ns of spinning before sleeping
BRIEF = LONG // 20  # ns of spinning for what is about to come
OFTEN = 20_000_000  # ns between two looks at how crowded the machine is
CROWDED = 0.2  # share of the time that this thread has waited for a core
WEIGHT = 1 / 8  # of the last wait in the usual one


class Spinning:
    """One process's spinning. `limit`: ns, 0 if it is never to spin."""

    def __init__(self, limit: int, schedstat: Path = Path("/proc/thread-self/schedstat")) -> None:
        self.limit = self._now = limit
        self._schedstat = schedstat
        self._usual = 0.0  # ns of a wait
        self._looked = self._delayed = 0
        self._crowded = False

    @classmethod
    def for_processes(cls, cores: float, computing: int) -> Spinning:
        """For one of some processes or threads that compute on a machine with so many cores."""
        return cls(LONG if cores >= computing else 0)

    @property
    def nanoseconds(self) -> int:
        """How long to spin in the wait that begins now."""
        return self._now

    def waited(self, nanoseconds: int, now: int) -> None:
        """A wait is over, `now` by the clock of `time.perf_counter_ns`. It counts whether it was spent spinning or
        sleeping."""
        self._usual += (min(nanoseconds, 4 * self.limit) - self._usual) * WEIGHT
        if now - self._looked >= OFTEN:
            self._look(now)
        self._now = 0 if self._crowded or self._usual > self.limit else self.limit

    def _look(self, now: int) -> None:
        """Find out how long this thread has waited for a core since the last look."""
        delayed = self._delay()
        if self._looked:
            self._crowded = delayed - self._delayed > CROWDED * (now - self._looked)
        self._looked, self._delayed = now, delayed

    def _delay(self) -> int:
        """ns that this thread has waited for a core in its life; 0 if the kernel does not say."""
        with suppress(OSError, ValueError, IndexError):
            return int(self._schedstat.read_bytes().split()[1])
        return 0
