"""The trained model of a run directory: load it, evaluate it, predict with it."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from paceline.config import build
from paceline.errors import DataError, UsageError
from paceline.runs import checkpoint
from paceline.runs.checkpoint import Checkpoint
from paceline.runs.run_directory import RunDirectory
from paceline.state import Vector
from paceline.task import Task
from paceline.torch_task import EVALUATION_CHUNK, FlatModule, SampledTask, StreamSamples, seeded

Say = Callable[[str], None]
BUFFER, EMA = "model_buffer.", "hook.ema"  # names of tensors in a checkpoint
FIRST = np.zeros(1, dtype=np.int64)  # the indices of the first sample alone


def load(
    run: str | Path,
    which: str | int = "newest",
    *,
    model: nn.Module | None = None,
    task: Task | None = None,
    ema: bool = False,
    say: Say | None = None,
) -> Any:
    """The trained model with weights of its own, as its framework has it: a module of torch in eval mode, a Keras
    model, a pytree of JAX.

    run:   a run directory, or its name under runs/;
    which: `newest`, `best`, or the step of a checkpoint;
    model: a torch module of the trained one's shape, which is copied and not changed. Frozen weights are not in a
           checkpoint: they are the given model's. If omitted, the model is that of `task`, or of the run's own task;
    ema:   the averaged weights that the hook `weight-ema` kept;
    say:   called for each damaged checkpoint that was passed over (if omitted: written to stderr).
    """
    directory = RunDirectory.open(run)
    kept = trained(directory, which, ema=ema, say=say)
    if model is None:
        return _model_of(task_of(directory, task), kept)
    if not isinstance(model, nn.Module):
        raise UsageError(f"model must be a torch.nn.Module, not a {type(model).__name__}")
    return _filled(model, kept)


def evaluate(
    run: str | Path,
    which: str | int = "newest",
    *,
    task: Task | None = None,
    ema: bool = False,
    say: Say | None = None,
) -> dict[str, float]:
    """Metrics of the trained model on its task's test data."""
    directory = RunDirectory.open(run)
    kept = trained(directory, which, ema=ema, say=say)
    return evaluated(kept, task_of(directory, task))


def predict(
    run: str | Path,
    inputs: Tensor | tuple[Tensor, ...],
    which: str | int = "newest",
    *,
    task: Task | None = None,
    ema: bool = False,
    say: Say | None = None,
) -> Tensor:
    """The trained model's output for these samples, given as in the data set (the task prepares them).

    `inputs`: a tensor of samples, or a tuple of tensors for a model with several inputs; also a single sample.
    """
    directory = RunDirectory.open(run)
    kept = trained(directory, which, ema=ema, say=say)
    return predicted(kept, sampled_task_of(directory, task), inputs)


@dataclass(frozen=True)
class Trained:
    """The model's tensors of a checkpoint."""

    checkpoint: Checkpoint
    vector: Vector
    buffers: dict[str, Tensor]


def trained(run: RunDirectory, which: str | int = "newest", *, ema: bool = False, say: Say | None = None) -> Trained:
    """The model's tensors of a run, from its newest checkpoint, its best one, or that of a step."""
    found = _checkpoint(run, which, say or partial(print, file=sys.stderr))
    vector = found.model
    if ema:
        if EMA not in found.tensors:
            raise UsageError(f"checkpoint {found.path} has no averaged weights; train with --hook weight-ema")
        vector = found.tensors[EMA].to(vector.dtype)
    return Trained(found, vector, found.under(BUFFER))


def task_of(run: RunDirectory, task: Task | None = None, *, checked: bool = True) -> Task:
    """The given task, or else the run's own, made again from its plan. `checked`: DataError if the plan was changed."""
    if task is not None:
        return task
    plan = run.plan(checked=checked)
    if plan.get("task") is None:
        raise UsageError(
            f"run {run.name} was started with a task made in Python, which its plan cannot name; "
            "give task=, or to load a model, model="
        )
    made = build.task_of(plan["task"], plan.get("task_options") or {})
    return made.configured(batch=plan.get("batch"), feed=plan.get("feed"), shuffle=plan.get("shuffle"))


