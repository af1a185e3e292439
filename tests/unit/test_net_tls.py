"""Certificates of a cluster: made once, held by both sides, and nobody without them comes in."""

from __future__ import annotations

import os
import shutil
import ssl
import stat
import subprocess
from pathlib import Path

import pytest
from net_ends import SECRET, Door, exactly, names

from paceline.config.endpoint import Certificates
from paceline.errors import UsageError
from paceline.network.secure import tls
from paceline.network.secure.admission import Refused, listener
from paceline.network.secure.channel import Channel
from paceline.network.secure.tls import contexts, generated, generated_by

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
Contexts = tuple[ssl.SSLContext, ssl.SSLContext]


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Contexts:
    return contexts(generated(tmp_path_factory.mktemp("ours")))


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Contexts:
    return contexts(generated(tmp_path_factory.mktemp("foreign")))


@needs_openssl
def test_a_certificate_is_made_once(tmp_path: Path) -> None:
    made = generated(tmp_path / "run")
    assert made.authority is None
    assert stat.S_IMODE(made.key.stat().st_mode) == 0o600
    assert stat.S_IMODE(made.key.parent.stat().st_mode) == 0o700
    key = made.key.read_bytes()
    assert generated(tmp_path / "run") == made
    assert made.key.read_bytes() == key
    assert names(tmp_path / "run") == ["tls"]
    assert names(made.key.parent) == ["certificate.pem", "key.pem"]


@needs_openssl
def test_who_is_slower_takes_the_certificate_of_the_faster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generate = tls._generate
    monkeypatch.setattr(tls, "_generate", lambda folder: (generate(folder), faster()))

    def faster() -> None:
        monkeypatch.setattr(tls, "_generate", generate)
        keys.append(generated(tmp_path).key.read_bytes())

    keys: list[bytes] = []
    assert generated(tmp_path).key.read_bytes() == keys[0]
    assert names(tmp_path) == ["tls"]


def test_without_openssl_it_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="apt-get install openssl"):
        generated(tmp_path / "run")
    assert names(tmp_path / "run") == []


