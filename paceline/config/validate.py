"""A checked plan: settings that cannot work are refused before anything is started."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from paceline.compressor import Compressor
from paceline.config import build, discovery, exact, work
from paceline.config.options import checked, declared
from paceline.config.plan import Plan
from paceline.errors import UsageError
from paceline.hook import Hook
from paceline.inside import kind
from paceline.scheme import Scheme
from paceline.task import Task

NO_MEETINGS = ("gloo", "nccl")  # collectives by which the workers of a decentralised scheme cannot meet


def planned(
    task: str | Task | None,
    scheme: str | Scheme | type[Scheme],
    *,
    hooks: Iterable[str | Hook] = (),
    hyper: Mapping[str, Any] | None = None,
    **settings: Any,
) -> tuple[Plan, Scheme, dict[str, Any]]:
    """A checked plan, its scheme, and the objects that a plan cannot name. A setting that is None was not given."""
    chosen = build.compressing(build.scheme_of(scheme, hyper or {}), settings.get("compress") or "")
    settings["compress"] = _named(settings.get("compress"))
    listed = [hooks] if isinstance(hooks, str | Hook) else list(hooks)
    for hook in listed:
        build.hook_of(hook)
    objects = own_objects(task, scheme, listed, hyper or {})
    settings = checked("train", Plan, {name: value for name, value in settings.items() if value is not None})
    work.one_unit(settings)
    settings = exact.settled(settings, chosen, 1 if chosen.alone else 2)
    if not chosen.methods:
        settings["servers"] = no_servers(chosen, settings.get("servers", 1))
    plan = Plan(
        task=task if isinstance(task, str) else None,
        scheme=scheme if isinstance(scheme, str) else None,
        hyper=dict(hyper or {}) if isinstance(scheme, str) else {},
        hooks=[hook for hook in listed if isinstance(hook, str)],
        **settings,
    )
    check(plan, chosen)
    return plan, chosen, objects


def _named(compressor: str | Compressor | None) -> str | None:
    """A compressor as text, which every process can read."""
    if compressor is None or isinstance(compressor, str):
        return compressor
    known = discovery.compressors().get(compressor.name)
    if known is None or known.value is not type(compressor):
        kind = type(compressor).__name__
        raise UsageError(f"other processes cannot find the compressor {kind}: name it as text, 'my_file.py:{kind}'")
    return str(compressor)


def own_objects(
    task: str | Task | None, scheme: str | Scheme | type[Scheme], hooks: Iterable[str | Hook], hyper: Mapping[str, Any]
) -> dict[str, Any]:
    """The objects of the caller, which a plan cannot name."""
    listed = [hooks] if isinstance(hooks, Hook) else [hook for hook in hooks if isinstance(hook, Hook)]
    given = {
        "task": task if isinstance(task, Task) else None,
        "scheme": None if isinstance(scheme, str) else build.scheme_of(scheme, hyper),
        "hooks": listed or None,
    }
    return {name: value for name, value in given.items() if value is not None}


def no_servers(scheme: Scheme, asked: int) -> int:
    """The number of servers of a scheme without a server side; more than the default are refused."""
    if asked > 1:
        raise UsageError(f"{scheme.name} has no server: {asked} were asked for; omit --servers")
    return 0


def check(plan: Plan, scheme: Scheme) -> None:
    """Refuse what cannot work before anything is started."""
    if plan.exact:
        if plan.script:
            raise UsageError("a script cannot be exact: its loop is that of one worker; write its model as a task")
        exact.check(scheme, plan.hosts, plan.micro)
    kind.check(plan.inside, exact=plan.exact, device=plan.device)
    checked("train", Plan, vars(plan))
    if not plan.evaluator:
        for name, one in declared(Plan).items():
            if one.option.needs == "evaluator" and getattr(plan, name) != one.default:
                raise UsageError(f"{one.flag} is for the evaluator, which this run does not have; add --evaluator")
    if plan.collective not in (known := discovery.readable("collectives")):
        raise UsageError(f"train: collective must be one of {', '.join(known)}, not {plan.collective!r}")
    if plan.collective == "nccl" and not plan.device.startswith("cuda"):
        raise UsageError(f"nccl takes means between GPUs, and this run computes on {plan.device}; add --device cuda")
    if plan.collective == "nccl" and plan.hosts < plan.workers:
        needed = f"nccl needs a GPU and a process for each of the {plan.workers} workers"
        raise UsageError(f"{needed}, here are {plan.hosts} processes; use --collective tcp")
    if reason := messages_refused(scheme, plan.collective, plan.device):
        raise UsageError(f"{scheme.name}: {reason}")
    if scheme.decentralised and plan.collective in NO_MEETINGS:
        why = f"{plan.collective} carries sums of all members, not vectors from one worker to another"
        raise UsageError(f"{scheme.name}: workers cannot meet by --collective {plan.collective}: {why}; use tcp")
    if scheme.methods:
        if plan.servers < 1:
            raise UsageError(f"{scheme.name} needs a server: servers must be at least 1, not {plan.servers}")
        if plan.servers > 1 and (reason := scheme.indivisible()):
            raise UsageError(f"{scheme.name} cannot be sharded over {plan.servers} servers: {reason}; use --servers 1")
    scheme.check(plan.workers)
    for name, device in (("device", plan.device), ("eval-device", plan.eval_device or "cpu")):
        check_device(name, device)


def messages_refused(scheme: Scheme, collective: str, device: str) -> str | None:
    """Why the workers of a scheme cannot send each other messages there."""
    if not scheme.sends_messages():
        return None
    if collective in NO_MEETINGS:
        return f"messages between nodes do not go over connections of {collective}; use --collective tcp"
    if device != "cpu":
        return f"messages that nobody waits for are in the memory of the host, not of {device}; use --device cpu"
    return None


def check_device(name: str, device: str) -> None:
    if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise UsageError(f"{name} must be cpu, cuda or cuda:K, not {device!r}")
