"""The hosts that other tests run on are what they claim to be: apart in all but the disk, mortal, gone afterwards."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from beds.hosts import Host, several, until

# a server that says when it listens, and gives as many bytes as it is asked for; a client that counts them
SERVE = """
import socket
with socket.create_server(("", 5000)) as door:
    print("listening", flush=True)
    call, _ = door.accept()
    call.sendall(bytes(int(call.recv(64))))
    call.recv(1)
"""
FETCH = """
import socket, sys, time
with socket.create_connection((sys.argv[1], 5000), timeout=20) as call:
    began, left = time.monotonic(), int(sys.argv[2])
    call.sendall(sys.argv[2].encode())
    while left:
        left -= len(call.recv(1 << 20))
    print(time.monotonic() - began)
"""


@pytest.fixture(scope="module")
def hosts() -> Iterator[dict[str, Host]]:
    with several(3) as found:
        yield found


KNOCK = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], 9), 1).close()
except ConnectionRefusedError:
    sys.exit(0)
except OSError:
    sys.exit(1)
"""


def fetched(server: Host, client: Host, size: int) -> float:
    """Seconds that so many bytes take from one to the other."""
    with server.start([sys.executable, "-c", SERVE], stdout=subprocess.PIPE) as serving:
        assert serving.stdout is not None
        assert serving.stdout.readline() == "listening\n"
        done = client.run([sys.executable, "-c", FETCH, server.name, str(size)])
    assert done.returncode == 0, done.stderr
    return float(done.stdout)


def together(one: Host, other: Host) -> None:
    """Wait until they find each other: for a second after a failure nobody asks again."""
    until(lambda: reachable(one, other), 10, f"{one.name} reaches {other.name}")


def reachable(one: Host, other: Host) -> bool:
    """Whether an answer comes back: nothing listens on the port, and its host says so."""
    return one.run([sys.executable, "-c", KNOCK, other.name]).returncode == 0


def test_hosts_have_names_addresses_and_processes_of_their_own(hosts: dict[str, Host]) -> None:
    one, two = hosts["h1"], hosts["h2"]
    assert one.run(["hostname"]).stdout == "h1\n" != f"{socket.gethostname()}\n"
    assert one.run(["getent", "hosts", "h2"]).stdout.split() == [two.address, "h2"]
    assert one.run(["ls", "/sys/class/net"]).stdout.split() == ["eth0", "lo"]
    with two.start(["sleep", "60"]) as sleeping:
        assert two.processes() == {sleeping.inner: "sleep 60"}
        assert one.processes() == {}
        sleeping.terminate()
        assert sleeping.wait(10) == -signal.SIGTERM
    assert two.processes() == {}
    assert one.run(["cat", __file__]).stdout == Path(__file__).read_text()
    assert fetched(one, two, 1000) < 5


def test_a_power_cut_leaves_nothing_and_says_no_goodbye(hosts: dict[str, Host]) -> None:
    one, two = hosts["h1"], hosts["h2"]
    listening = [sys.executable, "-c", SERVE]
    calling = "import socket; call = socket.create_connection(('h2', 5000)); print('called', flush=True); call.recv(1)"
    with contextlib.ExitStack() as stack:
        serving = stack.enter_context(two.start(listening, stdout=subprocess.PIPE))
        assert serving.stdout is not None
        assert serving.stdout.readline() == "listening\n"
        client = stack.enter_context(one.start([sys.executable, "-c", calling], stdout=subprocess.PIPE))
        assert client.stdout is not None
        assert client.stdout.readline() == "called\n"
        before = two.start(["setsid", "sleep", "60"])
        lost = [serving.inner, before.inner]
        two.power_cut()
        assert not [pid for pid in lost if Path(f"/proc/{pid}/cmdline").exists()]
        assert not reachable(one, two)
        assert client.poll() is None  # it waits: no closed connection tells it
        assert before.wait(10) != 0
    two.power_on()
    together(one, two)
    assert two.processes() == {}


def test_a_cable_out_and_in_again(hosts: dict[str, Host]) -> None:
    with hosts["h3"].cable_out():
        assert not reachable(hosts["h1"], hosts["h3"])
        assert reachable(hosts["h1"], hosts["h2"])
    together(hosts["h1"], hosts["h3"])


def test_two_hosts_that_do_not_reach_each_other_and_a_third_that_reaches_both(hosts: dict[str, Host]) -> None:
    one, two, three = hosts.values()
    with one.cut_from(two):
        assert not reachable(one, two)
        assert not reachable(two, one)
        together(one, three)
        together(two, three)
    together(one, two)


def test_a_slow_wire(hosts: dict[str, Host]) -> None:
    one, three = hosts["h1"], hosts["h3"]
    fast = fetched(one, three, 1_000_000)
    with three.limited("50mbit"):
        took = fetched(one, three, 5_000_000)
        assert 0.5 < took < 5  # 0.8 s by the wire
    with three.slow(delay=20):
        together(one, three)
        began = time.monotonic()
        assert reachable(one, three)
        assert time.monotonic() - began > 0.04
        with three.limited("50mbit"):
            assert 0.08 < fetched(one, three, 100_000) < 5
    assert fast < 1
    together(one, three)
    assert fetched(one, three, 1_000_000) < 1


def test_a_killed_test_leaves_no_host_behind() -> None:
    """The kernel ends the hosts with the process that made them, and all that runs there, daemons too."""
    code = (
        "import signal, sys; from beds.hosts import several\n"
        "with several(2) as hosts:\n"
        "    hosts['h1'].start(['setsid', 'sleep', '61']).inner\n"
        "    print(hosts['h1'].pid, hosts['h2'].pid, *hosts['h1'].processes(), flush=True)\n"
        "    signal.pause()\n"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment) as made:
        assert made.stdout is not None
        pids = made.stdout.readline().split()
        made.kill()
    assert len(pids) == 3
    until(lambda: not any(Path(f"/proc/{pid}/cmdline").exists() for pid in pids), 10, "all of them are gone")
