"""Print named values during the run."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from paceline.errors import UnknownName
from paceline.hook import Session
from paceline.hooks._periodic import EveryOrSeconds
from paceline.result import size_text

_SHOWN: dict[str, Callable[[Session], str]] = {
    "update": lambda session: f"update {session.updates}",
    "seconds": lambda session: f"{session.seconds:.4g} s",
    "loss": lambda session: f"loss {session.worker.loss:.4g}",
    "samples": lambda session: f"samples {session.samples}",
    "sent": lambda session: f"sent {size_text(session.bytes_sent)}",
    "staleness": lambda session: f"staleness {session.staleness.mean:.4g}",
}


@dataclass
class Log(EveryOrSeconds):
    """Prints named values of the chief every `every` steps (100 if neither is given) or every `seconds`.

    `values` are some of update, seconds, loss, samples (of all workers), sent (bytes of all workers) and staleness
    (the mean so far).
    """

    values: tuple[str, ...] = ("update", "seconds", "loss")
    of_steps: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.values:
            if name not in _SHOWN:
                raise UnknownName(f"value of {self.name}", name, _SHOWN)

    def act(self, session: Session) -> None:
        worker = session.worker
        values = (_SHOWN[name](session) for name in self.values)
        session.say("  ".join((f"worker:{worker.rank} step {worker.t}", *values)))
