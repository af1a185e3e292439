"""paceline: data-parallel training in which how the workers keep pace is one argument."""

from paceline.attach import attach
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
