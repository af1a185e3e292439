"""What watches a run: hooks, called by whoever owns a worker's loop."""

from __future__ import annotations

from typing import ClassVar, Literal, Protocol

from paceline.worker import Worker

Role = Literal["chief", "worker"]


class Session(Protocol):
    """A worker's run as its hooks see it, in whichever world it runs."""

    @property
    def worker(self) -> Worker:
        """The worker: its step, its last loss, its cells."""

    @property
    def updates(self) -> int:
        """Changes of the centre so far: the global step."""

    @property
    def seconds(self) -> float:
        """Time since the run began, virtual in the simulator."""

    def evaluate(self) -> dict[str, float]:
        """Metrics of what the centre holds now."""

    def say(self, text: str) -> None:
        """Tell people something."""

    def stop(self, reason: str) -> None:
        """Ask for the end of the whole run."""


class Hook:
    """Subclasses are dataclasses whose fields are the options. Drawn as the loop that calls them:

    begin                    once, before the first step
        before_step          \\
        (the scheme's step)   } again and again
        after_step           /
    failed                   if the run broke off with an error
    end                      always, in reverse order of the hooks
    """

    name: ClassVar[str] = ""
    roles: ClassVar[frozenset[Role]] = frozenset({"chief", "worker"})  # who runs it; the chief is worker 0

    def __init_subclass__(cls, name: str = "") -> None:
        super().__init_subclass__()
        cls.name = name or cls.__module__.rpartition(".")[2].replace("_", "-")

    def begin(self, session: Session) -> None: ...

    def before_step(self, session: Session) -> None: ...

    def after_step(self, session: Session) -> None: ...

    def failed(self, session: Session, error: BaseException) -> None: ...

    def end(self, session: Session) -> None: ...
