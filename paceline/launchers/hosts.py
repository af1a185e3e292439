"""`--on hosts`: one `ssh HOST` per task, for machines without an engine.

Environment and secret are sent on stdin, never in a command line; `_ssh_remote.py` runs at the other end. The chief
chooses the port of the hub and prints it on stderr; then the other tasks get their orders. A lost task is restarted;
the loss of the chief restarts the whole run from its newest checkpoint.
"""

from __future__ import annotations

import json
import os
import selectors
import shlex
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline import signals
from paceline.errors import UsageError
from paceline.launcher import Job, Launcher
from paceline.launchers import _ssh_remote
from paceline.launchers._child_process import Line, Running, in_this_python
from paceline.launchers._foreground import FINAL, repeated, seats
from paceline.network.cluster.description import address, is_host, same

SSH = ("-T", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=6")
LOST = 255  # exit code of ssh itself: no connection, or a lost one
NOT_FOUND = (126, 127)  # exit codes of a shell: no such program
BEAT, LOOK = 5.0, 0.5
PAUSE = 1.0  # seconds before a task is restarted
STEADY = 60.0  # seconds of life after which a task's earlier restarts no longer count
FOLLOW = 5.0  # seconds within which the other tasks end after the chief
LEAVE = 30.0  # seconds that they may take to end in order once their connection is closed


class HostsLauncher(Launcher):
    """One ssh connection per task, for machines without an engine."""

    name = "hosts"
    keys = {
        "hosts": "h1,h2,… or user@h1,…, in the order chief, workers, servers; needed",
        "python": "the Python of the hosts in which paceline is installed; default: the path of this one",
        "ssh": "the command, such as 'ssh -p 2222 -i key'; default: ssh",
        "hub": "address at which the others reach the chief's host; default: the one at which ssh reached it",
        "restarts": "restarts of a lost task in a row; default: 3",
    }
    example = {"hosts": "localhost"}

    def launch(self, job: Job) -> int:
        hosts, restarts = _seats(job), job.number("restarts", 3)
        program = _ssh(job)[0]
        if shutil.which(program) is None:
            raise UsageError(f"{program}: not installed here; apt-get install openssh-client")

        def over(code: int, starts: int) -> bool:
            # the hub of a lost connection may still be ending: until then its run directory is in use (exit code 2)
            return code == 1 or (code in FINAL and not (code == 2 and starts > 1))

        return repeated(job, lambda: SshTasks(job, hosts, restarts).run(), restarts, over)

    def shown(self, job: Job) -> str:
        lines = []
        for task, host in zip(job.tasks, _seats(job), strict=True):
            orders = orders_of(job, task, "HOST:PORT, as the chief tells it")
            orders["environment"]["PACELINE_SECRET"] = "…"
            lines += [
                f"# {task}; stdin: paceline/launchers/_ssh_remote.py, then",
                f"#   {json.dumps(orders, ensure_ascii=False)}",
                shlex.join(command_of(job, host)),
            ]
        return "\n".join(lines) + "\n"


def command_of(job: Job, host: str) -> list[str]:
    python = job.options.get("python", sys.executable)
    words = [python if word == sys.executable else word for word in in_this_python(job.command)]
    boot = f"import sys; exec(sys.stdin.buffer.read({len(source())}))"
    return [*_ssh(job), *SSH, host, shlex.join(["exec", python, "-I", "-c", boot, *words])]


def orders_of(job: Job, task: str, hub: str) -> dict[str, Any]:
    """What a task reads from stdin: its environment, folder and address."""
    environment = job.environment(task) | {"PACELINE_SECRET": job.secret.hex()}
    environment |= {"PACELINE_TELL_HUB": "1"} if task == "chief" else {"PACELINE_HUB": hub}
    hosts = {same(host.rpartition("@")[2]) for host in _seats(job)}
    listen = job.options.get("hub") if task == "chief" else None
    return {"environment": environment, "folder": str(Path.cwd()), "one_host": len(hosts) == 1, "listen": listen}


def source() -> bytes:
    """The program for the remote end."""
    return Path(_ssh_remote.__file__).read_bytes()


class SshConnection:
    """The connection of one task: a child process `ssh HOST …`. It can be restarted after a loss."""

    def __init__(self, task: str, host: str, command: list[str], streams: selectors.BaseSelector) -> None:
        self.task, self.host, self.deaths = task, host, 0
        self._command, self._streams = command, streams
        self.code: int | None = LOST  # None while it runs
        self.again = 0.0  # the time of the next start; 0: none is planned

    def start(self) -> None:
        self._running = Running(self._command, {}, talk=True)  # Ctrl-C reaches only this process
        self.process = self._running.process
        self.code, self.began, self.again, self.ordered = None, time.monotonic(), 0.0, False
        self._streams.register(self._running, selectors.EVENT_READ)
        assert self.process.stdin is not None
        self._stdin = self.process.stdin
        self.write(source())
        os.set_blocking(self._stdin.fileno(), False)

    def order(self, orders: dict[str, Any]) -> None:
        self.ordered = True
        self.write(json.dumps(orders).encode() + b"\n")

    def write(self, text: bytes) -> None:
        """Send bytes. Errors are ignored: the end of the connection is noticed by `heard`."""
        with suppress(OSError, ValueError):
            self._stdin.write(text)

    def close(self) -> None:
        """Close stdin: the task ends in order, unless it has ended."""
        with suppress(OSError):
            self._stdin.close()

    def heard(self) -> list[Line]:
        """The lines that have arrived; all that are left, if ssh has ended."""
        lines, code = self._running.heard(0)
        while code is None and self.process.returncode is not None:
            more, code = self._running.heard(0)
            lines += more
        if code is not None:
            self.code = 128 - code if code < 0 else code
            self._streams.unregister(self._running)
            self.close()
        return lines


class SshTasks:
    """The tasks of one attempt: their connections, restarts and end."""

    def __init__(self, job: Job, hosts: list[str], restarts: int) -> None:
        self._job, self._restarts = job, restarts
        self._streams = selectors.DefaultSelector()
        pairs = zip(job.tasks, hosts, strict=True)
        self._links = [SshConnection(task, host, command_of(job, host), self._streams) for task, host in pairs]
        self._chief = next(link for link in self._links if link.task == "chief")
        self._hub: str | None = None
        self._failed: int | None = None  # the exit code of a task that cannot be restarted: the run ends
        self._asked, self._heeded = signals.Counter(), 0
        self._next_beat = 0.0

    def run(self) -> int:
        with signals.counted(self._asked):
            try:
                for link in self._links:
                    link.start()
                self._chief.order(orders_of(self._job, self._chief.task, ""))
                while self._chief.code is None:
                    self._turn()
                if not self._chief.code and self._failed is None:
                    self._until_gone(FOLLOW)
                for link in self._links:
                    link.close()  # a task that was restarted too late would look for a hub that has ended
                self._until_gone(LEAVE)
            finally:
                self._end_all()
                self._streams.close()
        assert self._chief.code is not None
        if self._asked.count:
            return 130
        code = self._chief.code if self._failed is None else self._failed
        return 2 if code in NOT_FOUND else code

    def _turn(self) -> None:
        self._streams.select(LOOK)
        ended = [link for link in self._links if link.code is None and self._gone(link)]
        now = time.monotonic()
        self._heed()
        for link in self._links:
            if link in ended and link is not self._chief:
                self._lost(link)
            elif link.again and now >= link.again and self._chief.code is None:
                link.start()
                if self._hub is not None:
                    link.order(orders_of(self._job, link.task, self._hub))
        if now >= self._next_beat:  # a remote task that hears nothing takes the connection for lost
            self._next_beat = now + BEAT
            for link in self._links:
                if link.code is None and link.ordered:
                    link.write(b"\n")

    def _gone(self, link: SshConnection) -> bool:
        """Take the lines of a connection. True: it has ended."""
        for name, line in link.heard():
            self._heard(link, name, line)
        return link.code is not None

    def _heard(self, link: SshConnection, name: str, line: str) -> None:
        if link is self._chief and name == "out":
            sys.stdout.write(line + "\n")  # the result, maybe as JSON
            sys.stdout.flush()
        elif link is self._chief and self._hub is None and line.startswith("hub: "):
            self._hub = line.removeprefix("hub: ").strip()
            address(self._hub, "the chief's line `hub:`")
            for other in self._links:
                if other is not self._chief and other.code is None and not other.again:
                    other.order(orders_of(self._job, other.task, self._hub))
        else:
            self._job.say(f"{link.task}: {line}")

    def _lost(self, link: SshConnection) -> None:
        """A task that is not the chief has ended."""
        code = link.code or 0
        if code == 0 or self._failed is not None or self._asked.count or self._chief.code is not None:
            return
        what = f"the connection to {link.host} failed" if code == LOST else f"exit code {code}"
        if code in (2, 3, *NOT_FOUND):
            self._give_up(link, what, code)
            return
        link.deaths = 1 if time.monotonic() - link.began > STEADY else link.deaths + 1
        if link.deaths > self._restarts:
            self._give_up(link, f"{what}, {link.deaths} times in a row", 1)
            return
        self._job.say(f"{link.task} was lost ({what}); starting it again, {link.deaths} of {self._restarts}")
        link.again = time.monotonic() + PAUSE

    def _give_up(self, link: SshConnection, what: str, code: int) -> None:
        self._failed = code if code in (1, 2, 3) else 2
        self._job.say(f"{link.task} on {link.host}: {what}; ending the run")
        self._chief.write(b"stop\n")

    def _heed(self) -> None:
        while self._heeded < self._asked.count:
            self._heeded += 1
            if self._heeded == 1:
                self._job.say("interrupted: the run ends in order (again to end at once)")
            words = b"stop\n" if self._heeded == 1 else b"kill\n"
            for link in [self._chief] if self._heeded == 1 else self._links:
                if link.code is None:
                    link.write(words)
            if not self._chief.ordered or self._hub is None:  # the run has not started
                self._end_all()

    def _until_gone(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while any(link.code is None and not link.again for link in self._links) and time.monotonic() < deadline:
            self._turn()

    def _end_all(self) -> None:
        """Close every connection and kill what is left of its task."""
        alive = [link for link in self._links if link.code is None and not link.again]
        for link in alive:
            link.write(b"kill\n")
            link.close()
        for link in alive:
            with suppress(subprocess.TimeoutExpired):
                link.process.wait(2.0)
        for link in alive:
            with suppress(ProcessLookupError):
                os.killpg(link.process.pid, signal.SIGKILL)
            link.process.wait()
            self._gone(link)


def _seats(job: Job) -> list[str]:
    """The host of each task."""
    named = [word.strip() for word in job.options.get("hosts", "").split(",") if word.strip()]
    if not named:
        raise UsageError("on which hosts? give --engine hosts=HOST,HOST,… (or user@HOST)")
    for one in named:
        user, at, host = one.rpartition("@")
        if not is_host(host) or (at and not user) or one.startswith("-"):
            raise UsageError(f"--engine hosts=: {one!r} is no host; write HOST or user@HOST, with commas between")
    if "hub" in job.options and not is_host(job.options["hub"]):
        raise UsageError(f"--engine hub={job.options['hub']} is no address; it is the chief's, for the other hosts")
    return seats(named, len(job.tasks))


def _ssh(job: Job) -> list[str]:
    words = shlex.split(job.options.get("ssh", "ssh"))
    if not words:
        raise UsageError("--engine ssh= is empty; omit it, or give a command such as 'ssh -p 2222'")
    return words
