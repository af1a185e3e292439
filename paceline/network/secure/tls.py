"""TLS among the nodes of a run: one certificate for all of them, and each side checks that the other holds it."""

from __future__ import annotations

import os
import shutil
import socket
import ssl
import stat
import subprocess
import tempfile
import time
from functools import cache
from pathlib import Path

from paceline.config.endpoint import Certificates, Endpoint
from paceline.errors import UsageError

CERTIFICATE, KEY = "certificate.pem", "key.pem"
LATE = 10.0  # seconds that a shared file system may take to show a new file on another host
_FOLDER = "tls"
_DAYS = 3650
_SETTINGS = """\
[req]
prompt = no
distinguished_name = name
x509_extensions = use
[name]
CN = paceline
[use]
basicConstraints = critical, CA:FALSE
keyUsage = critical, digitalSignature
extendedKeyUsage = serverAuth, clientAuth
subjectKeyIdentifier = hash
"""


def generated(directory: Path) -> Certificates:
    """A certificate in `directory`/tls: the one that is there, or a new one. Several processes may ask at once."""
    folder = directory / _FOLDER
    if not folder.exists():
        directory.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=f".{_FOLDER}-", dir=directory))  # for this user only
        try:
            _generate(aside)
            try:
                aside.rename(folder)
            except OSError:
                if not folder.exists():  # else another process was faster: use its certificate
                    raise
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    return Certificates(folder / CERTIFICATE, folder / KEY, None)


def generated_by(hub: tuple[str, int], directory: Path) -> Certificates:
    """The certificate that the hub has generated before it listens: a process that finds a hub and no certificate
    does not see the hub's directory. OSError: there is no hub yet."""
    folder = directory / _FOLDER
    until = time.monotonic() + LATE
    while not folder.exists():
        socket.create_connection(hub, timeout=5.0).close()
        if time.monotonic() > until:
            raise UsageError(
                f"--tls generated needs a directory that all tasks see: the hub at {hub[0]}:{hub[1]} is there, and its "
                f"certificate is not in {folder} here. Give --dir on a shared file system, or a certificate and key of "
                "your own on every host: --tls CERTIFICATE,KEY"
            )
        time.sleep(0.5)
    return Certificates(folder / CERTIFICATE, folder / KEY, None)


def contexts(c: Certificates) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """For the side that listens and for the side that connects."""
    _refuse_if_shared(c.key)
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False  # the certificate is that of the cluster, whatever its nodes are called
    server.num_tickets = 0  # sessions are not resumed, and the first bytes after the handshake are ours
    for context in (server, client):
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # the very same certificate is proof enough
        try:
            # a key with a password would be asked for at the terminal, which tasks of an engine do not have
            context.load_cert_chain(c.certificate, c.key, password="")
        except (OSError, ValueError) as error:
            raise UsageError(
                f"{c.certificate} and {c.key} are not a certificate and its key, in PEM and without a password: "
                f"{cause(error)}"
            ) from error
        trusted = c.authority or c.certificate
        try:
            context.load_verify_locations(cafile=trusted)
        except OSError as error:
            raise UsageError(f"{trusted} holds no certificates to trust, in PEM: {cause(error)}") from error
    return server, client


def _refuse_if_shared(key: Path) -> None:
    """A key that others can read proves nothing. Root may lend its own to a group, as mounted secrets are lent."""
    try:
        status = key.stat()
    except OSError as error:
        raise UsageError(f"the key {key} cannot be read: {error.strerror}") from error
    lent = status.st_uid == 0 and os.geteuid() != 0
    if status.st_mode & (0o037 if lent else 0o077):
        raise UsageError(
            f"the key {key} is open to others (mode {stat.S_IMODE(status.st_mode):04o}); chmod 600 {key}, and make a "
            "new certificate if another user may have read it"
        )


def _generate(folder: Path) -> None:
    openssl = shutil.which("openssl")
    if openssl is None:
        raise UsageError(
            "there is no `openssl` command, which makes the certificate; install it (apt-get install openssl), "
            "or give a certificate and a key of your own"
        )
    settings, key = folder / "settings", folder / KEY
    settings.write_text(_SETTINGS, encoding="ascii")
    key.touch(mode=0o600)  # before anything is in it
    command = (openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-sha256")
    files = ("-config", settings, "-keyout", key, "-out", folder / CERTIFICATE)
    made = subprocess.run(
        (*command, "-days", str(_DAYS), *files), stdin=subprocess.DEVNULL, capture_output=True, check=False
    )
    if made.returncode:
        last = made.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise UsageError(f"`{openssl} req` could not make a certificate: {last or f'exit code {made.returncode}'}")
    key.chmod(0o600)
    settings.unlink()


def cause(error: Exception) -> str:
    """Why the system or TLS refuses something."""
    if isinstance(error, ssl.SSLError):
        return error.reason or str(error)
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


_cached_contexts = cache(contexts)


def server_side(endpoint: Endpoint) -> ssl.SSLContext | None:
    """The context of connections that come in; None: they are not encrypted."""
    return None if endpoint.certificates is None else _cached_contexts(endpoint.certificates)[0]


def client_side(endpoint: Endpoint) -> ssl.SSLContext | None:
    """The context of connections that go out; None: they are not encrypted."""
    return None if endpoint.certificates is None else _cached_contexts(endpoint.certificates)[1]
