"""Results that are received where they stay, or in their lane after all."""

from __future__ import annotations

import mmap
import socket

import torch
from remote_ends import LENGTH, bytes_of, said, worker

from paceline.network.calls.tcp_client import TcpClient
from paceline.network.calls.tcp_connection import REPLY
from paceline.processes.calls.zero_copy import ReceiveBuffer
from paceline.processes.memory.call_codec import encode
from paceline.processes.memory.run_memory import RunMemory

SIZE = 4 * LENGTH
X = torch.arange(float(LENGTH)) + 1


def expected(reach: TcpClient, number: int = 1) -> ReceiveBuffer:
    """A call was posted in the first lane, and its result has a place."""
    mailbox, block = reach._mailboxes[0], mmap.mmap(-1, SIZE)
    reach._board.posted[mailbox.index] = number
    landing = ReceiveBuffer(mailbox.reply_at, SIZE, block, torch.frombuffer(block, dtype=torch.float32))
    reach.expect(mailbox, landing)
    return landing


def answer(reach: TcpClient, size: int = SIZE, number: int = 1, version: int = 7, shift: int = 0) -> bytes:
    at = reach._mailboxes[0].reply_at
    words = encode((X,), lambda _: at)
    piece = (at + shift, size)
    return bytes_of(REPLY, 0, number, version, words=words, pieces=[piece], data=(X.numpy().tobytes() * 2)[:size])


def lies(reach: TcpClient, memory: RunMemory) -> bytes:
    at = reach._mailboxes[0].reply_at
    return memory.segment.memory[at : at + SIZE]


def test_a_result_comes_where_it_stays() -> None:
    with worker() as (theatre, memory, reach, far):
        landing = expected(reach)
        assert said(answer(reach), far, memory.wakeup.look)
        assert theatre.board.answered[0][0] == 1
        assert reach.landed(reach._mailboxes[0]) is landing
        assert landing.tensor.tolist() == X.tolist()
        assert landing.is_for(landing.at, torch.float32, (LENGTH,))
        assert lies(reach, memory) == bytes(SIZE)
        assert reach.landed(reach._mailboxes[0]) is None  # it is the caller's now


def test_what_is_larger_or_lies_elsewhere_comes_into_the_lane() -> None:
    for size, shift in ((SIZE + 4, 0), (SIZE, 4)):
        with worker() as (_, memory, reach, far):
            landing = expected(reach)
            assert said(answer(reach, size, shift=shift), far, memory.wakeup.look)
            assert reach.landed(reach._mailboxes[0]) is None
            assert not landing.tensor.any()
            assert lies(reach, memory)[shift:] == X.numpy().tobytes()[: SIZE - shift]


def test_another_result_than_the_last_is_put_back_into_its_lane() -> None:
    with worker() as (_, memory, reach, far):
        landing = expected(reach)
        assert said(answer(reach, SIZE - 8), far, memory.wakeup.look)  # shorter: it still fits there
        assert reach.landed(reach._mailboxes[0]) is landing
        assert not landing.is_for(landing.at, torch.float32, (LENGTH - 2,))
        landing.put_back(memory.segment)
        assert lies(reach, memory) == X.numpy().tobytes()[:-8] + bytes(8)


def test_what_is_no_longer_waited_for_changes_nothing() -> None:
    """A call that was given up, one that the run has gone back over, one that was answered."""
    with worker() as (theatre, memory, reach, far):
        version = memory.version_words()[0]
        landing = expected(reach, number=2)
        assert said(answer(reach, number=1), far, memory.wakeup.look)
        reach.void()
        assert said(answer(reach, number=2), far, memory.wakeup.look)
        assert not landing.tensor.any()
        assert memory.segment.words[version] == 0
        landing = expected(reach, number=3)
        assert said(answer(reach, number=3), far, memory.wakeup.look)
        assert said(answer(reach, number=3, version=9), far, memory.wakeup.look)
        assert memory.segment.words[version] == 7
        assert theatre.board.answered[0][0] == 3


def test_a_connection_that_breaks_inside_leaves_it_to_the_next() -> None:
    with worker() as (_, memory, reach, far):
        landing = expected(reach)
        far.sendall(answer(reach)[:-4])
        memory.wakeup.look()
        far.shutdown(socket.SHUT_RDWR)
        while reach._wires[0] is not None:
            memory.wakeup.look()
        assert landing.tensor[:-1].tolist() == X[:-1].tolist()  # as far as it had come
        assert not landing.came
        assert reach.landed(reach._mailboxes[0]) is None


def test_when_nothing_is_waited_for_nothing_is_kept() -> None:
    with worker() as (_, memory, reach, far):
        landing = expected(reach)
        reach.forget()
        assert said(answer(reach), far, memory.wakeup.look)
        assert not landing.tensor.any()
        assert reach.landed(reach._mailboxes[0]) is None
