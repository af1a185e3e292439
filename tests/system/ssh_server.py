"""A real sshd on loopback, with a key and a configuration of its own; nothing of the machine's is read or touched."""

from __future__ import annotations

import getpass
import os
import shlex
import shutil
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from beds.commands import found, need
from beds.hosts import Host
from processes import until


@dataclass(frozen=True)
class Sshd:
    """Where it listens, and how it is called."""

    ssh: str  # the command, with everything that a stranger to this folder would need
    log: Path
    process: subprocess.Popen[bytes]


def program() -> str:
    """The server, or the test is skipped by name."""
    need({"ssh": "openssh-client", "ssh-keygen": "openssh-client", "sshd": "openssh-server"}, "ssh")
    server = found("sshd")
    assert server is not None
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # where it shuts its unprivileged half in
    return server


def prepared(folder: Path, names: Sequence[str]) -> list[str]:
    """Keys, one for all servers, and the words by which their clients know them."""
    folder.mkdir(mode=0o700)
    for name in ("host", "user"):
        words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(words, check=True, stdin=subprocess.DEVNULL)
    shutil.copy(folder / "user.pub", folder / "authorized_keys")
    public = (folder / "host.pub").read_text(encoding="ascii").rsplit(None, 1)[0]
    (folder / "known_hosts").write_text("".join(f"{name} {public}\n" for name in names), encoding="ascii")
    words = ["ssh", "-F", "none", "-i", str(folder / "user"), "-o", "IdentitiesOnly=yes"]
    return [*words, "-o", f"UserKnownHostsFile={folder}/known_hosts", "-o", "GlobalKnownHostsFile=/dev/null"]


def configuration(folder: Path, address: str, port: int) -> Path:
    path = folder / f"sshd_config_{address}"
    path.write_text(
        f"Port {port}\nListenAddress {address}\nHostKey {folder}/host\nAuthorizedKeysFile {folder}/authorized_keys\n"
        "PasswordAuthentication no\nKbdInteractiveAuthentication no\nUsePAM no\nStrictModes no\nPermitRootLogin yes\n"
        f"PidFile none\nMaxStartups 50\nLogLevel VERBOSE\nAllowUsers {getpass.getuser()}\n",
        encoding="ascii",
    )
    return path


@contextmanager
def sshd(folder: Path) -> Iterator[Sshd]:
    """An sshd that lets its own key in, as long as the block lasts."""
    server = program()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = [*prepared(folder, [f"[127.0.0.1]:{port}"]), "-p", str(port)]
    log, config = folder / "sshd.log", configuration(folder, "127.0.0.1", port)
    process = subprocess.Popen([server, "-D", "-f", str(config), "-E", str(log)], stdin=subprocess.DEVNULL)
    try:
        until(lambda: listening(port) or process.poll() is not None, 10, "sshd listens")
        assert process.poll() is None, log.read_text(encoding="utf-8")
        yield Sshd(shlex.join(words), log, process)
    finally:
        process.terminate()
        process.wait(10)


@contextmanager
def sshd_on(hosts: Sequence[Host], folder: Path) -> Iterator[str]:
    """One on each of these hosts, at the usual port; gives the command that calls them. They end with their hosts."""
    server = program()
    words = prepared(folder, [name for host in hosts for name in (host.name, host.address)])
    with ExitStack() as stack:
        for host in hosts:
            config, log = configuration(folder, host.address, 22), folder / f"{host.name}.log"
            stack.enter_context(host.start([server, "-D", "-f", str(config), "-E", str(log)]))
            until(partial(_told, log, "listening"), 10, f"sshd listens on {host.name}")
        yield shlex.join(words)


def _told(log: Path, word: str) -> bool:
    return log.exists() and word in log.read_text(encoding="utf-8")


def listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
