"""A real sshd on loopback, with a key and a configuration of its own; nothing of the machine's is read or touched."""

from __future__ import annotations

import getpass
import os
import shlex
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from processes import until


@dataclass(frozen=True)
class Sshd:
    """Where it listens, and how it is called."""

    ssh: str  # the command, with everything that a stranger to this folder would need
    log: Path
    process: subprocess.Popen[bytes]


@contextmanager
def sshd(folder: Path) -> Iterator[Sshd]:
    """An sshd that lets its own key in, as long as the block lasts."""
    server = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
    if server is None or shutil.which("ssh") is None or shutil.which("ssh-keygen") is None:
        pytest.skip("openssh-server and openssh-client are not installed")
    folder.mkdir(mode=0o700)
    for name in ("host", "user"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)],
            check=True,
            stdin=subprocess.DEVNULL,
        )
    shutil.copy(folder / "user.pub", folder / "authorized_keys")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # where it shuts its unprivileged half in
    public = (folder / "host.pub").read_text(encoding="ascii").rsplit(None, 1)[0]
    (folder / "known_hosts").write_text(f"[127.0.0.1]:{port} {public}\n", encoding="ascii")
    (folder / "sshd_config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {folder}/host\nAuthorizedKeysFile {folder}/authorized_keys\n"
        "PasswordAuthentication no\nKbdInteractiveAuthentication no\nUsePAM no\nStrictModes no\nPermitRootLogin yes\n"
        f"PidFile none\nMaxStartups 50\nLogLevel VERBOSE\nAllowUsers {getpass.getuser()}\n",
        encoding="ascii",
    )
    log = folder / "sshd.log"
    process = subprocess.Popen(
        [server, "-D", "-f", str(folder / "sshd_config"), "-E", str(log)], stdin=subprocess.DEVNULL
    )
    try:
        until(lambda: listening(port) or process.poll() is not None, 10, "sshd listens")
        assert process.poll() is None, log.read_text(encoding="utf-8")
        words = ["ssh", "-F", "none", "-p", str(port), "-i", str(folder / "user"), "-o", "IdentitiesOnly=yes"]
        words += ["-o", f"UserKnownHostsFile={folder}/known_hosts", "-o", "GlobalKnownHostsFile=/dev/null"]
        yield Sshd(shlex.join(words), log, process)
    finally:
        process.terminate()
        process.wait(10)


def listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
