"""Means between hosts with a network between them: encrypted, with strangers at the ports, deaths and cables out."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from beds.commands import need
from beds.hosts import Host, Running, several, until
from far_runs import LIMIT, Story

from paceline import simulate

TASKS = {"h1": "chief", "h2": "worker:0", "h3": "worker:1"}
STEPS = 100000

# what somebody without the secret tries at a port, for as long as it is let: scans, other protocols, half a handshake
_STRANGER = """
import os, socket, sys, threading
address, ports = sys.argv[1], [int(word) for word in sys.argv[2:]]
tried = 0
while True:
    for port in ports:
        for said in (b"", b"GET / HTTP/1.1\\r\\n\\r\\n", os.urandom(4096), b"paceline" + bytes(64), b"\\x16\\x03"):
            try:
                with socket.create_connection((address, port), timeout=5) as one:
                    one.sendall(said)
                    tried += 1
            except OSError:
                pass
    print(tried, flush=True)
"""

# steps go on until the test has seen enough
_HOOK = """
import threading
from dataclasses import dataclass
from pathlib import Path
from paceline.hook import Hook, Session

@dataclass
class UntilTold(Hook):
    folder: str

    def after_step(self, session: Session) -> None:
        if not session.worker.rank:
            Path(self.folder, "progress.new").write_text(str(session.updates))
            Path(self.folder, "progress.new").replace(Path(self.folder, "progress"))  # never half written
            if session.updates >= 100 and Path(self.folder, "enough").exists():
                session.stop("enough")
        threading.Event().wait(0.005)
