"""paceline: data-parallel training in which how the workers keep pace is one argument.

Each name is loaded when it is first used: torch takes seconds, and a command must hear Ctrl-C before that.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from paceline.signals import deferred

if TYPE_CHECKING:
    from paceline.api.script.attach import attach
    from paceline.api.simulate import StabilityWarning, simulate
    from paceline.api.train import EvalSpec, TrainSpec, train, train_and_evaluate
    from paceline.errors import DataError, Deadlock, LossError, PacelineError, RunError, SchemeError, UsageError
    from paceline.hook import Hook
    from paceline.result import Result
    from paceline.runs.diff import Difference, diff
    from paceline.runs.replay.replay import Replayed, replay
    from paceline.runs.replay.sample_usage import samples
    from paceline.runs.trained_model import evaluate, load, predict
    from paceline.runs.verify import Verification, verify
    from paceline.scheme import Scheme, on_server
    from paceline.simulator.cost import Cost
    from paceline.simulator.faults import Fault
    from paceline.state import State, Vector
    from paceline.task import Batch, Task
    from paceline.torch_task import TorchTask
    from paceline.worker import Worker

__version__ = "0.1.0"

# name -> module; the imports above say the same to type checkers
_HOMES = {
    "Batch": "paceline.task",
    "Cost": "paceline.simulator.cost",
    "DataError": "paceline.errors",
    "Deadlock": "paceline.errors",
    "Difference": "paceline.runs.diff",
    "EvalSpec": "paceline.api.train",
    "Fault": "paceline.simulator.faults",
    "Hook": "paceline.hook",
    "LossError": "paceline.errors",
    "PacelineError": "paceline.errors",
    "Replayed": "paceline.runs.replay.replay",
    "Result": "paceline.result",
    "RunError": "paceline.errors",
    "Scheme": "paceline.scheme",
    "SchemeError": "paceline.errors",
    "StabilityWarning": "paceline.api.simulate",
    "State": "paceline.state",
    "Task": "paceline.task",
    "TorchTask": "paceline.torch_task",
    "TrainSpec": "paceline.api.train",
    "UsageError": "paceline.errors",
    "Vector": "paceline.state",
    "Verification": "paceline.runs.verify",
    "Worker": "paceline.worker",
    "attach": "paceline.api.script.attach",
    "diff": "paceline.runs.diff",
    "evaluate": "paceline.runs.trained_model",
    "load": "paceline.runs.trained_model",
    "on_server": "paceline.scheme",
    "predict": "paceline.runs.trained_model",
    "replay": "paceline.runs.replay.replay",
    "samples": "paceline.runs.replay.sample_usage",
    "simulate": "paceline.api.simulate",
    "train": "paceline.api.train",
    "train_and_evaluate": "paceline.api.train",
    "verify": "paceline.runs.verify",
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
