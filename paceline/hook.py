"""The contract of a hook: its methods, which the loop of a worker calls, and the session that they get."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

from torch import Tensor

from paceline.result import Staleness
from paceline.state import Vector
from paceline.task import Batch
from paceline.worker import Worker

Role = Literal["chief", "worker"]


class Session(Protocol):
    """A worker's run as its hooks see it, in the simulator and in processes."""

    @property
    def worker(self) -> Worker:
        """The worker: its step, its last loss, its cells."""

    @property
    def updates(self) -> int:
        """Changes of the centre so far: the global step."""

    @property
    def seconds(self) -> float:
        """Time since the run began, virtual in the simulator."""

    @property
    def samples(self) -> int:
        """The number of samples of all gradients of all workers."""

    @property
    def bytes_sent(self) -> int:
        """The bytes of vectors and numbers that all workers have sent since the run was started or resumed."""

    @property
    def bytes_received(self) -> int:
        """Those that all workers have received."""

    @property
    def staleness(self) -> Staleness:
        """The staleness of the gradients that have entered the centre."""

    @property
    def directory(self) -> Path | None:
        """The run directory; the simulator has none."""

    def gradient_norm(self) -> float:
        """The norm of a gradient of this worker: the first one after the last call; NaN if there is none yet."""

    def model(self) -> Vector:
        """A copy of the centre's parameters, as they would be evaluated and saved."""

    def trained_model(self) -> Any:
        """The task's model with the centre's parameters, as its framework has it; new at every call."""

    def evaluate(self, x: Vector | None = None) -> dict[str, float]:
        """Metrics of the centre's parameters, or of x."""

    def say(self, text: str) -> None:
        """Print a line for the user."""

    def record(self, values: dict[str, float]) -> None:
        """Put named values of this moment into the run's history."""

    def stop(self, reason: str) -> None:
        """Ask for the end of the whole run."""

    def leave(self, reason: str) -> None:
        """Let this worker alone leave after its step; the run ends when all have left."""

    def save(self) -> None:
        """Ask for a checkpoint of the whole run; it is written when every worker has come to the end of a step."""

    def keep(self, name: str, tensor: Tensor) -> None:
        """Put a tensor of the hook's own into every checkpoint from now on."""

    def kept(self, name: str) -> Tensor | None:
        """The tensor that `keep` put into the checkpoint from which this run resumed."""

    def set(self, **hyper: Any) -> None:
        """Change hyper-parameters from now on, for this worker; by the chief also for the server."""

    def value(self, key: str) -> Any:
        """A hyper-parameter of this worker, as `set` names it."""

    def wait(self, condition: Callable[[], bool], what: str, *, away: bool = False) -> None:
        """Wait until the condition is true; with `away`, barriers do not wait for this worker meanwhile."""

    def begun(self) -> int:
        """The number of workers that have begun."""


class Rest(NamedTuple):
    """How long a hook has nothing to do at a step: up to a number of updates, of seconds since the run began, or of
    steps of its worker, whichever comes first. `Rest()`: until the end of the run."""

    updates: float = math.inf
    seconds: float = math.inf
    steps: float = math.inf


class Hook:
    """Subclasses are dataclasses whose fields are the options. Drawn as the loop that calls them:

        begin                    once, before the first step
            before_step          \\
                feed              } for every gradient of the step: may replace the mini-batch
                after_gradient    } and see its loss
            after_step           /  again and again
        failed                   if the run failed with an error
        end                      always

    `failed` and `end` are called for the hooks whose `begin` succeeded, in reverse order, whatever another one raises.
    """

    name: ClassVar[str] = ""
    roles: ClassVar[frozenset[Role]] = frozenset({"chief", "worker"})  # the roles that run it; the chief is worker 0
    guards_loss: ClassVar[bool] = False  # decides itself what a loss that is not finite means

    def __init_subclass__(cls, name: str = "") -> None:
        super().__init_subclass__()
        cls.name = name or cls.__module__.rpartition(".")[2].replace("_", "-")

    def begin(self, session: Session) -> None:
        """Once in each process that runs the hook, before its first step; also in one that was restarted."""

    def before_step(self, session: Session) -> None:
        """Before each step of the worker."""

    def feed(self, session: Session, batch: Batch) -> Batch:
        """Before each gradient: the mini-batch that it is taken on, this one or another."""
        return batch

    def after_gradient(self, session: Session, loss: float) -> None:
        """After each gradient, with the loss of its mini-batch."""

    def after_step(self, session: Session) -> None:
        """After each step of the worker."""

    def rests(self, session: Session) -> Rest | None:
        """After a step: until when `before_step` and `after_step` need not be called; None: call them at the next step
        too. They may be called earlier than asked for: when another hook's rest ends."""
        return None

    def failed(self, session: Session, error: BaseException) -> None:
        """The run failed with this error; `end` follows."""

    def end(self, session: Session) -> None:
        """Once, when the run has ended, failed or not."""
