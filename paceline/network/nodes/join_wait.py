"""The start of a run on several nodes: which roles have joined, which are missing, and what `--join-policy` decides."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from enum import Enum, auto

POLICIES = ("fail", "go-on", "wait")  # what to do when a role has not joined in time
FIRST, EVERY, LATER = (
    5.0,
    5.0,
    30.0,
)  # seconds before the first line about missing roles; between two such lines; after a minute


class Verdict(Enum):
    """What is decided about the missing roles."""

    WAIT = auto()
    COMPLETE = auto()  # every role has joined
    WITHOUT = auto()  # the time has passed: continue without the missing roles
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
        """Decide, and report the missing roles every few seconds. `away`: roles without a process."""
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
        """The line for a run whose roles have all joined."""
        return f"all {len(self._roles)} roles have joined"

    def never_came(self) -> list[str]:
        return [name for name in self._roles if name not in self.came]


def rejoin_time(patience: float, join: float) -> float:
    """Seconds that an agent looks for a hub that it has lost. A chief that is restarted has to load its program, its
    data and a checkpoint, perhaps on another machine: that takes longer than noticing that it is gone."""
    return min(join, max(5 * patience, 60.0))
