"""Which framework the model of a script is of. None is loaded for it: a script that has such a model has loaded it."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from typing import Any

from torch import nn
from torch.optim import Optimizer

from paceline.api.script.jax_loop import JaxPace
from paceline.api.script.jax_params import JaxParams
from paceline.api.script.keras_loop import KerasPace
from paceline.api.script.keras_model import KerasScript
from paceline.api.script.loop import Pace
from paceline.api.script.script_loop import ScriptLoop
from paceline.api.script.script_task import Evaluate, ScriptTask
from paceline.api.script.torch_script import TorchScript
from paceline.errors import UsageError
from paceline.hook import Hook
from paceline.processes.roles.worker_session import WorkerSession


def script_of(model: Any, evaluate: Evaluate | None, name: str) -> ScriptTask:
    """The model of a script as a task."""
    if _is_keras(model):
        return KerasScript(model, evaluate, name)
    if isinstance(model, nn.Module):
        return TorchScript(model, evaluate, name)
    if _is_pytree(model):
        return JaxParams(model, evaluate, name)
    raise UsageError(
        f"attach() takes a torch.nn.Module, a Keras 3 model or a pytree of JAX arrays, not a {type(model).__name__}"
        + ("" if "jax" in sys.modules else " (JAX is not loaded: import jax before attach())")
    )


def loop_of(
    session: WorkerSession,
    task: ScriptTask,
    hooks: list[Hook],
    around: ExitStack,
    optimizers: list[Optimizer],
    named: dict[str, Optimizer],
) -> ScriptLoop:
    """What a script trains this model with."""
    if isinstance(task, TorchScript):
        return Pace(session, task, hooks, around, optimizers, named)
    if isinstance(task, KerasScript):
        return KerasPace(session, task, hooks, around)
    return JaxPace(session, task, hooks, around)


def check_optimizer(model: Any, optimizer: Any, schedule: Any) -> None:
    """UsageError for an optimizer of torch where there is no torch model."""
    others = _is_keras(model) or not isinstance(model, nn.Module)
    if others and (optimizer is not None or schedule is not None):
        raise UsageError(
            "optimizer= and schedule= take those of torch.optim, for a torch model: name the scheme's rule and its "
            "rate instead, attach(…, rule='adam', lr=0.001)"
        )


def _is_keras(model: Any) -> bool:
    """Whether Keras is loaded and made it; on its torch backend such a model is a module of torch, too."""
    layers = getattr(sys.modules.get("keras"), "layers", None)
    return layers is not None and isinstance(model, layers.Layer)


def _is_pytree(model: Any) -> bool:
    """Whether JAX is loaded and finds arrays in it."""
    jax = sys.modules.get("jax")
    if jax is None or model is None:
        return False
    leaves = jax.tree_util.tree_leaves(model)
    return not leaves or leaves[0] is not model or hasattr(model, "shape")
