"""The start of a run on several nodes: who has joined, who is missing, and what happens when `--join` has passed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from enum import Enum, auto

POLICIES = ("fail", "go-on", "wait")  # what to do when somebody has not joined in time
FIRST, EVERY, LATER = (
    5.0,
    5.0,
    30.0,
)  # seconds before people hear who is missing; between two such lines; after a minute


class Verdict(Enum):
    """What a look at those who are missing has come to."""

    WAIT = auto()
    COMPLETE = auto()  # everybody has joined
    WITHOUT = auto()  # the time has passed: go on without those who are missing
    FAIL = auto()  # the time has passed: the run fails


class JoinWait:
    """The roles of a run that have to come from other processes. Nobody begins a step before they are there.

    The evaluator is not waited for: it follows checkpoints, whenever it comes.
    """

    def __init__(self, roles: Iterable[str], here: Collection[str], *, join: float, policy: str, began: float) -> None:
        self.join, self.policy, self._began = join, policy, began
        self._roles = [name for name in roles if name != "evaluator"]
        self.came = {name for name in self._roles if name in here}  # at any time, perhaps gone since
        self._next = began + FIRST

    def look(self, away: Collection[str], now: float, say: Callable[[str], None]) -> Verdict:
        """Decide, and say every few seconds who is missing. `away`: roles that nobody plays at this moment."""
        missing = [name for name in self._roles if name in away]
        if not missing:
            return Verdict.COMPLETE
        if now - self._began > self.join and self.policy != "wait":
            return Verdict.WITHOUT if self.policy == "go-on" else Verdict.FAIL
        if now >= self._next:
            waited = now - self._began
            self._next = now + (EVERY if waited < 60 else LATER)
            limit = f" of {self.join:g} s" if self.policy != "wait" else " s, without limit"
            there = f"{len(self._roles) - len(missing)} of {len(self._roles)} roles have joined"
            say(f"waiting for {', '.join(missing)}: {there} ({waited:.0f}{limit})")
        return Verdict.WAIT

    @property
    def complete(self) -> str:
        """The sentence when everybody is there."""
        return f"all {len(self._roles)} roles have joined"

    def never_came(self) -> list[str]:
        return [name for name in self._roles if name not in self.came]


def rejoin_time(patience: float, join: float) -> float:
    """Seconds that an agent looks for a hub that it has lost. A chief that is restarted has to load its program, its
    data and a checkpoint, perhaps on another machine: that takes longer than noticing that it is gone."""
    return min(join, max(5 * patience, 60.0))
