"""Three hosts with a network between them: power cuts, cables, and slow wires. The tasks are begun by hand, as any
launcher would; a host that comes back is restarted by its owner, here the test.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from beds.hosts import Host, Running, several, until
from far_runs import COMMAND, LIMIT, Story, options

TASKS = {"h1": "chief", "h2": "server:0", "h3": "worker:0"}
PATIENCE = 8.0  # as far_runs has it


@dataclass
class Hosts(Story):
    """A run with a task on each host."""

    started: ExitStack  # ends what is still there
    scheme: str = "async"
    tasks: dict[str, Running] = field(default_factory=dict)

    def begin(self, name: str) -> Running:
        """Start the task of a host."""
        environment = os.environ | {
            "PACELINE_TASK": TASKS[name],
            "PACELINE_CLUSTER": "chief=1,worker=1,server=1",
            "PACELINE_MEET": str(self.place / "hub"),
            "PACELINE_SECRET": "5e" * 32,
        }
        with (self.place / f"output-{name}").open("a") as log:
            task = self.hosts[name].start(
                [*COMMAND, *options(self.place), "--scheme", self.scheme],
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self.tasks[name] = self.started.enter_context(task)
        return task

    def output_of(self, name: str) -> str:
        return (self.place / f"output-{name}").read_text()

    def ended(self) -> None:
        """All tasks that are there have ended in order, and left nothing."""
        for name, task in self.tasks.items():
            assert task.wait(LIMIT) == 0, f"{name}: {self.output_of(name)}"
        for name, host in self.hosts.items():
            until(lambda host=host: not host.processes(), 10, f"nothing is left on {name}: {host.processes()}")


@contextmanager
def begun(place: Path, hosts: dict[str, Host], scheme: str = "async") -> Iterator[Hosts]:
    place.mkdir(exist_ok=True)
    with ExitStack() as started:
        story = Hosts(place, hosts, None, place / "output-h1", started, scheme)  # type: ignore[arg-type]
        story.process = story.begin("h1")
        for name in ("h2", "h3"):
            story.begin(name)
        story.until_it_trains(3)
        assert story.stands() == {"chief": "h1", "server:0": "h2", "worker:1": "h3"}
        yield story


@pytest.fixture
def hosts() -> Iterator[dict[str, Host]]:
    with several(3) as found:
        yield found


def test_a_cable_out_for_a_while_and_a_host_that_loses_its_power(tmp_path: Path, hosts: dict[str, Host]) -> None:
    with begun(tmp_path, hosts) as story:
        for role in ("worker:1", "server:0", "chief"):
            story.kill(role)
        # out for less than patience: everybody waits, nobody is given up
        worker = story.roles()["worker:1"]
        with hosts["h2"].cable_out():
            story.until_it_stands()
        story.until_it_gets_on()
        assert story.roles()["worker:1"] == worker
        assert "is gone" not in story.told()
        # without power: the others do without the worker, and take it in when it is back
        hosts["h3"].power_cut()
        story.until(lambda: "its node h3 is gone" in story.told(), "the loss of h3 is noticed")
        story.until_it_gets_on()
        hosts["h3"].power_on()
        story.begin("h3")
        story.until_it_trains(3)
        assert story.stands()["worker:1"] == "h3"
        # the server's host: from the newest checkpoint, on another host
        story.until_saved()
        before = story.progress
        hosts["h2"].power_cut()
        del story.tasks["h2"]
        story.until(lambda: story.stands().get("server:0") in ("h1", "h3"), "somebody else plays the server")
        story.until_it_gets_on()
        assert story.progress > 0.5 * before  # it did not begin anew
        story.enough()
        story.ended()


def test_a_host_that_is_cut_off_stops(tmp_path: Path, hosts: dict[str, Host]) -> None:
    """It cannot know what the others do: rather than going its own way it ends its role, and then itself."""
    with begun(tmp_path, hosts) as story, hosts["h3"].cable_out():
        story.until(lambda: "worker:1" not in story.roles(), "the role of h3 has ended")
        story.until(lambda: story.tasks["h3"].poll() is not None, "the task of h3 has ended")
        assert story.tasks.pop("h3").wait() == 1
        assert "lost the hub" in story.output_of("h3")
        story.until_it_gets_on()
        story.enough()
        story.ended()


@pytest.mark.parametrize("scheme", ["async", "sync"])
def test_checkpoints_go_on_while_a_worker_cannot_reach_the_server(
    tmp_path: Path, hosts: dict[str, Host], scheme: str
) -> None:
    """The route between two of three hosts is cut: the hub hears both of them all the time."""
    with begun(tmp_path, hosts, scheme) as story:
        with hosts["h2"].cut_from(hosts["h3"]):
            story.until(lambda: "worker:1 on h3 cannot reach server:0" in story.told(), "the cut is told")
            story.until(lambda: "continuing without it" in story.told(), "nobody waits for worker:1 any longer")
            story.until_it_gets_on()
            story.until_saved()
            story.until_saved()
        story.until(lambda: "worker:1 on h3 reaches server:0 again" in story.told(), "the route is there again")
        before = story.step("worker:1")
        story.until(lambda: story.step("worker:1") > before, "worker:1 takes part again")
        assert "is gone" not in story.told()
        story.enough()
        story.ended()


def test_a_worker_that_has_never_reached_the_server_is_not_waited_for(tmp_path: Path, hosts: dict[str, Host]) -> None:
    """The route is cut before the worker starts: it is there, and cannot make its first step."""
    with ExitStack() as started:
        story = Hosts(tmp_path, hosts, None, tmp_path / "output-h1", started, "sync")  # type: ignore[arg-type]
        with hosts["h2"].cut_from(hosts["h3"]):
            story.process = story.begin("h1")
            for name in ("h2", "h3"):
                story.begin(name)
            story.until(lambda: "continuing without it" in story.told(), "nobody waits for worker:1 any longer")
            story.until(lambda: story.progress > 10, "the chief trains alone")
        story.until(lambda: story.step("worker:1") > 10, "worker:1 takes part")
        story.enough()
        story.ended()


def test_a_slow_wire(tmp_path: Path, hosts: dict[str, Host]) -> None:
    """20 ms and 50 Mbit/s between the server and everybody else."""
    with hosts["h2"].slow(delay=20), hosts["h2"].limited("50mbit"), begun(tmp_path, hosts) as story:
        story.kill("worker:1")
        assert "is gone" not in story.told()
        (tmp_path / "enough").touch()
        story.enough()
        story.ended()


def test_a_task_with_another_secret_is_refused(tmp_path: Path, hosts: dict[str, Host]) -> None:
    with begun(tmp_path, hosts) as story:
        story.tasks["h3"].send_signal(signal.SIGKILL)
        story.tasks["h3"].wait()
        environment = os.environ | {
            "PACELINE_TASK": "worker:0",
            "PACELINE_MEET": str(tmp_path / "hub"),
            "PACELINE_SECRET": "ab" * 32,
        }
        stranger = hosts["h3"].run([*COMMAND, *options(tmp_path)], env=environment, timeout=LIMIT)
        assert stranger.returncode == 2
        assert "secret" in stranger.stderr
        del story.tasks["h3"]
        story.enough()
        story.ended()
