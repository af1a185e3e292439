"""The actors of a run under Ray, and how they are followed: which tasks run, have ended, or are restarted.

Ray restarts dead actors; the restarts of tasks are counted here, where the reason is known.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from paceline import signals
from paceline.errors import RunError
from paceline.launchers._child_process import Line, Running, free_port, why

if TYPE_CHECKING:
    from paceline.launcher import Job

LISTEN = 1.0  # seconds that an actor reads from its command before it answers; a signal waits at most this long
RETURN = 120.0  # seconds that Ray may take to restart an actor
FAREWELL = 30.0  # seconds that the other tasks may take to end after the chief
TOGETHER = 5.0  # seconds before a failed task is restarted: the whole run may be failing
FORGIVEN = 600.0  # seconds of life after which earlier restarts no longer count


class TaskActor:
    """The actor of one task. Every method is short, so that a signal is delivered soon."""

    def __init__(self) -> None:
        self.running: Running | None = None

    def address(self, allowed: tuple[int, int] | None) -> tuple[str, int]:
        """A host and a free port for a hub on this node."""
        import ray

        host = ray.util.get_node_ip_address()
        return host, free_port(host, allowed)

    def start(self, words: list[str], environment: dict[str, str], secret: str, directory: str) -> int:
        """Start the task. The secret is passed only as an argument of this call."""
        import ray

        self.stop()
        own = {"PACELINE_ADDRESS": ray.util.get_node_ip_address(), "PACELINE_SECRET": secret}
        self.running = Running(words, {**environment, **own}, directory)
        return self.running.process.pid

    def heard(self, seconds: float) -> tuple[list[Line], int | None]:
        assert self.running is not None
        return self.running.heard(seconds)

    def tell(self, number: int) -> None:
        if self.running is not None:
            self.running.tell(number)

    def stop(self) -> None:
        if self.running is not None:
            self.running.end()
            self.running = None


@dataclass
class Follower:
    """The state of one actor as seen from the launcher."""

    task: str
    actor: Any
    asked: Any = None  # the call that is not answered yet
    started: bool = False  # the task runs, as far as is known
    code: int | None = None  # the final exit code
    failed: int | None = None  # the exit code of a task that is restarted unless the whole run ends
    restarts: int = 0
    since: float = field(default_factory=time.monotonic)  # the time of the last start or loss
    again: float = 0.0  # no call before this time


class RayTasks:
    """The actors of a run. The run ends with the chief; a task that dies before it is restarted."""

    def __init__(self, ray: Any, job: Job, group: Any, bundles: Sequence[Mapping[str, float]], restarts: int) -> None:
        self.ray, self.job, self.restarts = ray, job, restarts
        scheduling = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        actor = ray.remote(TaskActor)
        self.followers = [
            Follower(
                task,
                actor.options(
                    name=f"{job.name}-{task}-{os.getpid()}",
                    num_cpus=bundles[index]["CPU"],
                    num_gpus=bundles[index].get("GPU", 0),
                    memory=bundles[index].get("memory"),
                    max_restarts=-1,  # restarts are counted here, where the reason is known
                    scheduling_strategy=scheduling(placement_group=group, placement_group_bundle_index=index),
                ).remote(),
            )
            for index, task in enumerate(job.tasks)
        ]
        self.chief = next(one for one in self.followers if one.task == "chief")
        self.hub: tuple[str, int] | None = None
        self.met = False  # `hub` is the address of the chief's current process
        self.asked = signals.Counter()

    def followed(self) -> int:
        """Follow the tasks until the chief has ended and the others have had time to. Returns its exit code."""
        with signals.counted(self.asked):
            told = 0
            farewell = float("inf")
            while time.monotonic() < farewell:
                open_ = [one for one in self.followers if one.code is None]
                if not open_:
                    break
                for one in sorted(open_, key=lambda one: one is not self.chief):
                    self._ask(one)
                asked = {one.asked: one for one in open_ if one.asked is not None}
                if not asked:  # all actors are being restarted
                    time.sleep(0.2)
                for reference in self.ray.wait(list(asked), timeout=0.2)[0] if asked else []:
                    self._answered(asked[reference])
                if self.asked.count > told:
                    told = self.asked.count
                    if told > 1:
                        raise KeyboardInterrupt
                    self.job.say("stopping: the chief writes a last checkpoint (once more: kill everything at once)")
                    self.chief.actor.tell.remote(signal.SIGINT)
                if self.chief.code is not None:
                    farewell = min(farewell, time.monotonic() + FAREWELL)
        late = [one.task for one in self.followers if one.code is None]
        if late:
            self.job.say(f"{', '.join(late)} did not end with the chief and is killed")
        assert self.chief.code is not None
        return self.chief.code if self.chief.code >= 0 else 1

    def dismiss(self) -> None:
        """Kill every actor; the kernel ends its task with it."""
        for one in self.followers:
            with contextlib.suppress(self.ray.exceptions.RayError):
                self.ray.kill(one.actor, no_restart=True)

    def _ask(self, one: Follower) -> None:
        if one.asked is not None or one.code is not None:
            return
        if self.chief.code is not None and not one.started:  # too late to start
            one.code = one.failed or 0
            return
        if time.monotonic() < one.again:
            return
        if one.failed is not None:
            failed, one.failed = one.failed, None
            self._restart(one, why(failed))
            return
        if one.started:
            one.asked = one.actor.heard.remote(LISTEN)
        elif one is self.chief and not self.met:
            one.asked = one.actor.address.remote(self.job.ports)
        elif self.met and self.hub is not None:
            host, port = self.hub
            hub = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            environment = self.job.environment(one.task) | {"PACELINE_HUB": hub}
            words, here = list(self.job.command), os.getcwd()  # noqa: PTH109
            one.asked = one.actor.start.remote(words, environment, self.job.secret.hex(), here)

    def _answered(self, one: Follower) -> None:
        asked, one.asked = one.asked, None
        try:
            answer = self.ray.get(asked)
        except self.ray.exceptions.RayActorError as error:
            self._lost(one, error)
            return
        except self.ray.exceptions.RayTaskError as error:  # such as a range of ports that is used up
            raise RunError(f"{one.task} cannot start: {getattr(error, 'cause', None) or error}") from None
        if isinstance(answer, int):
            one.started, one.since = True, time.monotonic()
        elif isinstance(answer[0], str):
            self._met(answer)
        else:
            lines, code = answer
            for stream, text in lines:
                ours = one is self.chief
                file = sys.stdout if ours and stream == "out" else sys.stderr
                print(text if ours else f"{one.task}: {text}", file=file, flush=True)
            if code is not None:
                self._ended(one, code)

    def _met(self, offered: tuple[str, int]) -> None:
        """The chief's address is known. On the same node it keeps its port; after a move all other tasks are restarted,
        since they know the old address."""
        self.met = True
        if self.hub is not None and self.hub[0] == offered[0]:
            return
        self.hub = offered
        for one in self.followers:
            if one is not self.chief:
                one.started = False

    def _lost(self, one: Follower, error: Exception) -> None:
        """The actor died, or its node: Ray restarts the actor, and then its task is restarted."""
        now = time.monotonic()
        one.again = now + 0.5
        if one.started:
            self._restart(one, "its actor died and is restarted by Ray")
            if one is self.chief:
                self.met = False  # it may be restarted on another node
        elif now - one.since > RETURN:
            raise RunError(f"Ray did not restart the actor of {one.task} in {RETURN:g} s: {error}")

    def _ended(self, one: Follower, code: int) -> None:
        if self.chief.code is not None or code == 0 or (one is self.chief and code > 0) or self.asked.count:
            one.code = code
            if one is not self.chief and code:
                self.job.say(f"{one.task} {why(code)} after the end of the run")
            return
        if one is self.chief or code < 0:
            self._restart(one, why(code))
        else:
            one.started, one.failed, one.again = False, code, time.monotonic() + TOGETHER

    def _restart(self, one: Follower, reason: str) -> None:
        now = time.monotonic()
        one.restarts = 1 if now - one.since > FORGIVEN else one.restarts + 1
        if self.asked.count and one is self.chief:
            one.code = 1
            return
        if one.restarts > self.restarts:
            often = f"it has been restarted {self.restarts} times already (--engine restarts=…)"
            raise RunError(f"{one.task}: {reason}; {often}. The newest checkpoint is in {self.job.directory}")
        self.job.say(f"{one.task}: {reason}; restarted ({one.restarts} of at most {self.restarts} times)")
        one.started, one.since, one.again = False, now, now + 0.5
        if one is self.chief:  # tasks that end because the chief is gone are not counted
            for other in self.followers:
                other.restarts = other.restarts if other is one else 0
