"""The cluster that the environment describes. Where several engines are present, the innermost counts, with a note."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import replace
from functools import cache

from paceline.network.cluster import sources, tf_config
from paceline.network.cluster.description import Cluster
from paceline.network.cluster.environment import EnvironmentSource


@cache
def engines() -> tuple[EnvironmentSource, ...]:
    """The sources of all files in sources/, the innermost first."""
    names = [f"{sources.__name__}.{one.name}" for one in pkgutil.iter_modules(sources.__path__)]
    modules = [importlib.import_module(name) for name in names]
    found = {one for module in modules for one in vars(module).values() if isinstance(one, EnvironmentSource)}
    return tuple(sorted(found, key=lambda one: one.order))


def present(environment: Mapping[str, str]) -> list[EnvironmentSource]:
    """The engines that have set variables of this environment."""
    return [engine for engine in engines() if engine.present(environment)]


def seen(environment: Mapping[str, str]) -> Cluster | None:
    """The cluster that an environment describes; None: this process is alone.

    TF_CONFIG names the role of each task, so it takes precedence over the variables of engines.
    """
    found = present(environment)
    named = tf_config.seen(environment)
    if named is not None:
        ignored = ", ".join(engine.name for engine in found)
        return noted(named, f"TF_CONFIG counts; the variables of {ignored} are not read") if found else named
    if not found:
        return None
    first, *others = found
    cluster = first.seen(environment)
    assert cluster is not None
    for other in others:
        ours, theirs = environment.get(first.rank), environment.get(other.rank)
        if ours != theirs:
            told = f"{other.rank} is {theirs}" if theirs else f"{other.name} is there too"
            cluster = noted(cluster, f"{first.rank} counts, which is {ours}; {told} and is not read")
    return cluster


def noted(cluster: Cluster, note: str) -> Cluster:
    """The cluster with one more note for the user."""
    return replace(cluster, notes=(*cluster.notes, note))
