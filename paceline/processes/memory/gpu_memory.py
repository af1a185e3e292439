"""Memory of GPUs that the processes of one machine share.

The chief allocates a block on each GPU and exports it as a descriptor. The descriptors stay in the queue of a socket
pair that the launcher holds: each process reads them there without taking them out, and maps the blocks. So a block
outlives every process that works on it, as shared memory of the host does: a killed worker or server loses nothing. The
driver frees the blocks when the launcher has closed the sockets.
"""

from __future__ import annotations

import array
import ctypes
import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from typing import Any

import torch
from torch import Tensor

from paceline.errors import PacelineError

FIRST = 1 << 44  # addresses from here on are in GPU memory: FIRST * (1 + number of the GPU) + offset
ALIGN = 512  # as torch's own allocator

_PINNED, _DESCRIPTOR, _DEVICE, _READ_WRITE = 1, 1, 1, 3  # constants of cuda.h
_MOST = 64  # GPUs of one machine
_TYPES = {1: "|u1", 2: "<i2", 4: "<i4", 8: "<i8"}


class NoSharing(PacelineError):
    """This machine cannot share the memory of its GPUs between processes."""


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Allocation(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("handles", ctypes.c_int),
        ("location", _Location),
        ("metadata", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class _BlockView:
    """A place in GPU memory as torch takes it."""

    def __init__(self, pointer: int, shape: tuple[int, ...], width: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": shape,
            "typestr": _TYPES[width],
            "data": (pointer, False),
            "version": 3,
            "strides": None,
        }


@cache
def _driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise NoSharing(f"the driver's library cannot be loaded ({error})") from error


def _do(name: str, *arguments: Any) -> None:
    """Call a function of the CUDA driver; NoSharing if it fails."""
    driver = _driver()
    try:
        code = getattr(driver, name)(*arguments)
    except AttributeError as error:
        raise NoSharing(f"the driver has no {name}") from error
    if code:
        text = ctypes.c_char_p()
        driver.cuGetErrorName(code, ctypes.byref(text))
        raise NoSharing(f"{name} failed: {(text.value or b'unknown error').decode()}")


def _size(number: int) -> ctypes.c_size_t:
    return ctypes.c_size_t(number)


def _word(number: int) -> ctypes.c_uint64:
    return ctypes.c_uint64(number)


def letterbox() -> tuple[int, int]:
    """A socket pair, as descriptors: what is sent to the second waits at the first until both are closed."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return ends[0].detach(), ends[1].detach()


def send_letter(letters: tuple[int, int], descriptors: Mapping[int, int]) -> None:
    """Put a descriptor for each GPU into the letterbox; the sender may close its own."""
    with socket.socket(fileno=os.dup(letters[1])) as end:
        socket.send_fds(end, [bytes(descriptors)], list(descriptors.values()))


def read_letter(letters: tuple[int, int], *, leave: bool = False) -> dict[int, int]:
    """The descriptors of the first letter, by GPU, as this process's own; BlockingIOError if there is none. `leave`:
    the letter stays there for other processes."""
    room = socket.CMSG_SPACE(_MOST * array.array("i").itemsize)
    flags = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC | (socket.MSG_PEEK if leave else 0)
    with socket.socket(fileno=os.dup(letters[0])) as end:
        gpus, ancillary, *_ = end.recvmsg(_MOST, room, flags)
    descriptors = array.array("i")
    for _, _, content in ancillary:
        descriptors.frombytes(content[: len(content) - len(content) % descriptors.itemsize])
    return dict(zip(gpus, descriptors, strict=True))


def address(gpu: int, offset: int) -> int:
    return FIRST * (1 + gpu) + offset


class GpuMemory:
    """One process's view of the blocks. A block is mapped when the process first needs a tensor of it: a launcher,
    which forks, never does."""

    def __init__(self, letters: tuple[int, int], sizes: Mapping[int, int]) -> None:
        """`sizes`: bytes of the block of each GPU, by the GPU's number."""
        self._letters, self._sizes = letters, dict(sizes)
        self._pointers: dict[int, int] = {}  # where a block is mapped in this process

    @classmethod
    def create(cls, letters: tuple[int, int], sizes: Mapping[int, int]) -> GpuMemory:
        """Allocate the blocks. What a chief that died had allocated is freed."""
        if torch.version.hip is not None:
            raise NoSharing("this is a build of torch for ROCm")
        gpus = sorted(sizes)
        for one in gpus:
            if any(other != one and not torch.cuda.can_device_access_peer(one, other) for other in gpus):
                raise NoSharing("the GPUs cannot access each other's memory")
        made = cls(letters, sizes)
        made._discard()
        descriptors: list[int] = []
        try:
            for gpu in gpus:
                descriptors += [made._allocate(gpu)]
            send_letter(letters, dict(zip(gpus, descriptors, strict=True)))
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        return made

    def _discard(self) -> None:
        with suppress(BlockingIOError):
            while True:
                for descriptor in read_letter(self._letters).values():
                    os.close(descriptor)

    def _allocate(self, gpu: int) -> int:
        """Allocate and map a block; gives its descriptor."""
        _start(gpu)
        wanted = _Allocation(_PINNED, _DESCRIPTOR, _Location(_DEVICE, gpu), None)
        unit, handle, descriptor = ctypes.c_size_t(), ctypes.c_uint64(), ctypes.c_int(-1)
        _do("cuMemGetAllocationGranularity", ctypes.byref(unit), ctypes.byref(wanted), 0)
        self._sizes[gpu] = -(-self._sizes[gpu] // unit.value) * unit.value
        _do("cuMemCreate", ctypes.byref(handle), _size(self._sizes[gpu]), ctypes.byref(wanted), _word(0))
        try:
            _do("cuMemExportToShareableHandle", ctypes.byref(descriptor), handle, _DESCRIPTOR, _word(0))
            self._map(gpu, handle)
        finally:
            _do("cuMemRelease", handle)  # the descriptor and the mapping hold the block
        return descriptor.value

    @property
    def sizes(self) -> dict[int, int]:
        """Bytes of each block, by the number of its GPU."""
        return dict(self._sizes)

    def tensor(self, place: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """The tensor at an address. Each one has a version counter of its own: torch views of one tensor would not."""
        gpu, offset = place // FIRST - 1, place % FIRST
        device = torch.device("cuda", gpu)
        if 0 in shape:
            return torch.empty(shape, dtype=dtype, device=device)
        view = _BlockView(self._pointer(gpu) + offset, shape, dtype.itemsize)
        return torch.as_tensor(view, device=device).view(dtype)

    def place(self, tensor: Tensor) -> int | None:
        """The address of a contiguous tensor in a block; None for any other tensor."""
        gpu = tensor.device.index
        if gpu not in self._pointers:
            return None
        offset = tensor.data_ptr() - self._pointers[gpu]
        return address(gpu, offset) if 0 <= offset < self._sizes[gpu] and tensor.is_contiguous() else None

    def synchronize(self) -> None:
        """Wait until this thread's work on the blocks is finished."""
        for gpu in self._pointers:
            torch.cuda.current_stream(gpu).synchronize()

    def _pointer(self, gpu: int) -> int:
        if gpu not in self._pointers:
            _start(gpu)
            descriptor = self._descriptor(gpu)
            try:
                handle = ctypes.c_uint64()
                found = ctypes.c_void_p(descriptor)
                _do("cuMemImportFromShareableHandle", ctypes.byref(handle), found, _DESCRIPTOR)
                self._map(gpu, handle)
                _do("cuMemRelease", handle)
            finally:
                os.close(descriptor)
        return self._pointers[gpu]

    def _descriptor(self, gpu: int) -> int:
        found = read_letter(self._letters, leave=True)
        for other in found.keys() - {gpu}:
            os.close(found[other])
        return found[gpu]

    def _map(self, gpu: int, handle: ctypes.c_uint64) -> None:
        size, pointer = _size(self._sizes[gpu]), ctypes.c_uint64()
        _do("cuMemAddressReserve", ctypes.byref(pointer), size, _size(0), _word(0), _word(0))
        _do("cuMemMap", pointer, size, _size(0), handle, _word(0))
        near = [one for one in sorted(self._sizes) if one == gpu or torch.cuda.can_device_access_peer(one, gpu)]
        access = (_Access * len(near))(*(_Access(_Location(_DEVICE, one), _READ_WRITE) for one in near))
        _do("cuMemSetAccess", pointer, size, access, _size(len(near)))
        self._pointers[gpu] = pointer.value


def _start(gpu: int) -> None:
    """Start CUDA on a GPU in this process."""
    torch.zeros((), device=torch.device("cuda", gpu))


def registered(pointer: int, nbytes: int) -> bool:
    """Register memory of the host with the GPU's driver; False if that fails."""
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    return bool(int(runtime.cudaHostRegister(pointer, nbytes, 0)) == 0)
