"""paceline: data-parallel training in which how the workers keep pace is one argument.

Each name is loaded when it is first used: torch takes seconds, and a command must hear Ctrl-C before that.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from paceline.interrupts import deferred

if TYPE_CHECKING:
    from paceline.attaching import attach
    from paceline.difference import Difference, diff
    from paceline.errors import DataError, Deadlock, LossError, PacelineError, RunError, SchemeError, UsageError
    from paceline.hook import Hook
    from paceline.replaying.repeat import Replayed, replay
    from paceline.replaying.samples import samples
    from paceline.result import Result
    from paceline.scheme import Scheme, on_server
    from paceline.sim.cost import Cost
    from paceline.sim.faults import Fault
    from paceline.sim.run import StabilityWarning, simulate
    from paceline.state import State, Vector
    from paceline.task import Batch, Task
    from paceline.torch_task import TorchTask
    from paceline.trained import evaluate, load, predict
    from paceline.training import EvalSpec, TrainSpec, train, train_and_evaluate
    from paceline.verification import Verification, verify
    from paceline.worker import Worker

__version__ = "0.1.0"

# name -> module; the imports above say the same to type checkers
_HOMES = {
    "Batch": "paceline.task",
    "Cost": "paceline.sim.cost",
    "DataError": "paceline.errors",
    "Deadlock": "paceline.errors",
    "Difference": "paceline.difference",
    "EvalSpec": "paceline.training",
    "Fault": "paceline.sim.faults",
    "Hook": "paceline.hook",
    "LossError": "paceline.errors",
    "PacelineError": "paceline.errors",
    "Replayed": "paceline.replaying.repeat",
    "Result": "paceline.result",
    "RunError": "paceline.errors",
    "Scheme": "paceline.scheme",
    "SchemeError": "paceline.errors",
    "StabilityWarning": "paceline.sim.run",
    "State": "paceline.state",
    "Task": "paceline.task",
    "TorchTask": "paceline.torch_task",
    "TrainSpec": "paceline.training",
    "UsageError": "paceline.errors",
    "Vector": "paceline.state",
    "Verification": "paceline.verification",
    "Worker": "paceline.worker",
    "attach": "paceline.attaching",
    "diff": "paceline.difference",
    "evaluate": "paceline.trained",
    "load": "paceline.trained",
    "on_server": "paceline.scheme",
    "predict": "paceline.trained",
    "replay": "paceline.replaying.repeat",
    "samples": "paceline.replaying.samples",
    "simulate": "paceline.sim.run",
    "train": "paceline.training",
    "train_and_evaluate": "paceline.training",
    "verify": "paceline.verification",
}

__all__ = [
    "Batch",
    "Cost",
    "DataError",
    "Deadlock",
    "Difference",
    "EvalSpec",
    "Fault",
    "Hook",
    "LossError",
    "PacelineError",
    "Replayed",
    "Result",
    "RunError",
    "Scheme",
    "SchemeError",
    "StabilityWarning",
    "State",
    "Task",
    "TorchTask",
    "TrainSpec",
    "UsageError",
    "Vector",
    "Verification",
    "Worker",
    "attach",
    "diff",
    "evaluate",
    "load",
    "on_server",
    "predict",
    "replay",
    "samples",
    "simulate",
    "train",
    "train_and_evaluate",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with deferred():
        value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
