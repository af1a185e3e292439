"""Several hosts on one machine: each has its own network, host name, hosts file and processes; all share the disk.

    with several(3) as hosts:                       # h1 h2 h3, at 10.77.0.1 … 3, on one switch
        hosts["h1"].run(["paceline", "train", …])   # to its end
        hosts["h2"].start([…])                      # in the background
        hosts["h2"].power_cut()                     # nothing of it is left, and nobody hears a goodbye
        with hosts["h3"].cable_out(): …
        with hosts["h2"].cut_from(hosts["h3"]): …   # these two alone do not reach each other
        with hosts["h3"].slow(delay=20), hosts["h3"].limited("50mbit"): …

A host is the first process of a process namespace and whatever is started in there. Its networks, mounts and name have
no names outside: they last as long as that process, which the kernel ends with the test. So a test run that is killed
leaves nothing behind, there is nothing to tidy up, and any number of test runs may have the same hosts.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from beds.commands import need

NET = "10.77.0"
_WIRE = Path(__file__).with_name("wire.py")
_NEEDED = {
    **{"unshare": "util-linux", "nsenter": "util-linux", "setpriv": "util-linux"},
    **{"ip": "iproute2", "tc": "iproute2", "mount": "mount", "umount": "mount", "hostname": "hostname"},
    **{"sh": "dash", "sleep": "coreutils", "ls": "coreutils", "cat": "coreutils", "grep": "grep", "getent": "libc-bin"},
}
_DYING = ["setpriv", "--pdeathsig", "KILL"]  # a process that is started so dies with its parent
_WITHIN = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

# The first process of a host: it says when all is in place, then lasts. Its own files for names lie in memory. No name
# server is to be reached: a resolver that asked one would wait for its answer at every connection.
_FIRST = """
hostname "$1"; mount -t sysfs sysfs /sys 2>/dev/null
mount -t tmpfs tmpfs /mnt
printf %s "$2" >/mnt/hosts
echo "nameserver 127.0.0.1" >/mnt/resolv.conf
{ grep -v ^hosts: /etc/nsswitch.conf 2>/dev/null; echo "hosts: files"; } >/mnt/nsswitch.conf
for file in hosts resolv.conf nsswitch.conf; do [ ! -e "/etc/$file" ] || mount --bind "/mnt/$file" "/etc/$file"; done
umount /mnt
ip link set lo up; echo ready; exec sleep infinity
"""


def need_hosts() -> None:
    """Skip the test, by name, where there cannot be several hosts."""
    if sys.platform != "linux":
        pytest.skip("several hosts: network namespaces are Linux's")
    if os.geteuid() != 0:
        pytest.skip("several hosts: only root may make network namespaces")
    need(_NEEDED, "several hosts")
    if subprocess.run(["unshare", "--net", "--pid", "--fork", "true"], capture_output=True, check=False).returncode:
        pytest.skip("several hosts: this machine lets nobody make network namespaces")


@contextmanager
def several(hosts: int | Sequence[str]) -> Iterator[dict[str, Host]]:
    """So many hosts h1, h2, …, or those named, each reachable from each; the test itself is on none of them."""
    need_hosts()
    names = [f"h{number + 1}" for number in range(hosts)] if isinstance(hosts, int) else list(hosts)
    addresses = {name: f"{NET}.{number + 1}" for number, name in enumerate(names)}
    known = "".join(f"{address} {name}\n" for name, address in {"localhost": "127.0.0.1", **addresses}.items())
    with ExitStack() as stack:
        switch = Switch()
        stack.callback(switch.close)
        found = {}
        for name, address in addresses.items():
            found[name] = Host(name, address, switch, known)
            stack.callback(found[name].close)
        yield found


class Switch:
    """What all cables lead to: a bridge in a network of its own."""

    def __init__(self) -> None:
        first = "ip link add switch type bridge; ip link set switch up; echo ready; exec sleep infinity"
        self._process, self.pid = _first_process(["--net"], first)

    def ip(self, *words: str) -> None:
        _system("nsenter", "-t", str(self.pid), "-n", "ip", *words)

    def close(self) -> None:
        _end(self._process)


class Host:
    """One of the hosts. What is started on it are its processes; their ids are those seen from outside."""

    def __init__(self, name: str, address: str, switch: Switch, known: str) -> None:
        self.name, self.address = name, address
        self._mac = "02:00:{:02x}:{:02x}:{:02x}:{:02x}".format(*map(int, address.split(".")))  # others remember it
        self._switch, self._known = switch, known  # all hosts, as /etc/hosts has them
        self._process: subprocess.Popen[str] | None = None
        self.power_on()

    def power_on(self) -> None:
        """As it was at first: with its address, without any process."""
        kinds = ["--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        self._process, self.pid = _first_process(kinds, _FIRST, self.name, self._known)
        eth0 = ["name", "eth0", "address", self._mac, "netns", str(self.pid)]
        self._switch.ip("link", "add", self.name, "type", "veth", "peer", *eth0)
        self._switch.ip("link", "set", self.name, "master", "switch", "up")
        self._ip("addr", "add", f"{self.address}/24", "dev", "eth0")
        self._ip("link", "set", "eth0", "up")
        self._ip("route", "add", "default", "dev", "eth0")

    def power_cut(self) -> None:
        """Everything on it is gone at once. The cable goes first: the kernel would say goodbye to the others."""
        self._switch.ip("link", "del", self.name)
        self.close()

    def close(self) -> None:
        if self._process is not None:
            _end(self._process)
            self._process = None

    # what runs on it

    def command(self, words: Sequence[str], cwd: str | Path | None = None) -> list[str]:
        """What to execute here, so that it runs there."""
        place = [f"--wd={cwd or Path.cwd()}"]
        return ["nsenter", "-t", str(self.pid), "-n", "-u", "-m", "-p", *place, *_DYING, *words]

    def run(
        self,
        words: Sequence[str],
        *,
        timeout: float = 60,
        cwd: str | Path | None = None,
        check: bool = False,
        **how: Any,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command there to its end; gives its exit code and what it wrote."""
        how = {"stdin": subprocess.DEVNULL, "capture_output": True} | how
        return subprocess.run([*_DYING, *self.command(words, cwd)], text=True, timeout=timeout, check=check, **how)

    def start(self, words: Sequence[str], *, cwd: str | Path | None = None, **how: Any) -> Running:
        """Start a command there; its caller ends it, or the host's end does."""
        how = {"stdin": subprocess.DEVNULL} | how
        running = Running([*_DYING, *self.command(words, cwd)], text=True, **how)
        until(running.has_begun, 10, f"{words[0]} has begun")
        return running

    def processes(self) -> dict[int, str]:
        """All that runs there, and their command lines. The host's own first process does not count."""
        if self._process is None:
            return {}
        mine, found = _namespace(self.pid), {}
        for place in Path("/proc").iterdir():
            if place.name.isdigit() and int(place.name) != self.pid:
                with suppress(OSError):
                    if _namespace(int(place.name)) == mine and _state(int(place.name)) != "Z":
                        words = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                        found[int(place.name)] = words or f"[{(place / 'comm').read_text().strip()}]"
        return found

    # its cable

    @contextmanager
    def cable_out(self) -> Iterator[None]:
        """Nothing comes through, and nobody is told."""
        self._switch.ip("link", "set", self.name, "down")
        try:
            yield
        finally:
            self._switch.ip("link", "set", self.name, "up")

    @contextmanager
    def cut_from(self, other: Host) -> Iterator[None]:
        """Nothing comes through between these two, in either direction, and nobody is told; both reach all others.
        Each takes the other to be at an address of the network that nobody has."""
        ends = [(self, other), (other, self)]
        for near, far in ends:
            near._neighbour(far.address, "02:00:00:00:00:01", "permanent")
        try:
            yield
        finally:
            for near, far in ends:
                near._neighbour(far.address, far._mac, "reachable")

    def _neighbour(self, address: str, mac: str, state: str) -> None:
        if self._process is not None:
            self._ip("neigh", "replace", address, "lladdr", mac, "nud", state, "dev", "eth0")

    @contextmanager
    def limited(self, rate: str, latency: str = "100ms") -> Iterator[None]:
        """At most so many bits a second each way, as `tc` writes them: 50mbit."""
        ends = [(self.pid, "eth0"), (self._switch.pid, self.name)]
        shape = ["root", "tbf", "rate", rate, "burst", "64kb", "latency", latency]
        for pid, device in ends:
            _system("nsenter", "-t", str(pid), "-n", "tc", "qdisc", "replace", "dev", device, *shape)
        try:
            yield
        finally:
            for pid, device in ends:
                _system("nsenter", "-t", str(pid), "-n", "tc", "qdisc", "del", "dev", device, "root")

    @contextmanager
    def slow(self, delay: float, jitter: float = 0.0, loss: float = 0.0) -> Iterator[None]:
        """A cable on which a frame takes so many milliseconds one way, and so many of a hundred are lost.

        Two TAP devices take the places of the veth's ends and its names; a process carries frames between them.
        """
        self._switch.ip("link", "set", self.name, "down")
        self._switch.ip("link", "set", self.name, "name", f"{self.name}.fast")
        self._ip("link", "set", "eth0", "down")
        self._ip("link", "set", "eth0", "name", "fast")
        self._ip("addr", "flush", "dev", "fast")
        words = [sys.executable, str(_WIRE), self.name, str(self.pid), str(delay), str(jitter), str(loss)]
        wire = subprocess.Popen(
            [*_DYING, "nsenter", "-t", str(self._switch.pid), "-n", *words], stdout=subprocess.PIPE, text=True
        )
        try:
            assert wire.stdout is not None
            assert wire.stdout.readline() == "ready\n", "the slow cable could not be laid"
            self._ip("link", "set", "dev", "eth0", "address", self._mac)
            self._ip("addr", "add", f"{self.address}/24", "dev", "eth0")
            self._ip("link", "set", "eth0", "up")
            self._ip("route", "replace", "default", "dev", "eth0")
            self._switch.ip("link", "set", self.name, "master", "switch", "up")
            yield
        finally:
            _end(wire)
            self._switch.ip("link", "set", f"{self.name}.fast", "name", self.name)
            self._switch.ip("link", "set", self.name, "up")
            self._ip("link", "set", "fast", "name", "eth0")
            self._ip("addr", "add", f"{self.address}/24", "dev", "eth0")
            self._ip("link", "set", "eth0", "up")
            self._ip("route", "replace", "default", "dev", "eth0")

    def _ip(self, *words: str) -> None:
        _system("nsenter", "-t", str(self.pid), "-n", "ip", *words)