def test_an_openssl_that_fails_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "openssl"
    fake.write_text("#!/bin/sh\necho first >&2\necho 'no such curve' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(UsageError, match="no such curve"):
        generated(tmp_path / "run")
    assert names(tmp_path / "run") == []


@needs_openssl
def test_files_that_are_no_certificates(tmp_path: Path) -> None:
    one, other = generated(tmp_path / "one"), generated(tmp_path / "other")
    nonsense = tmp_path / "nonsense.pem"
    nonsense.write_text("nonsense")
    for wrong in (
        Certificates(one.certificate, other.key),
        Certificates(nonsense, one.key),
        Certificates(tmp_path / "absent.pem", one.key),
    ):
        with pytest.raises(UsageError, match="not a certificate and its key"):
            contexts(wrong)
    for wrong in (nonsense, tmp_path / "absent.pem"):
        with pytest.raises(UsageError, match="no certificates to trust"):
            contexts(Certificates(one.certificate, one.key, wrong))


@needs_openssl
def test_a_key_with_a_password_is_not_asked_for(tmp_path: Path) -> None:
    made = generated(tmp_path)
    locked = tmp_path / "locked.pem"
    subprocess.run(
        ["openssl", "ec", "-in", made.key, "-aes256", "-passout", "pass:word", "-out", locked],
        check=True,
        capture_output=True,
    )
    with pytest.raises(UsageError, match="without a password"):
        contexts(Certificates(made.certificate, locked))


@needs_openssl
def test_both_sides_hold_the_certificate(ours: Contexts) -> None:
    server, client = ours
    with Door(tls=server) as door, door.let_in(tls=client) as connection:
        assert isinstance(connection, ssl.SSLSocket)
        assert connection.version() == "TLSv1.3"
        assert connection.getpeercert(binary_form=True) == door.admitted[0].getpeercert(binary_form=True)
        near, far = Channel(connection, limits={1: 10}), Channel(door.admitted[0], limits={1: 10})
        near.send(1, b"hello")
        messages: list[tuple[int, bytearray]] = []
        while not messages:
            messages = far.receive()
        assert messages == [(1, b"hello")]
        far.send(1, b"and back")
        while not near.receive():
            pass
        assert connection.session is not None
        assert not connection.session.has_ticket  # nobody takes up an old session
        assert door.lines == []


@needs_openssl
def test_the_secret_is_asked_for_inside_tls_too(ours: Contexts) -> None:
    server, client = ours
    with Door(tls=server) as door:
        with pytest.raises(Refused, match="has another secret"):
            door.let_in(b"x" * 32, tls=client)
        assert door.admitted == []
        assert len(door.lines) == 1


@needs_openssl
def test_a_client_with_another_certificate_is_refused(ours: Contexts, foreign: Contexts) -> None:
    trusting = foreign[1]
    trusting.verify_mode = ssl.CERT_NONE  # it does not mind who the gate is; the gate does
    with Door(tls=ours[0]) as door:
        with pytest.raises(Refused, match="need the cluster's certificate"):
            door.let_in(tls=trusting)
        assert door.admitted == []
        assert len(door.lines) == 1
        assert "TLS" in door.lines[0]


@needs_openssl
def test_a_client_without_a_certificate_is_refused(ours: Contexts) -> None:
    bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    bare.check_hostname = False
    bare.verify_mode = ssl.CERT_NONE
    with Door(tls=ours[0]) as door:
        with pytest.raises(Refused, match="need the cluster's certificate"):
            door.let_in(tls=bare)
        assert door.admitted == []


@needs_openssl
def test_a_gate_with_another_certificate_is_not_believed(ours: Contexts, foreign: Contexts) -> None:
    with Door(tls=foreign[0]) as door:
        with pytest.raises(Refused, match="does not hold the cluster's certificate"):
            door.let_in(tls=ours[1])
        assert door.admitted == []


@needs_openssl
def test_older_tls_is_refused(ours: Contexts, tmp_path: Path) -> None:
    made = generated(tmp_path)
    old = contexts(made)[1]
    old.minimum_version = ssl.TLSVersion.TLSv1_2
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    with Door(tls=contexts(made)[0]) as door:
        with pytest.raises(Refused):
            door.let_in(tls=old)
        assert door.admitted == []


@needs_openssl
def test_tls_on_one_side_only(ours: Contexts) -> None:
    server, client = ours
    with Door() as door:
        with pytest.raises(Refused, match="does not use TLS"):
            door.let_in(tls=client)
        door.until(lambda: bool(door.lines))
        assert "speaks TLS, which this side does not use" in door.lines[0]
    with Door(tls=server, deadline=0.2) as door:
        with pytest.raises(ConnectionResetError, match="does it expect TLS"):
            door.let_in()
        assert len(door.lines) == 1


@needs_openssl
def test_what_is_not_tls_costs_a_line(ours: Contexts) -> None:
    with Door(tls=ours[0]) as door, door.knock() as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n")
        door.until(lambda: bool(door.lines))
        assert "does not speak TLS" in door.lines[0]
        assert len(door.gate) == 0


@needs_openssl
def test_an_authority_of_several_certificates(tmp_path: Path) -> None:
    """Every node has its own certificate; who is signed by the authority belongs to the cluster."""
    authority = tmp_path / "authority.pem"

    def openssl(*arguments: object) -> None:
        subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)

    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    openssl("req", "-x509", *curve, "-subj", "/CN=lab", "-keyout", tmp_path / "lab.key", "-out", authority)
    nodes = []
    for name in ("one", "other"):
        key, request, certificate = (tmp_path / f"{name}.{end}" for end in ("key", "csr", "pem"))
        openssl("req", *curve, "-subj", f"/CN={name}", "-keyout", key, "-out", request)
        signing = ("-CA", authority, "-CAkey", tmp_path / "lab.key", "-CAcreateserial")
        openssl("x509", "-req", "-in", request, *signing, "-out", certificate)
        nodes.append(Certificates(certificate, key, authority))
    with Door(tls=contexts(nodes[0])[0]) as door, door.let_in(tls=contexts(nodes[1])[1]):
        assert len(door.admitted) == 1
    alike = contexts(Certificates(nodes[0].certificate, nodes[0].key))  # without the authority: one for all
    with Door(tls=alike[0]) as door, door.let_in(tls=alike[1]):
        assert len(door.admitted) == 1
    stranger = contexts(generated(tmp_path))[1]
    stranger.verify_mode = ssl.CERT_NONE
    with Door(tls=contexts(nodes[0])[0]) as door, pytest.raises(Refused):
        door.let_in(SECRET, tls=stranger)


@needs_openssl
def test_nothing_behind_the_handshake_is_read(ours: Contexts) -> None:
    server, client = ours
    with Door(tls=server) as door, door.let_in(tls=client) as connection:
        connection.sendall(b"first words")
        admitted = door.admitted[0]
        admitted.setblocking(True)
        assert exactly(admitted, 11) == b"first words"


@needs_openssl
@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o660])
def test_a_key_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    made = generated(tmp_path)
    made.key.chmod(mode)
    with pytest.raises(UsageError, match=f"open to others .mode {mode:04o}.; chmod 600 {made.key}"):
        contexts(made)
    made.key.chmod(0o400)
    contexts(made)


@needs_openssl
def test_a_key_that_root_lends_to_a_group_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Kubernetes mounts a secret for a user that is not root: root's own, readable by the pod's group."""
    made = generated(tmp_path)
    if made.key.stat().st_uid:
        pytest.skip("only root has files of root's")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    made.key.chmod(0o440)
    contexts(made)
    made.key.chmod(0o444)
    with pytest.raises(UsageError, match="open to others"):
        contexts(made)


@needs_openssl
def test_a_generated_certificate_is_the_hubs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who sees the hub's directory finds it there; who finds a hub and no certificate is told why, and makes none."""
    monkeypatch.setattr(tls, "LATE", 0.0)
    with listener("127.0.0.1") as hub:
        where = hub.getsockname()[:2]
        with pytest.raises(UsageError, match=r"needs a directory that all tasks see: .*--tls CERTIFICATE,KEY"):
            generated_by(where, tmp_path)
        assert not list(tmp_path.iterdir())
        made = generated(tmp_path)
        assert generated_by(where, tmp_path) == made
    with pytest.raises(ConnectionRefusedError):  # there is no hub yet: the certificate may come with it
        generated_by(where, tmp_path / "elsewhere")