"""


@dataclass
class Means(Story):
    """A run of three workers, each on a host of its own."""

    started: ExitStack
    more: list[str]
    scheme: tuple[str, ...] = ("allreduce",)

    def begin(self, name: str) -> Running:
        environment = os.environ | {
            "PACELINE_TASK": TASKS[name],
            "PACELINE_CLUSTER": "chief=1,worker=2",
            "PACELINE_MEET": str(self.place / "hub"),
            "PACELINE_SECRET": "5e" * 32,
        }
        command = [sys.executable, "-P", "-m", "paceline", "train", "digits-mlp", "-s", *self.scheme, "--plain"]
        patience = [] if "--patience" in self.more else ["--patience", "15"]
        folder = ["--dir", str(self.place / "run"), *patience]
        with (self.place / f"output-{name}").open("a") as log:
            task = self.hosts[name].start(
                [*command, *folder, *self.more], env=environment, stdout=log, stderr=subprocess.STDOUT
            )
        return self.started.enter_context(task)

    def output_of(self, name: str) -> str:
        return (self.place / f"output-{name}").read_text()

    def ended(self, tasks: dict[str, Running]) -> dict[str, Any]:
        for name, task in tasks.items():
            assert task.wait(LIMIT) == 0, f"{name}: {self.output_of(name)}"
        for name, host in self.hosts.items():
            until(lambda host=host: not host.processes(), 10, f"nothing is left on {name}: {host.processes()}")
        result: dict[str, Any] = json.loads((self.folder / "result.json").read_text())
        return result


@contextmanager
def begun(
    place: Path, hosts: dict[str, Host], *more: str, scheme: tuple[str, ...] = ("allreduce",)
) -> Iterator[tuple[Means, dict[str, Running]]]:
    with ExitStack() as started:
        story = Means(place, hosts, None, place / "output-h1", started, list(more), scheme)  # type: ignore[arg-type]
        tasks = {name: story.begin(name) for name in TASKS}
        story.process = tasks["h1"]
        yield story, tasks


@pytest.fixture
def hosts() -> Iterator[dict[str, Host]]:
    with several(4) as found:
        yield found


def listening(host: Host) -> list[int]:
    """The ports at which processes of a host listen on its address."""
    found = []
    address = "".join(f"{int(word):02X}" for word in reversed(host.address.split(".")))
    for line in Path(f"/proc/{host.pid}/net/tcp").read_text().splitlines()[1:]:
        words = line.split()
        ip, port = words[1].split(":")
        assert ip in (address, "0100007F"), f"a port is open on {ip}"
        if words[3] == "0A" and ip == address:
            found.append(int(port, 16))
    return found


def hook(place: Path) -> list[str]:
    """What a run needs that is to be told when it is enough."""
    (place / "told.py").write_text(_HOOK)
    return ["--hook", f"{place}/told.py:UntilTold:folder={place}", "--steps", str(STEPS)]


@pytest.mark.parametrize("encrypted", [False, True])
def test_a_run_has_the_bits_of_one_machine(tmp_path: Path, hosts: dict[str, Host], encrypted: bool) -> None:
    if encrypted:
        need({"openssl": "openssl"}, "certificates")
    more = ["--tls", "generated"] if encrypted else []
    with begun(tmp_path, hosts, "--steps", "60", *more) as (story, tasks):
        result = story.ended(tasks)
    assert result["digest"] == simulate("digits-mlp", "allreduce", workers=3, steps=60).digest


def test_strangers_deaths_and_a_cable_out(tmp_path: Path, hosts: dict[str, Host]) -> None:
    """With `hold` nobody takes a step while one is away: progress after a loss means that it is back."""
    need({"openssl": "openssl"}, "certificates")
    more = ["--tls", "generated", "--quorum", "hold"]
    with begun(tmp_path, hosts, *hook(tmp_path), *more) as (story, tasks):
        story.until_it_trains(3)
        ports = listening(hosts["h2"])
        assert ports, "the worker of h2 listens for the others"
        command = [sys.executable, "-c", _STRANGER, hosts["h2"].address, *map(str, ports)]
        with hosts["h4"].start(command, stdout=subprocess.PIPE) as stranger:
            assert stranger.stdout is not None
            for _ in range(3):
                assert int(stranger.stdout.readline()) > 0
            story.until_it_gets_on()
            assert "is gone" not in story.told()
            for role in ("worker:1", "worker:2"):
                story.kill(role)
            with hosts["h3"].cable_out():
                story.until_it_stands()
            story.until_it_gets_on()
            assert "is gone" not in story.told()
            hosts["h3"].power_cut()
            story.until(lambda: "its node h3 is gone" in story.told(), "the loss of h3 is noticed")
            hosts["h3"].power_on()
            tasks["h3"] = story.begin("h3")
            story.until_it_gets_on()
            stranger.send_signal(signal.SIGKILL)
            stranger.stdout.close()
        (tmp_path / "enough").touch()
        story.ended(tasks)
    logs = "".join(path.read_text() for path in (tmp_path / "run" / "logs").iterdir())
    assert "means: turned 10.77.0.4" in logs
    assert "5e" * 32 not in logs


@pytest.mark.parametrize(("scheme", "purpose"), [("allreduce", "a mean"), ("ad-psgd", "meetings")])
def test_two_workers_without_a_route_between_them_end_the_run_with_a_reason(
    tmp_path: Path, hosts: dict[str, Host], scheme: str, purpose: str
) -> None:
    """Both reach the hub, so both are alive; a mean, or a meeting of the two, can never be."""
    hosts["h3"].run(["ip", "route", "add", "unreachable", f"{hosts['h2'].address}/32"], check=True)
    with begun(tmp_path, hosts, *hook(tmp_path), "--patience", "5", scheme=(scheme,)) as (story, tasks):
        assert tasks["h1"].wait(LIMIT) == 1
        said = story.output_of("h1")  # the first of them that has said it
        assert "worker:2 cannot reach worker:1 at 10.77.0.2:" in said
        assert f"for {purpose}: " in said
        assert "--ports" in said


@pytest.mark.parametrize("scheme", ["gosgd", "ad-psgd"])
def test_two_workers_that_cannot_send_each_other_messages_end_the_run_with_a_reason(
    tmp_path: Path, hosts: dict[str, Host], scheme: str
) -> None:
    """Nobody waits for a message, so both make steps; what they would tell each other never comes."""
    hosts["h3"].run(["ip", "route", "add", "unreachable", f"{hosts['h2'].address}/32"], check=True)
    given = (scheme, "partner=any-step")
    with begun(tmp_path, hosts, *hook(tmp_path), "--patience", "3", scheme=given) as (story, tasks):
        assert tasks["h1"].wait(LIMIT) == 1
        said = story.output_of("h1")
        assert "workers must be able to reach each other's ports" in said
        assert " for messages" in said
        assert "within 9 s" in said or "worker:2 cannot reach worker:1 at 10.77.0.2:" in said  # three times patience
        assert "worker:1" in said
        assert "worker:2" in said


def test_who_asks_for_tls_does_not_get_means_without_it(tmp_path: Path) -> None:
    environment = os.environ | {"PACELINE_TASK": "chief", "PACELINE_CLUSTER": "chief=1,worker=1"}
    command = [sys.executable, "-m", "paceline", "train", "digits-mlp", "-s", "allreduce", "--collective", "gloo"]
    where = ["--dir", str(tmp_path / "run"), "--tls", "generated"]
    done = subprocess.run(
        [*command, *where], env=environment, capture_output=True, text=True, check=False, timeout=LIMIT
    )
    assert done.returncode == 2
    assert "use --collective tcp" in done.stderr
    assert not (tmp_path / "run").exists()
