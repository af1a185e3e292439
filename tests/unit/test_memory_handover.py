"""Nodes of one host: descriptors are handed to who proves the secret, and to nobody else."""

from __future__ import annotations

import errno
import hashlib
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from paceline.errors import RunError
from paceline.network.nodes import memory_handover
from paceline.network.nodes.memory_handover import MemoryHandover, identity, taken
from paceline.processes.memory.segment import Segment, anonymous

SECRET = bytes(range(32))
PROOF = 32 + hashlib.sha256().digest_size


def fresh() -> str:
    return os.urandom(8).hex()


@contextmanager
def doorstep(run: str, descriptors: list[int], node: int = 0) -> Iterator[MemoryHandover]:
    step = MemoryHandover(run, node, SECRET, descriptors)
    try:
        yield step
    finally:
        step.close()


@contextmanager
def pumped(step: MemoryHandover) -> Iterator[None]:
    """Served from another thread, as a launcher would between two looks."""
    ended = threading.Event()

    def pump() -> None:
        while not ended.is_set():
            step.pump()
            ended.wait(0.002)

    thread = threading.Thread(target=pump)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextmanager
def segments(count: int) -> Iterator[list[int]]:
    made = [anonymous("paceline-test", 4096) for _ in range(count)]
    try:
        yield made
    finally:
        for one in made:
            os.close(one)


@pytest.mark.parametrize("count", [1, 3, 250, 251, 600])
def test_descriptors_are_handed_over_in_their_order(count: int) -> None:
    run = fresh()
    with segments(count) as ours, doorstep(run, ours) as step, pumped(step):
        found = taken(run, 0, SECRET, count)
    try:
        assert len(found) == count
        assert not set(found) & set(ours)
    finally:
        for one in found:
            os.close(one)


def test_the_memory_is_the_same() -> None:
    run = fresh()
    with segments(2) as ours, doorstep(run, ours, node=3) as step, pumped(step):
        theirs = taken(run, 3, SECRET, 2)
        for one, other in zip(ours, theirs, strict=True):
            Segment(one, 4096).words[5] = one
            assert Segment(other, 4096).words[5] == one
            os.close(other)


def refused(run: str, said: bytes, step: MemoryHandover) -> bytes:
    """What somebody gets who says this."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
        stranger.settimeout(20)
        stranger.connect(f"\0paceline-{run}-0")
        stranger.sendall(said)
        stranger.shutdown(socket.SHUT_WR)
        step.pump()
        try:
            answer, rights, *_ = stranger.recvmsg(100, 1000)
        except ConnectionResetError:  # closed before all was read
            return b""
        assert rights == []
        return answer


def test_who_does_not_prove_the_secret_gets_nothing() -> None:
    run, nonce = fresh(), os.urandom(32)
    with segments(1) as ours, doorstep(run, ours) as step:
        assert refused(run, b"", step) == b""
        assert refused(run, bytes(PROOF - 1), step) == b""
        assert refused(run, bytes(PROOF + 100), step) == b""
        for secret, name, node in ((b"x" * 32, run, 0), (SECRET, run + "x", 0), (SECRET, run, 1)):
            assert refused(run, nonce + memory_handover._proof(secret, name, node, nonce), step) == b""


def test_a_wrong_secret_is_told_apart_from_nobody_there() -> None:
    run = fresh()
    with segments(1) as ours, doorstep(run, ours) as step, pumped(step), pytest.raises(ConnectionResetError):
        taken(run, 0, b"x" * 32, 1)
    with pytest.raises(ConnectionRefusedError):
        taken(run, 0, SECRET, 1)


def test_another_user_gets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that asks has this process's user; so the doorstep's is another here."""
    run, nonce = fresh(), os.urandom(32)
    own = os.getuid()
    with segments(1) as ours, doorstep(run, ours) as step:
        monkeypatch.setattr(os, "getuid", lambda: own + 1)
        assert refused(run, nonce + memory_handover._proof(SECRET, run, 0, nonce), step) == b""


def test_other_counts_are_another_program() -> None:
    run = fresh()
    with (
        segments(2) as ours,
        doorstep(run, ours) as step,
        pumped(step),
        pytest.raises(RunError, match="2 descriptors, not 3"),
    ):
        taken(run, 0, SECRET, 3)


def test_a_name_is_one_nodes() -> None:
    run = fresh()
    with segments(1) as ours, doorstep(run, ours):
        with pytest.raises(OSError, match="in use") as failed:
            MemoryHandover(run, 0, SECRET, ours)
        assert failed.value.errno == errno.EADDRINUSE
        with doorstep(run, ours, node=1):
            pass
    with segments(1) as ours, doorstep(run, ours):  # and free again with its process, or its end
        pass


def test_a_host_is_told_apart_by_its_kernel_network_and_user(monkeypatch: pytest.MonkeyPatch) -> None:
    here = identity()
    assert here == identity()
    assert len(here.split("/")) == 3
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert identity() != here
