"""A plan as objects: the scheme, the task, and the task as all processes of a run share it."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from paceline.config import build, exact
from paceline.config.plan import Plan
from paceline.errors import UsageError
from paceline.inside.sliced_task import sliced
from paceline.scheme import Scheme
from paceline.task import Task


@dataclass(frozen=True)
class Undecided(Scheme, name="undecided"):
    """Stands for the scheme of a script until its `attach` says which one it is."""


UNDECIDED = Undecided()


def scheme_of(plan: Plan, objects: dict[str, Any]) -> Scheme:
    given = objects.get("scheme") or plan.scheme
    if given is None and plan.script:
        return UNDECIDED
    if given is None:
        raise UsageError("no scheme was given")
    return build.compressing(build.scheme_of(given, plan.hyper), plan.compress)


def task_of(plan: Plan, objects: dict[str, Any]) -> Task:
    """The task of a plan. The supervisor makes it once; the processes that it forks share it."""
    if "ready" in objects:
        ready: Task = objects["ready"]
        return ready
    given = objects.get("task") or plan.task
    if given is None:
        raise UsageError("no task was given")
    task = build.task_of(given, plan.task_options)
    return sliced(task.configured(batch=plan.batch, feed=plan.feed, shuffle=plan.shuffle), plan.inside)


def ready_task(plan: Plan, objects: dict[str, Any]) -> Task:
    """The task, made once for all processes; a setting that it cannot satisfy is refused here."""
    torch.set_num_threads(1)  # this process forks: threads of OpenMP would be missing in its children
    task = task_of(plan, objects)
    task.in_launcher()  # before anything is asked of it that it would compute
    if plan.exact:
        exact.check_task(task, plan.micro)
    if plan.eval_steps is not None:
        task.limited(plan.eval_steps * task.batch)
    return task


def forkable(plan: Plan, task: Task, tell: Callable[[str, str], None]) -> Plan:
    """The plan, with another way to start processes if this one has threads of OpenMP, or of a framework: a fork would
    not copy them, and its first parallel operation would wait for them for ever."""
    threads, reason = torch.get_num_threads(), task.in_launcher()
    if plan.start != "fork" or (threads == 1 and reason is None):
        return plan
    if reason is not None:
        tell("say", f"{reason}: roles start as with --start exec")
        return dataclasses.replace(plan, start="exec")
    tell("warn", f"the task's code sets torch to {threads} threads in the launcher: roles start as with --start exec")
    return dataclasses.replace(plan, start="exec")
