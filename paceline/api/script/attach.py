"""`paceline.attach`: an existing PyTorch script becomes a worker and keeps its loop."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.api.script import standalone
from paceline.api.script.loop import Evaluate, Pace, ScriptTask
from paceline.config import build, discovery
from paceline.config.plan import Plan
from paceline.config.validate import check
from paceline.errors import UsageError
from paceline.hook import Hook
from paceline.processes.roles import script_role
from paceline.processes.roles.main import hooks_of
from paceline.processes.roles.preparation import prepare, wait_until_joined, wait_until_ready
from paceline.processes.roles.script_role import ScriptRole
from paceline.processes.roles.worker_session import WorkerSession
from paceline.sampling import mixed
from paceline.scheme import Scheme

_alone: Pace | None = None


def attach(
    model: nn.Module,
    scheme: str | Scheme | type[Scheme] = "async",
    *,
    steps: int | None = None,
    evaluate: Evaluate | None = None,
    hooks: Iterable[str | Hook] = (),
    seed: int = 0,
    directory: str | Path | None = None,
    resume: bool = False,
    **hyper: Any,
) -> Pace:
    """Train this model in the script's own loop, under any scheme, as one of the workers of `paceline run script.py`.

    with paceline.attach(model, scheme="downpour", lr=0.05, steps=2000) as pace:
        for images, labels in pace.share(loader):
            pace.step(F.cross_entropy(model(images), labels))

    steps:     updates of the centre, after which the run ends;   evaluate: of the model, gives metrics by name;
    directory: of a script that runs by itself (`python script.py`), and resume=True to go on in it. A launched script
               has that of `paceline run`, whose --scheme, --steps and hyper-parameters take the place of these.
    After the block the model holds the final weights of the centre, in memory of its own.
    """
    if hyper.keys() & {"exact", "micro"}:
        raise UsageError("a script cannot be exact: its loop is that of one worker; write its model as a task")
    listed = [hooks] if isinstance(hooks, str | Hook) else list(hooks)
    own = [build.hook_of(hook) for hook in listed]
    role = script_role.role()
    if role is not None:
        return _launched(role, model, scheme, hyper, steps, evaluate, own, seed, directory)
    return _by_itself(model, scheme, hyper, steps, evaluate, own, seed, directory, resume)


def _launched(
    role: ScriptRole,
    model: nn.Module,
    scheme: str | Scheme | type[Scheme],
    hyper: dict[str, Any],
    steps: int | None,
    evaluate: Evaluate | None,
    own: list[Hook],
    seed: int,
    directory: str | Path | None,
) -> Pace:
    if role.loop is not None:
        raise UsageError("paceline.attach() was called a second time: a run has one model, trained once")
    memory, plan, control, chief = role.memory, role.memory.plan, role.control, role.rank == 0
    name, chosen = _chosen(plan, scheme, hyper)
    task = ScriptTask(model, evaluate, Path(plan.script[0]).stem)
    decided: dict[str, Any] = {
        "steps": steps if plan.steps is None else plan.steps,
        "seed": plan.seed or seed,
        "servers": plan.servers if chosen.methods else 0,
        "device": str(task.device),
    }
    if chief and not memory.board.get("ready"):
        for text in _overridden(plan, scheme, steps, directory):
            control.send({"say": text})
    memory.plan = replace(plan, **decided)
    memory.scheme = memory.first_scheme = chosen
    check(memory.plan, chosen)
    if chief and not memory.board.get("ready"):
        control.send({"task": task.name})
        noted = {"name": name, "hyper": build.hyper_of(chosen)}
        notes = {"scheme": noted, "plan": decided, "parameters": task.flat.named()}
        prepare(memory, task, notes, control)
    else:
        wait_until_ready(memory)
    wait_until_joined(memory)
    hooks = role.hooks_with(own)
    session = WorkerSession(memory, task, role.rank, hooks, control)
    role.loop = pace = Pace(session, task, hooks, ExitStack())
    _seed(session)
    return pace


def _by_itself(
    model: nn.Module,
    scheme: str | Scheme | type[Scheme],
    hyper: dict[str, Any],
    steps: int | None,
    evaluate: Evaluate | None,
    own: list[Hook],
    seed: int,
    directory: str | Path | None,
    resume: bool,
) -> Pace:
    global _alone
    if _alone is not None and not _alone.done:
        raise UsageError("paceline.attach() was called a second time, before the block of the first one has ended")
    chosen = build.scheme_of(scheme, hyper)
    script = Path(sys.argv[0]).stem or "script"
    task = ScriptTask(model, evaluate, script)
    plan = Plan(
        scheme=chosen.name,
        hyper=build.hyper_of(chosen),
        workers=1,
        servers=1 if chosen.methods else 0,
        steps=steps,
        seed=seed,
        device=str(task.device),
        script=sys.argv[:1],
        title=f"{script} by itself",
    )
    check(plan, chosen)
    place = standalone.directory_for(f"{script}-{chosen.name}", directory, resume)
    plan = replace(plan, directory=str(place.path))
    hooks = hooks_of(plan, {"hooks": own}, "chief")
    with ExitStack() as around:
        session = standalone.session_of(plan, chosen, task, hooks, {"parameters": task.flat.named()}, around)
        print(f"paceline: {script} runs by itself, as the only worker of {chosen.name}, in {place.path}", flush=True)
        _alone = Pace(session, task, hooks, around.pop_all())
    _seed(session)
    return _alone


def _seed(session: WorkerSession) -> None:
    """Dropout and the like differ from worker to worker, and are not what they were before a restart."""
    torch.manual_seed(mixed(session.memory.plan.seed, session.rank, session.worker.t))


def _chosen(plan: Plan, scheme: str | Scheme | type[Scheme], hyper: dict[str, Any]) -> tuple[str, Scheme]:
    """The scheme, and a name by which every process of the run finds its class."""
    if plan.scheme is not None and plan.scheme != scheme:
        return _absolute(plan.scheme), build.scheme_of(plan.scheme, plan.hyper)
    chosen = build.scheme_of(scheme, hyper | plan.hyper)
    return _absolute(scheme) if isinstance(scheme, str) else _reference(type(chosen)), chosen


def _absolute(name: str) -> str:
    """A script may change the directory; a file is found all the same."""
    where, _, attribute = name.rpartition(":")
    return f"{Path(where).resolve()}:{attribute}" if where.endswith(".py") else name


def _reference(scheme: type[Scheme]) -> str:
    known = discovery.schemes().get(scheme.name)
    if known is not None and known.value is scheme:
        return str(scheme.name)
    home, name = scheme.__module__, scheme.__qualname__
    if home == "__main__" or "<locals>" in name:
        raise UsageError(
            f"the servers cannot find the scheme {name}, which the script itself defines: put the class into a file "
            f"of its own and name it, attach(model, 'my_scheme.py:{scheme.__name__}')"
        )
    # a module of the script's folder is a file; one of a package is imported by its name
    return f"{home}:{name}" if "." in home else f"{Path(inspect.getfile(scheme)).resolve()}:{name}"


def _overridden(
    plan: Plan, scheme: str | Scheme | type[Scheme], steps: int | None, directory: str | Path | None
) -> Iterable[str]:
    """What the script asks for and does not get."""
    asked = scheme if isinstance(scheme, str) else scheme.name
    if plan.scheme is not None and plan.scheme != asked:
        yield f"the command line's --scheme {plan.scheme} takes the place of the script's {asked}"
    elif plan.hyper:
        words = " ".join(f"{key}={value}" for key, value in plan.hyper.items())
        yield f"the command line's {words} takes the place of the script's"
    if plan.steps is not None and steps is not None and plan.steps != steps:
        yield f"the command line's --steps {plan.steps} takes the place of the script's {steps}"
    if directory is not None:
        yield f"the script's directory={str(directory)!r} is not used: this run is kept in {plan.directory}"
