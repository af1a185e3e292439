"""Evaluates vectors and checkpoints. The evaluator's role: it evaluates each new checkpoint, and keeps the best one."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.errors import DataError
from paceline.processes.memory import snapshot
from paceline.processes.memory.board import DONE, FAILED, STOP, TRAINING, WAITING
from paceline.processes.memory.run_memory import RunMemory
from paceline.processes.roles.control_channel import Control
from paceline.runs import checkpoint
from paceline.runs.checkpoint import Checkpoint
from paceline.runs.event_file import EventFile
from paceline.state import Vector
from paceline.task import Task

STATE, STEP, PID = range(3)  # words of the evaluator on the board


class Evaluation:
    """`turn` is held while the task computes: workers of one process share its model."""

    def __init__(self, task: Task, device: torch.device, turn: AbstractContextManager[Any] | None = None) -> None:
        self._task, self._device, self._turn = task, device, turn or nullcontext()

    def of(self, x: Vector, buffers: Mapping[str, Tensor]) -> dict[str, float]:
        """Metrics of a vector."""
        there = {name: buffer.to(self._device) for name, buffer in buffers.items()}
        with self._turn:
            return self._task.evaluate(x.to(self._device), there or None)

    def model(self, x: Vector, buffers: Mapping[str, Tensor]) -> Any:
        """The task's model with these parameters, as its framework has it."""
        with self._turn:
            return self._task.trained_model(x, buffers or None)

    def of_checkpoint(self, saved: Checkpoint) -> dict[str, float]:
        return self.of(saved.tensors["model"], saved.under("model_buffer."))


def follow(memory: RunMemory, task: Task, device: torch.device, control: Control) -> None:
    """Evaluate each new checkpoint (the newest, if several came meanwhile) until the last one."""
    board, plan, words = memory.board, memory.plan, memory.board.evaluator_words
    if plan.eval_steps is not None:
        task = task.limited(plan.eval_steps * task.batch)
    evaluation = Evaluation(task, device)
    done = words[STEP] - 1 if words[STEP] else -1  # what the process before has evaluated
    ready_at = memory.seconds() + plan.delay
    generation, summaries = board.get("generation"), None

    def due() -> bool:
        return bool(board.get("over") or board.run[STOP] == FAILED)

    while True:
        words[STATE] = WAITING
        while memory.seconds() < ready_at and not due():
            memory.wakeup.wait(due, ready_at - memory.seconds())
        memory.wakeup.wait(lambda seen=done: board.get("checkpoint") > seen or due())  # type: ignore[misc]
        step = board.get("checkpoint")
        if board.get("generation") != generation:  # the run has returned to a checkpoint: newer ones are written again
            generation, done = board.get("generation"), min(done, step)
        if step > done:
            words[STATE] = TRAINING
            try:
                saved = snapshot.find(memory, step)
            except DataError as error:
                if board.get("checkpoint") == step:  # otherwise a newer checkpoint has replaced it
                    control.send({"warn": f"evaluator: {error}"})
                    done = step
                continue
            metrics = evaluation.of_checkpoint(saved)
            done, words[STEP] = step, step + 1
            seconds = float(saved.numbers["seconds"])
            control.send({"record": {"update": step, "seconds": seconds, **metrics}, "by": "evaluator"})
            if plan.summaries:
                summaries = summaries or EventFile(Path(plan.directory) / "summaries" / "evaluator")
                summaries.scalars(metrics, step)
            shown = "  ".join(f"{name} {value:.4g}" for name, value in metrics.items())
            control.send({"say": f"evaluator: update {step:,}  {shown}"})
            metric = plan.best or ("accuracy" if "accuracy" in metrics else "loss")
            checkpoint.keep_best(Path(plan.directory), saved, metrics, metric, smaller_is_better=metric != "accuracy")
            ready_at = memory.seconds() + plan.throttle
        elif due():
            break
    words[STATE] = DONE
