"""A lock in shared memory that survives its owner: POSIX's robust, process-shared mutex, from the C library.

If the owner dies, the kernel tells the next process that takes the lock. What the owner was changing then may be half
changed: the process that takes the lock finds that out by itself, from a mark that the owner had set.

A mutex belongs to a thread: threads of one process exclude each other like processes.
"""

from __future__ import annotations

import ctypes
import errno
import os
import time

SIZE = 64  # bytes; pthread_mutex_t has 40 to 48
_SHARED, _ROBUST = 1, 1  # PTHREAD_PROCESS_SHARED, PTHREAD_MUTEX_ROBUST
_MONOTONIC = 1  # CLOCK_MONOTONIC
_OWNER = 0x3FFFFFFF  # the bits of a futex that name its owner: 0 while nobody has the lock, or its owner has died


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


# a call by `_waiting` lets other threads of this process run meanwhile; one by `_brief` does not, and is faster
_waiting, _brief = ctypes.CDLL(None), ctypes.PyDLL(None)
_try_lock, _unlock = _brief.pthread_mutex_trylock, _brief.pthread_mutex_unlock
_try_lock.argtypes = _unlock.argtypes = (ctypes.c_void_p,)
_has_clock = hasattr(_waiting, "pthread_mutex_clocklock")  # a C library from before 2020 has only the wall clock


class RobustLock:
    """The lock at an address, which every process that maps the memory can take."""

    def __init__(self, address: int) -> None:
        self._at = ctypes.c_void_p(address)
        self._word = ctypes.c_uint32.from_address(address)
        self._until = _TimeSpec()

    @staticmethod
    def create(address: int) -> None:
        """Make a lock at an address, of SIZE bytes, that no process has taken."""
        attributes = ctypes.create_string_buffer(SIZE)
        _check(_brief.pthread_mutexattr_init(attributes))
        _check(_brief.pthread_mutexattr_setpshared(attributes, _SHARED))
        _check(_brief.pthread_mutexattr_setrobust(attributes, _ROBUST))
        _check(_brief.pthread_mutex_init(ctypes.c_void_p(address), attributes))

    def looks_free(self) -> bool:
        """Whether it is worth trying to take the lock. A try takes the lock's memory from its owner's core, a look does
        not."""
        return not self._word.value & _OWNER

    def try_acquire(self) -> bool:
        """Take the lock if it is free."""
        code = _try_lock(self._at)
        return code == 0 or self._taken(code)

    def acquire_within(self, seconds: float) -> bool:
        """Take the lock; False if that has failed for so long."""
        until = (time.monotonic_ns() if _has_clock else time.time_ns()) + int(seconds * 1e9)
        self._until.seconds, self._until.nanoseconds = divmod(until, 1_000_000_000)
        if _has_clock:
            code = _waiting.pthread_mutex_clocklock(self._at, _MONOTONIC, ctypes.byref(self._until))
        else:
            code = _waiting.pthread_mutex_timedlock(self._at, ctypes.byref(self._until))
        return code == 0 or self._taken(code)

    def release(self) -> None:
        _check(_unlock(self._at))

    def _taken(self, code: int) -> bool:
        if code == errno.EOWNERDEAD:
            _check(_brief.pthread_mutex_consistent(self._at))
            return True
        if code in (errno.EBUSY, errno.ETIMEDOUT):
            return False
        raise OSError(code, os.strerror(code))


def _check(code: int) -> None:
    if code:
        raise OSError(code, os.strerror(code))
