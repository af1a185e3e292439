"""paceline: data-parallel training in which how the workers keep pace is one argument.

Each name is loaded when it is first used: torch takes seconds, and a command must hear Ctrl-C before that.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from paceline.signals import deferred

if TYPE_CHECKING:
    from paceline.api.script.attach import attach
    from paceline.api.script.inner_rank import inner_rank
    from paceline.api.simulate import StabilityWarning, simulate
    from paceline.api.train import EvalSpec, RunInterrupted, TrainSpec, train, train_and_evaluate
    from paceline.compressor import Compressor
    from paceline.errors import DataError, Deadlock, LossError, PacelineError, RunError, SchemeError, UsageError
    from paceline.experiments.compare import compare
    from paceline.experiments.comparison import Comparison
    from paceline.framework_tasks.jax_task import JaxTask
    from paceline.framework_tasks.keras_task import KerasTask
    from paceline.framework_tasks.tensorflow_task import TensorFlowTask
    from paceline.hook import Hook
    from paceline.planning.plan import plan
    from paceline.planning.plan_cells import Forecast
    from paceline.result import Result
    from paceline.runs.diff import Difference, diff
    from paceline.runs.replay.replay import Replayed, replay
    from paceline.runs.replay.sample_usage import samples
    from paceline.runs.trained_model import evaluate, load, predict
    from paceline.runs.verify import Verification, verify
    from paceline.runtime.timeline import Timeline
    from paceline.scheme import Scheme, on_server
    from paceline.simulator.cost import Cost
    from paceline.simulator.faults import Fault
    from paceline.state import State, Vector
    from paceline.task import Batch, Task
    from paceline.torch_task import Tokens, TorchTask
    from paceline.worker import Worker

__version__ = "0.1.0"

# module -> names; the imports above say the same to type checkers
_NAMES = {
    "paceline.api.script.attach": "attach",
    "paceline.api.script.inner_rank": "inner_rank",
    "paceline.api.simulate": "StabilityWarning simulate",
    "paceline.api.train": "EvalSpec RunInterrupted TrainSpec train train_and_evaluate",
    "paceline.errors": "DataError Deadlock LossError PacelineError RunError SchemeError UsageError",
    "paceline.compressor": "Compressor",
    "paceline.experiments.compare": "compare",
    "paceline.experiments.comparison": "Comparison",
    "paceline.framework_tasks.jax_task": "JaxTask",
    "paceline.framework_tasks.keras_task": "KerasTask",
    "paceline.framework_tasks.tensorflow_task": "TensorFlowTask",
    "paceline.hook": "Hook",
    "paceline.planning.plan": "plan",
    "paceline.planning.plan_cells": "Forecast",
    "paceline.result": "Result",
    "paceline.runs.diff": "Difference diff",
    "paceline.runs.replay.replay": "Replayed replay",
    "paceline.runs.replay.sample_usage": "samples",
    "paceline.runs.trained_model": "evaluate load predict",
    "paceline.runs.verify": "Verification verify",
    "paceline.runtime.timeline": "Timeline",
    "paceline.scheme": "Scheme on_server",
    "paceline.simulator.cost": "Cost",
    "paceline.simulator.faults": "Fault",
    "paceline.state": "State Vector",
    "paceline.task": "Batch Task",
    "paceline.torch_task": "Tokens TorchTask",
    "paceline.worker": "Worker",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = ["DataError", "Deadlock", "LossError", "PacelineError", "RunError", "SchemeError", "UsageError"]
__all__ += [
    "Batch",
    "Compressor",
    "Hook",
    "JaxTask",
    "KerasTask",
    "Scheme",
    "State",
    "Task",
    "TensorFlowTask",
    "Tokens",
    "TorchTask",
    "Vector",
    "Worker",
    "attach",
    "inner_rank",
    "on_server",
]
__all__ += [
    "Cost",
    "EvalSpec",
    "Fault",
    "Result",
    "RunInterrupted",
    "StabilityWarning",
    "Timeline",
    "TrainSpec",
    "simulate",
    "train",
]
__all__ += ["Difference", "Replayed", "Verification", "diff", "evaluate", "load", "predict", "replay", "samples"]
__all__ += ["Comparison", "Forecast", "compare", "plan", "train_and_evaluate", "verify"]


def __getattr__(name: str) -> Any:
    if name == "keras":  # a package that loads Keras
        return import_module("paceline.keras")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with deferred():
        value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
