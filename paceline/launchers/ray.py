"""`--on ray`: a placement group with a bundle for each task, and an actor in each that runs the task's command.

Ray places the actors and restarts dead ones; this side follows them, restarts their tasks and streams what the chief
prints. The chief's actor reports its address, so no list of hosts and ports is needed.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections import Counter
from typing import Any

from paceline.errors import RunError, UsageError
from paceline.launcher import Job, Launcher
from paceline.launchers import _child_process, _ray_actors
from paceline.launchers._foreground import as_listing
from paceline.launchers._ray_actors import RayTasks


class RaySettings:
    """The values of `--engine`."""

    def __init__(self, job: Job) -> None:
        strategy = (job.options.get("strategy") or job.options.get("placement") or "pack").lower()
        if strategy not in ("pack", "spread"):
            raise UsageError(f"--engine strategy={strategy}: Ray places by pack or spread")
        self.address, self.strategy, self.memory = job.options.get("address"), strategy.upper(), job.size("memory")
        self.restarts, self.patience = job.number("restarts", 3), job.seconds("patience", 60.0)

    def bundle(self, job: Job, task: str) -> dict[str, float]:
        """The resources of a task."""
        asked: dict[str, float] = {"CPU": job.threads}
        if job.gpus_of(task):
            asked["GPU"] = job.gpus_of(task)
        if self.memory is not None:
            asked["memory"] = self.memory
        return asked


class RayLauncher(Launcher):
    """Actors of a Ray placement group run the tasks; Ray restarts dead actors."""

    name = "ray"
    keys = {
        "address": "HOST:PORT of the cluster's head; default: the cluster that Ray finds, else this machine alone",
        "strategy": "pack or spread: how tasks are placed on nodes; default: pack",
        "placement": "the same as strategy",
        "memory": "of each task, such as 2G, for Ray's accounting; default: none",
        "restarts": "restarts of a task; those before 10 minutes of life no longer count; default: 3",
        "patience": "seconds to wait for room on the cluster; default: 60",
    }

    def launch(self, job: Job) -> int:
        settings = RaySettings(job)
        ray = _ray()
        for module in (*_child_process.BY_VALUE, _ray_actors):  # by value: an actor needs no torch to start a command
            ray.cloudpickle.register_pickle_by_value(module)
        ours = not ray.is_initialized()
        if ours:
            _connect(ray, job, settings)
        group = None
        try:
            group = _group(ray, job, settings)
            tasks = RayTasks(ray, job, group, [settings.bundle(job, task) for task in job.tasks], settings.restarts)
            try:
                return tasks.followed()
            finally:
                tasks.dismiss()
        finally:
            if group is not None:
                with contextlib.suppress(ray.exceptions.RayError):
                    ray.util.remove_placement_group(group)
            if ours:
                ray.shutdown()

    def shown(self, job: Job) -> str:
        settings = RaySettings(job)
        where = settings.address or "the cluster that is running (RAY_ADDRESS), or this machine alone if there is none"
        bundles = Counter(
            ", ".join(f"{name} {amount:g}" for name, amount in settings.bundle(job, task).items()) for task in job.tasks
        )
        bundle = "; ".join(f"{count} bundles of {amounts}" for amounts, count in bundles.items())
        first = [
            f"ray: {where}",
            f"placement group: {settings.strategy}, {bundle}",
            f"actors: one in each bundle, restarted by Ray; its task at most {settings.restarts} times",
        ]

        def more(task: str) -> str:
            hub = "HOST:PORT of its own node" if task == "chief" else "what the chief's actor tells"
            return f"PACELINE_HUB=({hub}) PACELINE_ADDRESS=(its node)"

        return as_listing(job, first, "actor", more, "as an argument of a call")


def _connect(ray: Any, job: Job, settings: RaySettings) -> None:
    """Join the named cluster, or the one that Ray finds; where there is none, start one on this machine."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    plain = {"log_to_driver": False, "logging_level": "warning", "configure_logging": False}
    needed = job.threads * len(job.tasks)
    try:
        if settings.address is None:
            try:
                ray.init(num_cpus=max(needed, os.cpu_count() or 1), include_dashboard=False, **plain)
                job.say(f"ray: no cluster is running; this machine alone, with {needed} CPUs in name")
                return
            except ValueError:  # there is a cluster, which refuses num_cpus
                ray.init(**plain)
        else:
            _check_address(settings.address)
            ray.init(address=settings.address, **plain)
    except (ConnectionError, socket.gaierror) as error:
        where = settings.address or os.environ.get("RAY_ADDRESS") or "the address that Ray remembers"
        raise UsageError(f"no Ray cluster answers at {where}: {error}") from None
    job.say(f"ray: joined the cluster at {ray.get_runtime_context().gcs_address}")


def _check_address(address: str) -> None:
    """Connect once: Ray itself tries for minutes before it reports that nothing listens there."""
    if address.startswith("ray://"):
        raise UsageError(f"--engine address={address}: submit from a node of the cluster, with HOST:PORT of its head")
    host, colon, port = address.rpartition(":")
    if colon and port.isdigit():
        with contextlib.suppress(TimeoutError):  # a slow network is no wrong address
            socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()


def _group(ray: Any, job: Job, settings: RaySettings) -> Any:
    """The placement group, once Ray has room for all of it."""
    bundles = [settings.bundle(job, task) for task in job.tasks]
    group = ray.util.placement_group(bundles, strategy=settings.strategy)
    if group.wait(settings.patience):
        return group
    free = ray.available_resources()
    wanted = {name: sum(one.get(name, 0) for one in bundles) for one in bundles for name in one}
    asked = ", ".join(f"{amount:g} {name} (free: {free.get(name, 0):g})" for name, amount in wanted.items())
    ray.util.remove_placement_group(group)
    raise RunError(
        f"Ray found no room for {len(job.tasks)} tasks within {settings.patience:g} s. They take {asked}. "
        "Add nodes, take fewer workers, or wait longer (--engine patience=SECONDS)"
    )


def _ray() -> Any:
    try:
        import ray
        import ray.util.scheduling_strategies
    except ImportError as error:
        raise UsageError(f"--on ray needs Ray ({error}); install it: pip install 'paceline[ray]'") from None
    return ray
