"""What `--on hosts` would run, and the far end of a connection, without any ssh."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import pytest
from beds.commands import need
from launch_jobs import SECRET, made

from paceline.errors import UsageError
from paceline.launchers import _ssh_remote, hosts
from paceline.launchers._foreground import seats
from paceline.launchers.hosts import HostsLauncher


def test_each_task_has_its_ssh(tmp_path: Path) -> None:
    job = made(tmp_path, hosts="ann@h1,h2", ssh="ssh -p 2222 -i key", python="/opt/python").job
    text = HostsLauncher().shown(job)
    lines = [shlex.split(line) for line in text.splitlines() if not line.startswith("#")]
    assert [line[line.index("ServerAliveCountMax=6") + 1] for line in lines] == ["ann@h1", "ann@h1", "h2", "h2"]
    for line in lines:
        assert line[:5] == ["ssh", "-p", "2222", "-i", "key"]  # before ours: the first word counts for ssh
        remote = shlex.split(line[-1])
        assert remote[:4] == ["exec", "/opt/python", "-I", "-c"]
        assert remote[5:] == ["/opt/python", "-P", "-m", "paceline", "train", *job.command[2:]]
    assert SECRET.hex() not in text
    assert text.count('"PACELINE_SECRET": "…"') == 4


def test_orders(tmp_path: Path) -> None:
    job = made(tmp_path, hosts="h1,h2").job
    chief, server = (hosts.orders_of(job, task, "10.0.0.1:7070") for task in ("chief", "server:0"))
    assert chief["environment"] == {
        "PACELINE_TASK": "chief",
        "PACELINE_CLUSTER": "chief=1,worker=2,server=1",
        "PACELINE_SECRET": SECRET.hex(),
        "PACELINE_TELL_HUB": "1",
    }
    assert server["environment"]["PACELINE_HUB"] == "10.0.0.1:7070"
    assert "PACELINE_TELL_HUB" not in server["environment"]
    assert not chief["one_host"]
    assert hosts.orders_of(made(tmp_path, hosts="localhost,127.0.0.1").job, "chief", "")["one_host"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "on which hosts"),
        ({"hosts": "a,-oProxyCommand=x"}, "'-oProxyCommand=x' is no host"),
        ({"hosts": "@a"}, "'@a' is no host"),
        ({"hosts": "a b"}, "'a b' is no host"),
        ({"hosts": "a,b,c,d,e"}, r"more hosts \(5\) than tasks \(4\)"),
        ({"hosts": "a", "hub": "b:1"}, "hub=b:1 is no address"),
        ({"hosts": "a", "ssh": ""}, "ssh= is empty"),
    ],
)
def test_what_is_refused(options: dict[str, str], message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        HostsLauncher().shown(made(tmp_path, **options).job)


def test_no_ssh(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no-such-ssh: not installed here; apt-get install openssh-client"):
        HostsLauncher().launch(made(tmp_path, hosts="a", ssh="no-such-ssh -p 3").job)


@pytest.mark.parametrize(
    ("named", "tasks", "told"),
    [("abc", 3, "abc"), ("ab", 3, "aab"), ("a", 3, "aaa"), ("aab", 3, "aab"), ("abc", 7, "aaabbcc")],
)
def test_seats(named: str, tasks: int, told: str) -> None:
    assert "".join(seats(list(named), tasks)) == told


# the far end


def orders(listen: str | None = None, one_host: bool = False, **environment: str) -> dict[str, Any]:
    return {"environment": environment, "folder": "/", "one_host": one_host, "listen": listen}


@pytest.mark.parametrize(
    ("told", "server", "expected"),
    [
        (orders(), "10.0.0.1", ("10.0.0.1", "10.0.0.1:0")),
        (orders(), "fe80::1%eth0", ("fe80::1", "[fe80::1]:0")),
        (orders(), "127.0.0.1", (None, None)),  # others could not reach it there
        (orders(one_host=True), "127.0.0.1", ("127.0.0.1", "127.0.0.1:0")),
        (orders("h1-ib"), "127.0.0.1", ("h1-ib", "h1-ib:0")),
        (orders(PACELINE_HUB="10.0.0.9:7"), "10.0.0.1", ("10.0.0.1", "10.0.0.9:7")),
    ],
)
def test_the_address_is_that_at_which_ssh_came(
    told: dict[str, Any], server: str, expected: tuple[str | None, str | None]
) -> None:
    got = _ssh_remote.environment_of(told, {"SSH_CONNECTION": f"10.0.0.8 51 {server} 22", "HOME": "/root"})
    assert (got.get("PACELINE_ADDRESS"), got.get("PACELINE_HUB")) == expected
    assert got["HOME"] == "/root"


@contextmanager
def at_the_far_end(
    script: str, told: dict[str, Any] | None = None, silence: float = 30
) -> Iterator[subprocess.Popen[bytes]]:
    """far.py as ssh would run it, with a shell script as the task."""
    need({"sh": "dash", "sleep": "coreutils"}, "a task that is a shell script")
    boot = f"import sys; exec(sys.stdin.buffer.read({len(hosts.source())}))"
    text = hosts.source()
    if silence != _ssh_remote.SILENCE:
        text = text.replace(b"SILENCE = 30.0", f"SILENCE = {silence:4.1f}".encode())
        assert len(text) == len(hosts.source())
    process = subprocess.Popen(
        [sys.executable, "-I", "-c", boot, "sh", "-c", script],
        bufsize=0,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdin is not None
    try:
        process.stdin.write(text + json.dumps(told or orders(A="b c")).encode() + b"\n")
        yield process
    finally:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            assert stream is not None
            stream.close()


def pipe(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None
    return stream


def test_a_task_gets_its_environment_and_gives_its_output_and_code() -> None:
    with at_the_far_end('echo "$A"; pwd; echo here >&2; exit 3') as process:
        assert pipe(process.stdout).read() == b"b c\n/\n"
        assert pipe(process.stderr).read() == b"here\n"
        assert process.wait(20) == 3


def test_the_end_of_the_connection_ends_the_task_in_order() -> None:
    with at_the_far_end("trap 'echo last; exit 4' TERM; echo here; while :; do sleep 0.02; done") as process:
        assert pipe(process.stdout).readline() == b"here\n"
        pipe(process.stdin).close()
        assert pipe(process.stdout).read() == b"last\n"
        assert process.wait(20) == 4


@pytest.mark.parametrize(("word", "code"), [(b"stop\n", 4), (b"kill\n", 137)])
def test_words_on_the_way(word: bytes, code: int) -> None:
    with at_the_far_end("trap 'exit 4' TERM; echo here; while :; do sleep 0.02; done") as process:
        assert pipe(process.stdout).readline() == b"here\n"
        pipe(process.stdin).write(b"\n")  # a beat
        pipe(process.stdin).write(word)
        assert process.wait(20) == code


def test_silence_is_the_end() -> None:
    with at_the_far_end("trap 'exit 4' TERM; echo here; while :; do sleep 0.02; done", silence=1) as process:
        assert pipe(process.stdout).readline() == b"here\n"
        assert process.wait(20) == 4


def test_a_task_does_not_notice_that_nobody_reads_any_more(tmp_path: Path) -> None:
    deed = "trap 'i=0; while [ $i -lt 99 ]; do echo last; echo last >&2; i=$((i+1)); done; touch saved; exit 4' TERM"
    told = orders() | {"folder": str(tmp_path)}
    with at_the_far_end(f"{deed}; echo here; while :; do sleep 0.02; done", told) as process:
        assert pipe(process.stdout).readline() == b"here\n"
        for stream in (process.stdout, process.stderr, process.stdin):
            pipe(stream).close()
        assert process.wait(20) == 4
        assert (tmp_path / "saved").exists()


def test_however_it_ends_the_task_ends() -> None:
    with at_the_far_end("echo $$; while :; do sleep 0.02; done") as process:
        number = int(pipe(process.stdout).readline())
        process.send_signal(signal.SIGKILL)
        process.wait()
        deadline = time.monotonic() + 20
        while Path(f"/proc/{number}/cwd").exists():
            assert time.monotonic() < deadline, "the task lives on"


def test_a_task_without_orders_is_never_begun() -> None:
    boot = f"import sys; exec(sys.stdin.buffer.read({len(hosts.source())}))"
    ran = subprocess.run(
        [sys.executable, "-I", "-c", boot, "echo", "begun"],
        input=hosts.source(),
        capture_output=True,
        check=False,
    )
    assert (ran.returncode, ran.stdout) == (0, b"")


def test_a_program_that_is_not_there() -> None:
    boot = f"import sys; exec(sys.stdin.buffer.read({len(hosts.source())}))"
    text = hosts.source() + json.dumps(orders()).encode() + b"\n"
    ran = subprocess.run(
        [sys.executable, "-I", "-c", boot, "/no/such/python"], input=text, capture_output=True, check=False
    )
    assert ran.returncode == 127
    assert b"/no/such/python cannot be run on this host: " in ran.stderr


def test_it_needs_nothing_but_python() -> None:
    lines = [line for line in hosts.source().decode().splitlines() if line.startswith(("import ", "from "))]
    assert {line.split()[1].partition(".")[0] for line in lines} <= sys.stdlib_module_names