def sampled_task_of(run: RunDirectory, task: Task | None = None) -> SampledTask:
    """`task_of`; UsageError if the task has no samples to predict from."""
    found = task_of(run, task)
    if not isinstance(found, SampledTask):
        raise UsageError(
            f"task {found.name!r} trains a plain vector, not a model; the vector itself is "
            "paceline.runs.checkpoint.load(PATH).tensors['model']"
        )
    return found


def evaluated(kept: Trained, task: Task) -> dict[str, float]:
    """Metrics of a loaded model on a task's test data."""
    _check_task(task, kept)
    return task.evaluate(kept.vector, kept.buffers or None)


def predicted(kept: Trained, task: SampledTask, inputs: Tensor | tuple[Tensor, ...]) -> Tensor:
    """The output of a loaded model for these samples."""
    samples = _fitting(task, (inputs,) if isinstance(inputs, Tensor) else tuple(inputs))
    model = _model_of(task, kept)
    prepared = _one_part(task)  # `prepare` makes inputs and target from one part: the caller gives prepared inputs

    def output(inputs: list[Tensor]) -> Any:
        if prepared:
            return task.outputs(model, tuple(inputs))
        answers = [torch.zeros(len(inputs[0]), dtype=torch.int64)] * task.answers
        return task.outputs(model, task._prepared((*inputs, *answers))[: -task.answers])

    chunks = range(0, len(samples[0]), EVALUATION_CHUNK)
    with torch.no_grad(), seeded(0):
        outputs = [output([one[first : first + EVALUATION_CHUNK] for one in samples]) for first in chunks]
    if not outputs:
        raise UsageError("there are no samples to predict from")
    if not isinstance(outputs[0], Tensor):
        raise UsageError(f"the model of task {task.name!r} gives a {type(outputs[0]).__name__}, not a tensor")
    return torch.cat(outputs)


def expected(task: SampledTask) -> tuple[Tensor, ...]:
    """One sample that `predict` takes: the inputs as the data set has them, or as the model takes them where `prepare`
    makes inputs and target from one part (such as positions in a text)."""
    with seeded(0):
        sample = first_sample(task)
        parts = task._prepared(sample) if _one_part(task) else sample
    return tuple(part[0] for part in parts[: -task.answers])


def first_sample(task: SampledTask) -> tuple[Tensor, ...]:
    """The first test sample, as a batch; UsageError if no file can hold such samples."""
    if isinstance(task.test, StreamSamples):
        raise UsageError(f"the data of task {task.name!r} are a stream: take its model from paceline.load, and call it")
    sample = task.test.take(FIRST)
    if not all(isinstance(part, Tensor) for part in sample):
        raise UsageError(f"the batches of task {task.name!r} are no tensors: take its model from paceline.load")
    return sample


