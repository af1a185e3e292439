"""Hooks that act periodically: every N updates, or every N seconds."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from paceline.fields import Count, Rate
from paceline.hook import Hook, Rest, Role, Session
from paceline.hooks._options import Checked


class Timer:
    """Due when a count (of steps or updates) has reached the next multiple of `every`, or `seconds` have passed.

    Counts may jump: other workers move the global step as well. `count` and `now` are those of the start, so that a
    resumed run keeps to the same multiples.
    """

    def __init__(self, every: int | None, seconds: float | None, count: int, now: float) -> None:
        self._every, self._seconds = every, seconds
        self._last, self._seen = now, count
        self._next = self._multiple_above(count)

    def due(self, count: int, now: float) -> bool:
        """Whether it is due; if so, the next time is counted from here."""
        if self._seconds is not None:
            if now - self._last < self._seconds:
                return False
            self._last = now
            return True
        if count < self._next:
            return False
        self._next = self._multiple_above(count)
        return True

    def near(self, count: int, now: float) -> bool:
        """Whether it is probably due after the step that begins now, if that counts as much as the step before."""
        step, self._seen = max(count - self._seen, 1), count
        return now - self._last >= self._seconds if self._seconds is not None else count + step >= self._next

    def rest(self, *, of_steps: bool = False) -> Rest:
        """When it can be due again, or a moment before: `due` alone decides. `of_steps`: the count is that of the
        worker's steps, not of updates."""
        if self._seconds is None:
            return Rest(steps=self._next) if of_steps else Rest(updates=self._next)
        return Rest(seconds=self._last + self._seconds * (1 - 1e-9))

    def _multiple_above(self, count: int) -> int:
        every = self._every or 1
        return count - count % every + every


class Periodic(Checked):
    """A hook of the chief that calls `act` after a step whenever it is due. Subclasses are dataclasses with a field
    `every`; a `begin` of their own calls this one."""

    roles: ClassVar[frozenset[Role]] = frozenset({"chief"})
    every: int | None
    seconds: float | None = None
    default: ClassVar[tuple[int | None, float | None]] = (100, None)  # every, seconds: if neither is given
    of_steps: ClassVar[bool] = False  # `every` counts the worker's steps

    def begin(self, session: Session) -> None:
        every, seconds = self.default if self.every is None and self.seconds is None else (self.every, self.seconds)
        self._timer = Timer(every, seconds, self.count(session), session.seconds)

    def after_step(self, session: Session) -> None:
        if self._timer.due(self.count(session), session.seconds):
            self.act(session)

    def rests(self, session: Session) -> Rest | None:
        kind = type(self)
        own = kind.after_step is not Periodic.after_step or kind.before_step is not Hook.before_step
        if own or kind.count is not Periodic.count:
            return None
        return self._timer.rest(of_steps=self.of_steps)

    def count(self, session: Session) -> int:
        """What `every` counts: the updates of the centre, or the worker's steps."""
        return session.worker.t if self.of_steps else session.updates

    @abstractmethod
    def act(self, session: Session) -> None: ...


@dataclass
class EveryOrSeconds(Periodic):
    """A periodic hook with both options, of which one may be given."""

    every: Count | None = None
    seconds: Rate | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._only_one("every", "seconds")