class Running(subprocess.Popen[str]):
    """A command on a host. Signals go to the command itself, not to what brought it there."""

    @property
    def inner(self) -> int:
        """The process id of the command, seen from outside; 0 when it has ended."""
        return next(iter(_children(self.pid)), 0)

    def has_begun(self) -> bool:
        """Whether the command is there in place of what brought it, or has ended already."""
        with suppress(OSError):
            name = Path(f"/proc/{self.inner}/comm").read_text().strip()
            return name not in ("nsenter", "setpriv")
        return self.poll() is not None

    def send_signal(self, number: int) -> None:
        inner = self.inner
        if inner and self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(inner, number)

    def __exit__(self, *what: Any) -> None:
        if self.poll() is None:
            self.kill()
        super().__exit__(*what)


def until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    """Wait until something holds; fails after so many seconds."""
    deadline, pause = time.monotonic() + seconds, threading.Event()
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        pause.wait(0.02)


def _first_process(kinds: Sequence[str], script: str, *arguments: str) -> tuple[subprocess.Popen[str], int]:
    """Begin namespaces of these kinds; gives what keeps them, and the id of their first process."""
    process = subprocess.Popen(
        [*_DYING, "unshare", *kinds, "sh", "-c", script, "first", *arguments], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n", "a host could not be made"
    process.stdout.close()
    return process, next(iter(_children(process.pid))) if "--fork" in kinds else process.pid


def _end(process: subprocess.Popen[str]) -> None:
    """With a host's first process goes all that runs there; its networks follow."""
    first = _children(process.pid)
    process.kill()  # before its child: unshare complains if that is killed first
    process.wait()
    for pid in first:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if process.stdout is not None:
        process.stdout.close()
    for pid in first:
        until(lambda pid=pid: not Path(f"/proc/{pid}").exists() or _state(pid) == "Z", 10, f"the end of process {pid}")


def _children(pid: int) -> list[int]:
    with suppress(OSError):
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def _namespace(pid: int) -> str:
    return str(Path(f"/proc/{pid}/ns/pid").readlink())


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def _system(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=os.environ | {"PATH": _WITHIN})
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr.strip()}"