def _fitting(task: SampledTask, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The samples with the dtype that the task takes; UsageError if their shape or their numbers do not fit."""
    samples = expected(task)
    if len(inputs) != len(samples):
        raise UsageError(f"the model of task {task.name!r} takes {len(samples)} inputs, not {len(inputs)}")
    fitted = []
    for given, sample in zip(inputs, samples, strict=True):
        many = given.unsqueeze(0) if given.shape == sample.shape else given
        if many.shape[1:] != sample.shape or many.dim() != sample.dim() + 1:
            shape = ", ".join(map(str, sample.shape))
            wanted = f"a sample of task {task.name!r} has shape ({shape}), so N samples have (N, {shape})"
            raise UsageError(f"{wanted}; these have {tuple(given.shape)}")
        cast = many.to(sample.dtype)
        if not sample.is_floating_point() and not torch.equal(cast.to(many.dtype), many):
            kind = str(sample.dtype).removeprefix("torch.")
            raise UsageError(
                f"task {task.name!r} takes samples of {kind} numbers, as its data set has them; these have others "
                f"(from {many.min().item():g} to {many.max().item():g})"
            )
        fitted.append(cast)
    if len({len(one) for one in fitted}) > 1:
        raise UsageError(f"the inputs must be equally many samples, not {[len(one) for one in fitted]}")
    return tuple(fitted)


def _one_part(task: SampledTask) -> bool:
    return len(first_sample(task)) == 1


def _checkpoint(run: RunDirectory, which: str | int, say: Say) -> Checkpoint:
    if which == "newest":
        found = checkpoint.newest(run.checkpoints, say)
        if found is None and checkpoint.folders(run.checkpoints):
            raise DataError(f"run {run.name} has no whole checkpoint (looked in {run.checkpoints})")
        if found is None:
            raise UsageError(f"run {run.name} has no checkpoint yet (looked in {run.checkpoints})")
        return found
    if which == "best":
        best = checkpoint.best(run.path, say)
        if best is None and checkpoint.folders(run.path / "best"):
            raise DataError(f"run {run.name} has no whole best checkpoint; take the newest, or a step")
        if best is None:
            raise UsageError(f"run {run.name} has kept no best checkpoint; take the newest, or a step")
        return checkpoint.load(best.path)
    try:
        step = int(which)
    except ValueError:
        raise UsageError(f"which must be newest, best or the step of a checkpoint, not {which!r}") from None
    path = checkpoint.find(run.checkpoints, step)
    if path is None:
        known = ", ".join(map(str, checkpoint.steps(run.checkpoints))) or "none"
        raise UsageError(f"run {run.name} has no checkpoint of step {step}; there are: {known}")
    return checkpoint.load(path)


def _model_of(task: Task, kept: Trained) -> Any:
    """The model of a task with the weights of a checkpoint."""
    if type(task).trained_model is not Task.trained_model:  # which refuses
        _check_task(task, kept)
    return task.trained_model(kept.vector, kept.buffers or None)


def _filled(module: nn.Module, kept: Trained) -> nn.Module:
    """A copy of the module with the weights of a checkpoint."""
    _check(module, kept)
    mine = copy.deepcopy(module)
    flat = FlatModule(mine)
    pieces = torch.split_with_sizes(kept.vector, flat.sizes)
    for parameter, piece in zip(flat.parameters, pieces, strict=True):
        parameter.grad = None
        parameter.data = piece.to(parameter.device).reshape(parameter.shape).clone()
    for name, held in flat.buffers().items():
        held.copy_(kept.buffers[name])
    return mine.eval()


def _check(module: nn.Module, kept: Trained) -> None:
    """UsageError if the parameters and buffers of a module are not those of the checkpoint."""
    flat = FlatModule(module)
    dtype = flat.parameters[0].dtype
    if misfit := _misfit(flat.named(), flat.size, dtype, flat.buffers(), kept):
        raise UsageError(f"the model does not fit checkpoint {kept.checkpoint.path}: {misfit}")


def _check_task(task: Task, kept: Trained) -> None:
    """The same of a task."""
    first = task.start(0)
    if misfit := _misfit(task.parameters(), first.numel(), first.dtype, task.buffers(), kept):
        raise UsageError(f"the model of task {task.name!r} does not fit checkpoint {kept.checkpoint.path}: {misfit}")


def _misfit(own: list[Any], size: int, dtype: torch.dtype, buffers: dict[str, Tensor], kept: Trained) -> str | None:
    saved: list[Any] | None = kept.checkpoint.numbers.get("parameters")
    if saved is not None and own:
        for mine, theirs in zip(own, saved, strict=False):
            if list(mine) != list(theirs):
                return f"it has {_shown(mine)} where that has {_shown(theirs)}"
        if len(own) != len(saved):
            return f"it has {len(own)} parameters, not {len(saved)}"
    if size != kept.vector.numel():
        return f"it has {size:,} numbers, not {kept.vector.numel():,}"
    wanted = kept.vector.dtype
    if dtype != wanted:
        return f"its numbers are {dtype}, not {wanted}; convert it with model.to({wanted})"
    shapes, saved_shapes = ({name: tuple(one.shape) for name, one in m.items()} for m in (buffers, kept.buffers))
    return f"its buffers are {shapes}, not {saved_shapes}" if shapes != saved_shapes else None


def _shown(parameter: Any) -> str:
    name, shape = parameter
    return f"{name} {tuple(shape)}"
