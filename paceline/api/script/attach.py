"""`paceline.attach`: an existing training script becomes a worker and keeps its loop."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, overload

from torch import nn
from torch.optim import Optimizer

from paceline.api.script import standalone
from paceline.api.script.frameworks import check_optimizer, loop_of, script_of
from paceline.api.script.loader_sharding import Loader, work_of
from paceline.api.script.loop import Pace
from paceline.api.script.script_loop import ScriptLoop
from paceline.api.script.script_task import Evaluate, ScriptTask
from paceline.config import build, discovery, work
from paceline.config.optimizer_argument import OptimizerArgument, ScheduleArgument, hyper_for
from paceline.config.plan import Plan
from paceline.config.validate import check
from paceline.errors import UsageError
from paceline.fields import Component
from paceline.hook import Hook
from paceline.processes.roles import script_role
from paceline.processes.roles.main import hooks_of
from paceline.processes.roles.preparation import prepare, wait_until_joined, wait_until_ready
from paceline.processes.roles.script_role import ScriptRole, seed_all
from paceline.processes.roles.worker_session import WorkerSession
from paceline.sampling import mixed
from paceline.scheme import Scheme

_alone: ScriptLoop | None = None


@overload
def attach(
    model: nn.Module,
    scheme: str | Scheme | type[Scheme] = "async",
    *,
    steps: int | None = None,
    samples: int | None = None,
    epochs: float | None = None,
    loader: Loader | None = None,
    evaluate: Evaluate | None = None,
    hooks: Iterable[str | Hook] = (),
    seed: int = 0,
    directory: str | Path | None = None,
    resume: bool = False,
    profile: bool = False,
    compress: str = "",
    optimizer: OptimizerArgument | Mapping[str, Optimizer] | None = None,
    schedule: ScheduleArgument | None = None,
    **hyper: Any,
) -> Pace: ...
@overload
def attach(model: Any, scheme: str | Scheme | type[Scheme] = "async", **settings: Any) -> Any: ...
def attach(
    model: Any,
    scheme: str | Scheme | type[Scheme] = "async",
    *,
    steps: int | None = None,
    samples: int | None = None,
    epochs: float | None = None,
    loader: Loader | None = None,
    evaluate: Evaluate | None = None,
    hooks: Iterable[str | Hook] = (),
    seed: int = 0,
    directory: str | Path | None = None,
    resume: bool = False,
    profile: bool = False,
    compress: str = "",
    optimizer: OptimizerArgument | Mapping[str, Optimizer] | None = None,
    schedule: ScheduleArgument | None = None,
    **hyper: Any,
) -> Any:
    """Train this model in the script's own loop, under any scheme, as one of the workers of `paceline run script.py`.

        with paceline.attach(model, scheme="downpour", lr=0.05, steps=2000) as pace:
            for images, labels in pace.share(loader):
                pace.step(F.cross_entropy(model(images), labels))

    steps:     updates of the centre after which the run ends;
    evaluate:  a function of the model that gives metrics;
    samples, epochs: the length of the run in place of steps, converted to updates: equal work for any scheme and number
               of workers. They need `loader`, the one that `pace.share` gets, for the size of a batch and of an epoch;
    directory: of a script that runs by itself (`python script.py`); resume=True resumes the run in it. A launched
               script has that of `paceline run`, whose --scheme, --steps and hyper-parameters replace these.
    compress:  a compressor for what workers send, "topk:0.01": docs/compression.md; --compress replaces it;
    profile:   measure what the time goes into, and trace some steps: docs/profile.md;
    optimizer: of torch.optim over the model, or a function of the model that makes one: the scheme's rule. Several by
               name are stepped in turns, `pace.step(loss, of="generator")`;
    schedule:  a function of the optimizer that gives a torch.optim.lr_scheduler, stepped once per update of the centre.

    After the block the model holds the final weights of the centre, in memory of its own.
    """
    if hyper.keys() & {"exact", "micro"}:
        raise UsageError("a script cannot be exact: its loop is that of one worker; write its model as a task")
    check_optimizer(model, optimizer, schedule)
    named = dict(optimizer) if isinstance(optimizer, Mapping) else {}
    rule = list(named.values()) if isinstance(optimizer, Mapping) else optimizer
    if rule is not None or schedule is not None:
        hyper |= hyper_for(build.scheme_of(scheme, hyper), hyper, model, rule, schedule, steps=steps)
    if named:
        hyper["rule.separate"] = True
    work.one_unit({"steps": steps, "samples": samples, "epochs": epochs})
    length = None
    if samples is not None or epochs is not None:
        if loader is None:
            raise UsageError("samples and epochs need the data's size: give attach() the loader too, loader=…")
        batch, size = work_of(loader)
        length = partial(work.in_updates, batch=batch, feed="shared", epoch_size=size, samples=samples, epochs=epochs)
    own = [build.hook_of(hook) for hook in ([hooks] if isinstance(hooks, str | Hook) else hooks)]
    role = script_role.role()
    attached = _by_itself if role is None else partial(_launched, role)
    given = rule if isinstance(rule, list | tuple) else [rule]
    optimizers = [one for one in given if isinstance(one, Optimizer)]
    return attached(
        _Script(
            model,
            scheme,
            hyper,
            steps,
            length,
            evaluate,
            own,
            seed,
            directory,
            resume,
            profile,
            compress,
            optimizers,
            named,
        )
    )


@dataclass(frozen=True)
class _Script:
    """The arguments of `attach`."""

    model: Any
    scheme: str | Scheme | type[Scheme]
    hyper: dict[str, Any]
    steps: int | None
    length: Callable[[Scheme, int], int] | None  # updates, of a scheme and a number of workers
    evaluate: Evaluate | None
    hooks: list[Hook]
    seed: int
    directory: str | Path | None
    resume: bool
    profile: bool
    compress: str
    optimizers: list[Optimizer]
    named: dict[str, Optimizer]  # those that are stepped in turns

    def updates(self, scheme: Scheme, workers: int) -> int | None:
        """After which the run ends."""
        return self.steps if self.length is None else self.length(scheme, workers)


def _launched(role: ScriptRole, script: _Script) -> ScriptLoop:
    if role.loop is not None:
        raise UsageError("paceline.attach() was called a second time: a run has one model, trained once")
    memory, plan, control, chief = role.memory, role.memory.plan, role.control, role.rank == 0
    name, chosen, replaced = _chosen(plan, script)
    compress = plan.compress or script.compress
    chosen = build.compressing(chosen, compress)
    task = script_of(script.model, script.evaluate, Path(plan.script[0]).stem)
    decided: dict[str, Any] = {
        "steps": script.updates(chosen, plan.workers) if plan.steps is None else plan.steps,
        "seed": plan.seed or script.seed,
        "servers": plan.servers if chosen.methods else 0,
        "device": str(task.device),
        "profile": plan.profile or script.profile,
        "compress": compress,
    }
    prepares = chief and not memory.board.get("ready")
    if prepares:
        for text in (*replaced, *_overridden(plan, script, chosen)):
            control.send({"say": text})
    memory.plan = replace(plan, **decided)
    memory.scheme = memory.first_scheme = chosen
    check(memory.plan, chosen)
    if prepares:
        control.send({"task": task.name})
        noted = {"name": name, "hyper": build.hyper_of(chosen)}
        notes = {"scheme": noted, "plan": decided, "parameters": task.parameters()}
        prepare(memory, task, notes, control)
    else:
        wait_until_ready(memory)
    if task.device != memory.device(role.rank):
        raise UsageError(
            f"the model of worker:{role.rank} is on {task.device}, that of the chief on {memory.plan.device}; a script "
            "uses the same device name on all workers. For a GPU each, give every worker one by CUDA_VISIBLE_DEVICES"
        )
    wait_until_joined(memory)
    hooks = role.hooks_with(script.hooks)
    session = WorkerSession(memory, task, role.rank, hooks, control)
    role.loop = pace = loop_of(session, task, hooks, ExitStack(), script.optimizers, script.named)
    _seed(session, task)
    return pace


def _by_itself(script: _Script) -> ScriptLoop:
    global _alone
    if _alone is not None and not _alone.done:
        raise UsageError("paceline.attach() was called a second time, before the block of the first one has ended")
    chosen = build.compressing(build.scheme_of(script.scheme, script.hyper), script.compress)
    name = Path(sys.argv[0]).stem or "script"
    task = script_of(script.model, script.evaluate, name)
    plan = Plan(
        scheme=chosen.name,
        hyper=build.hyper_of(chosen),
        workers=1,
        servers=1 if chosen.methods else 0,
        steps=script.updates(chosen, 1),
        seed=script.seed,
        device=str(task.device),
        script=sys.argv[:1],
        profile=script.profile,
        compress=script.compress,
        title=f"{name} by itself",
    )
    check(plan, chosen)
    place = standalone.directory_for(f"{name}-{chosen.name}", script.directory, script.resume)
    plan = replace(plan, directory=str(place.path))
    hooks = hooks_of(plan, {"hooks": script.hooks}, "chief")
    with ExitStack() as around:
        session = standalone.session_of(plan, chosen, task, hooks, {"parameters": task.parameters()}, around)
        print(f"paceline: {name} runs by itself, as the only worker of {chosen.name}, in {place.path}", flush=True)
        _alone = loop_of(session, task, hooks, around.pop_all(), script.optimizers, script.named)
    _seed(session, task)
    return _alone


def _seed(session: WorkerSession, task: ScriptTask) -> None:
    """Random numbers of the script, such as for dropout, differ between workers and after a restart. A single worker
    keeps those of the script, so that it computes the bits of the script without paceline."""
    worker = session.worker
    if worker.workers > 1 or worker.t or session.board.begun[session.rank]:
        seed = mixed(session.memory.plan.seed, session.rank, worker.t)
        seed_all(seed)
        task.seed(seed)


def _chosen(plan: Plan, script: _Script) -> tuple[str, Scheme, list[str]]:
    """The scheme, a name by which every process of the run can find its class, and what the command line has replaced.
    Another scheme takes over the hyper-parameters that the script gives and both have; --set replaces any of them."""
    own = build.scheme_of(script.scheme, script.hyper)
    asked = script.scheme if isinstance(script.scheme, str) else own.name
    told: list[str] = []
    if plan.scheme is None or plan.scheme == asked:
        chosen, name = own, _absolute(asked) if isinstance(script.scheme, str) else _reference(type(own))
    else:
        given = build.given_to(own) if isinstance(script.scheme, Scheme) else script.hyper
        chosen, dropped = build.adopted(discovery.scheme(plan.scheme), given)
        name = _absolute(plan.scheme)
        hidden = {key for key in given if key.endswith(".grouped")}  # the groups of an optimizer: a long text
        kept = ", ".join(_word(key, value) for key, value in given.items() if key not in {*dropped, *hidden})
        told.append(
            f"the command line's --scheme {plan.scheme} takes the place of the script's {asked}"
            + (f"; kept of the script: {kept}" if kept else "")
        )
        told += [f"the script's {_word(key, given[key])} is dropped: {reason}" for key, reason in dropped.items()]
    final = build.scheme_of(chosen, plan.hyper)
    before, after = build.hyper_of(chosen), build.hyper_of(final)
    changed = [
        f"{key}={value} (instead of {before.get(key)})" for key, value in after.items() if value != before.get(key)
    ]
    if changed:
        told.append(f"the command line sets {', '.join(changed)}")
    if "lr" in plan.hyper and getattr(getattr(final, "rule", None), "grouped", False):
        told.append("lr does not change the rates of the script's optimizer, which has its own")
    return name, final, told


def _word(key: str, value: Any) -> str:
    return f"{key}={value.name if isinstance(value, Component) else value}"


def _absolute(name: str) -> str:
    """A scheme's name with an absolute path of its file: the script may change the working directory."""
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


def _overridden(plan: Plan, script: _Script, chosen: Scheme) -> Iterable[str]:
    """Messages about other settings of the script or the command line that are not used."""
    if plan.servers > 1 and not chosen.methods:
        yield f"{chosen.name} has no server: --servers {plan.servers} is not used"
    if plan.steps is not None and script.steps is not None and plan.steps != script.steps:
        yield f"the command line's --steps {plan.steps} takes the place of the script's {script.steps}"
    if script.directory is not None:
        yield f"the script's directory={str(script.directory)!r} is not used: this run is kept in {plan.directory}"
