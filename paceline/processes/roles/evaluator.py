"""The evaluator's role: outside the training, it follows the checkpoints and keeps the best."""

from __future__ import annotations

from pathlib import Path

import torch

from paceline.errors import DataError
from paceline.hooks._tensorboard import writer
from paceline.processes.memory import snapshot
from paceline.processes.memory.board import DONE, FAILED, STOP, TRAINING, WAITING
from paceline.processes.memory.run_memory import RunMemory
from paceline.processes.roles.control_channel import Control
from paceline.processes.roles.evaluation import Evaluation
from paceline.runs import checkpoint
from paceline.task import Task

STATE, STEP, PID = range(3)


def follow(memory: RunMemory, task: Task, device: torch.device, control: Control) -> None:
    """Evaluate each new checkpoint (the newest, if several came meanwhile) until the last one."""
    board, plan, words = memory.board, memory.plan, memory.board.evaluator_words
    if plan.eval_steps is not None:
        task = task.limited(plan.eval_steps * task.batch)
    evaluation = Evaluation(task, device)
    done = words[STEP] - 1 if words[STEP] else -1  # a predecessor has done so far
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
        if board.get("generation") != generation:  # the run went back: what comes now are other checkpoints
            generation, done = board.get("generation"), min(done, step)
        if step > done:
            words[STATE] = TRAINING
            try:
                saved = snapshot.find(memory, step)
            except DataError as error:
                if board.get("checkpoint") == step:  # and not because a newer one has taken its place
                    control.send({"warn": f"evaluator: {error}"})
                    done = step
                continue
            metrics = evaluation.of_checkpoint(saved)
            done = step
            words[STEP] = step + 1
            seconds = float(saved.numbers["seconds"])
            control.send({"record": {"update": step, "seconds": seconds, **metrics}, "by": "evaluator"})
            if plan.summaries:
                summaries = summaries or writer(Path(plan.directory) / "summaries" / "evaluator")
                for name, value in metrics.items():
                    summaries.add_scalar(name, value, global_step=step)
            shown = "  ".join(f"{name} {value:.4g}" for name, value in metrics.items())
            control.send({"say": f"evaluator: update {step:,}  {shown}"})
            metric = plan.best or ("accuracy" if "accuracy" in metrics else "loss")
            checkpoint.keep_best(Path(plan.directory), saved, metrics, metric, smaller_is_better=metric != "accuracy")
            ready_at = memory.seconds() + plan.throttle
        elif due():
            break
    if summaries is not None:
        summaries.close()
    words[STATE] = DONE
