"""The lock in shared memory: it excludes processes and threads, and survives its owner."""

from __future__ import annotations

import mmap
import os
import signal
import threading
from collections.abc import Iterator

import pytest
import torch
from memory_fixture import Company, played

from paceline.processes.memory.robust_lock import SIZE, RobustLock


@pytest.fixture
def address() -> Iterator[int]:
    memory = mmap.mmap(-1, SIZE)  # shared with forks
    found = torch.frombuffer(memory, dtype=torch.uint8)
    RobustLock.create(found.data_ptr())
    yield found.data_ptr()
    del found  # the memory is kept until here


def test_one_owner_at_a_time(address: int) -> None:
    lock, other = RobustLock(address), RobustLock(address)
    assert lock.try_acquire()
    assert not other.try_acquire()
    assert not other.acquire_within(0.001)
    lock.release()
    assert other.acquire_within(0.001)
    other.release()


def test_the_lock_of_a_killed_process_is_free(address: int) -> None:
    def die() -> None:
        assert RobustLock(address).try_acquire()
        os.kill(os.getpid(), signal.SIGKILL)

    for _ in range(3):  # each time: it is whole again after a death
        assert Company(die).end() == [-signal.SIGKILL]
        lock = RobustLock(address)
        assert lock.acquire_within(10.0)
        assert not RobustLock(address).try_acquire()
        lock.release()


def test_who_waits_in_its_queue_gets_the_lock_of_a_killed_process(address: int) -> None:
    taken, told = os.pipe()

    def hold() -> None:
        assert RobustLock(address).try_acquire()
        os.write(told, b"!")
        signal.pause()

    holder = Company(hold)
    os.read(taken, 1)
    waiter = Company(lambda: _taken(RobustLock(address).acquire_within(30.0)))
    assert not RobustLock(address).try_acquire()
    holder.kill()
    assert waiter.end() == [0]


def _taken(success: bool) -> None:
    assert success


def test_no_increment_is_lost(address: int) -> None:
    """Two processes with two threads each, and a word that only the lock protects."""
    counter = torch.zeros(1, dtype=torch.int64).share_memory_()
    each = 300

    def count() -> None:
        lock = RobustLock(address)
        for number in range(each):
            if number % 2 or not lock.try_acquire():
                while not lock.acquire_within(0.01):
                    pass
            seen = counter.item()
            os.sched_yield()
            counter[0] = seen + 1
            lock.release()

    def both() -> None:
        threads = [threading.Thread(target=count) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    played(both, both)
    assert counter.item() == 4 * each


def test_releasing_what_is_not_held_is_an_error(address: int) -> None:
    with pytest.raises(PermissionError):
        RobustLock(address).release()
