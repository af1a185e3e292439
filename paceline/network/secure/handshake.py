"""The handshake of two processes: a challenge and a proof of the secret in both directions.

    gate    "paceline", version, nonce                                              44 bytes
    client  "paceline", its nonce, HMAC(secret, "client" version gate's client's)   72 bytes
    gate    HMAC(secret, "gate" version client's gate's), or REFUSAL                32 bytes

All messages have a fixed size. The nonces are new each time, so a recorded handshake proves nothing; the roles are in
the proofs, so neither side's can be sent back to it as the other's.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import os
import socket
import ssl
import struct
import time
from collections.abc import Generator

from paceline.errors import PacelineError
from paceline.network.secure.outbound import WOULD_BLOCK

MAGIC = b"paceline"
VERSION = 1  # of all protocols over these connections
NONCE = 32
PROOF = 32
GREETING = len(MAGIC) + 4 + NONCE
ANSWER = len(MAGIC) + NONCE + PROOF
# Sent instead of a proof, so that the other side knows it was not merely a broken connection. Anybody could forge
# it, to no more effect than closing the connection has.
REFUSAL = b"refused".ljust(PROOF, b"\0")

_NUMBER = struct.Struct("<I")


class Refused(PacelineError):
    """The other side is not of this cluster, or does not believe that we are. Trying again does not help."""


class TurnedAway(Exception):
    """Why a connection is refused."""


def greeting(gate: bytes) -> bytes:
    return MAGIC + _NUMBER.pack(VERSION) + gate


def greeted(message: bytes) -> tuple[int, bytes]:
    """The version and the nonce of a greeting, whose magic has been checked."""
    at = len(MAGIC)
    return _NUMBER.unpack_from(message, at)[0], message[at + 4 :]


def answer(secret: bytes, gate: bytes, client: bytes) -> bytes:
    return MAGIC + client + client_proof(secret, gate, client)


def client_proof(secret: bytes, gate: bytes, client: bytes) -> bytes:
    return hmac.digest(secret, b"client" + _NUMBER.pack(VERSION) + gate + client, hashlib.sha256)


def gate_proof(secret: bytes, gate: bytes, client: bytes) -> bytes:
    return hmac.digest(secret, b"gate" + _NUMBER.pack(VERSION) + client + gate, hashlib.sha256)


def gate_side(connection: socket.socket, secret: bytes) -> Generator[None, None, None]:
    """The listener's side of a handshake. Yields instead of waiting; returns when the other has proved the secret."""
    while isinstance(connection, ssl.SSLSocket):
        try:
            connection.do_handshake()
            break
        except WOULD_BLOCK:
            yield
    ours = os.urandom(NONCE)
    yield from _say(connection, greeting(ours))
    heard = b""
    while len(heard) < ANSWER:
        try:
            piece = connection.recv(ANSWER - len(heard))  # not a byte more
        except WOULD_BLOCK:
            yield
            continue
        if not piece:
            raise TurnedAway("it left without proving the secret")
        heard += piece
        if not MAGIC.startswith(heard[: len(MAGIC)]):
            tls = heard[:1] == b"\x16"  # in our own words: the bytes of an unknown peer never reach a log
            other = "TLS, which this side does not use; all tasks must be started alike"
            raise TurnedAway(f"it speaks {other}" if tls else "it does not speak paceline's protocol")
    theirs, proof = heard[len(MAGIC) : -PROOF], heard[-PROOF:]
    if not hmac.compare_digest(proof, client_proof(secret, ours, theirs)):
        with contextlib.suppress(OSError):  # as far as it can be said at once
            connection.send(REFUSAL)
        raise TurnedAway("it has another secret")
    yield from _say(connection, gate_proof(secret, ours, theirs))


def _say(connection: socket.socket, message: bytes) -> Generator[None, None, None]:
    while message:
        try:
            message = message[connection.send(message) :]
        except WOULD_BLOCK:
            yield


def prove(connection: socket.socket, secret: bytes, peer: str, until: float) -> None:
    """The client's side of a handshake, which waits until that moment."""
    start = received(connection, len(MAGIC), peer, until, "without a greeting; does it expect TLS?")
    if start != MAGIC:
        raise Refused(f"{peer} does not speak paceline's protocol; is it the right address and port?")
    rest = received(connection, GREETING - len(start), peer, until, "in the middle of its greeting")
    version, theirs = greeted(start + rest)
    if version != VERSION:
        raise Refused(
            f"{peer} speaks version {version} of the protocol, this side version {VERSION}; "
            "install the same paceline on all nodes"
        )
    ours = os.urandom(NONCE)
    connection.settimeout(left(until, peer))
    connection.sendall(answer(secret, theirs, ours))
    proof = received(connection, PROOF, peer, until, "before it had answered")
    if hmac.compare_digest(proof, REFUSAL):
        raise Refused(f"{peer} has another secret; PACELINE_SECRET (or its file) must be the same for all tasks")
    if not hmac.compare_digest(proof, gate_proof(secret, theirs, ours)):
        raise Refused(f"{peer} could not prove that it knows the secret; it is not a node of this cluster")


def received(connection: socket.socket, size: int, peer: str, until: float, when: str) -> bytes:
    """Receive just as many bytes, waiting until that moment. `when`: what an error says of an early end."""
    heard = b""
    while len(heard) < size:
        connection.settimeout(left(until, peer))
        piece = connection.recv(size - len(heard))
        if not piece:
            raise ConnectionResetError(errno.ECONNRESET, f"{peer} closed the connection {when}")
        heard += piece
    return heard


def left(until: float, peer: str) -> float:
    seconds = until - time.monotonic()
    if seconds <= 0:
        raise TimeoutError(errno.ETIMEDOUT, f"{peer} did not answer in time")
    return seconds
