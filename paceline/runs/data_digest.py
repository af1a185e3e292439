"""SHA-256 of a task's training and test data: about 30 ms for the 55 MB of MNIST, once per data set."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from paceline.errors import UsageError
from paceline.state import Vector
from paceline.task import Task
from paceline.torch_task import SampledTask, Samples, StreamSamples, seeded
from paceline.torch_task.batch_parts import tensors_in

WHOLE = 2**28  # largest tensor, in bytes, that is hashed completely (some tenths of a second)
ROWS = 2**14  # rows of a larger tensor that are hashed, evenly spread
TAKEN = 64  # samples that are hashed of a data set that makes each on demand
SETTINGS = {"name", "batch", "feed", "shuffle", "notice", "buffer_policy", "heterogeneous"}  # part of the config

Sum = tuple[str, str | None]  # the hash, and which samples it covers if not all

_known: WeakKeyDictionary[Samples, tuple[Any, Sum]] = WeakKeyDictionary()


def data_of(task: Task, x0: Vector | None) -> tuple[dict[str, Any] | None, str | None]:
    """The hashes of a task's data and of its first vector; or None, and why they cannot be computed."""
    try:
        found = _of_samples_of(task) if isinstance(task, SampledTask) else _of_values(task)
    except Exception as error:  # of the data set's own code: a run must not fail because of it
        return None, f"the data of task {task.name!r} cannot be hashed: {error}"
    return found | ({} if x0 is None else {"start": _of_tensors([x0])[0]}), None


def _of_samples_of(task: SampledTask) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, samples in (("train", task.train), ("test", task.test)):
        found[name], covered = _of_samples(samples)
        if covered is not None:
            found[f"{name}_covers"] = covered
    held = [cell.cell_contents for cell in getattr(task.prepare, "__closure__", None) or ()]
    if tensors := [one for one in held if isinstance(one, Tensor)]:
        found["prepare"] = _of_tensors(tensors)[0]  # such as a text, of which the samples are only positions
    return found


def _of_samples(samples: Samples | StreamSamples) -> Sum:
    if isinstance(samples, StreamSamples):
        raise UsageError("they are read from their start, by the workers only")
    # a tensor counts how often it was written: changed data are hashed again
    state = samples.length, [one._version for one in samples.in_memory or ()]
    known = _known.get(samples)
    if known is None or known[0] != state or samples.in_memory is None:
        given = samples.in_memory
        total = _taken(samples) if given is None else _of_tensors([one[: samples.length] for one in given])
        known = _known[samples] = state, total
    return known[1]


def _taken(samples: Samples) -> Sum:
    """The hash of evenly spread samples. A copy is read: files that it opens must not reach forks."""
    places = np.unique(np.linspace(0, samples.length - 1, TAKEN).astype(np.int64))
    asked = copy.copy(samples)
    asked.data = copy.copy(samples.data)
    before = np.random.get_state()
    try:
        with seeded(0):
            total, _ = _of_tensors(list(tensors_in(asked.take(places))))
    finally:
        np.random.set_state(before)
    return total, f"{len(places):,} of {samples.length:,} samples"


def _of_tensors(tensors: Sequence[Tensor]) -> Sum:
    total, covered = hashlib.sha256(), None
    for one in tensors:
        total.update(json.dumps([str(one.dtype), list(one.shape)]).encode())
        if one.numel() * one.element_size() > WHOLE and len(one) > ROWS:
            covered = f"{ROWS:,} of {len(one):,} samples"
            one = one[torch.linspace(0, len(one) - 1, ROWS, dtype=torch.float64).long()]
        # numpy lacks some dtypes: hash the bytes
        total.update(one.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest(), covered


def _of_values(task: Task) -> dict[str, Any]:
    """The hash of a task that is no module: of its public numbers and tensors."""
    total = hashlib.sha256()
    for name, value in sorted(vars(task).items()):
        if name not in SETTINGS and not name.startswith("_"):
            for part in _bytes(name, value):
                total.update(part)
    return {"values": total.hexdigest()}


def _bytes(name: str, value: Any) -> Iterator[bytes]:
    yield f"{name}:{type(value).__name__}:".encode()
    if isinstance(value, Tensor):
        yield _of_tensors([value])[0].encode()
    elif isinstance(value, list | tuple):
        for number, one in enumerate(value):
            yield from _bytes(str(number), one)
    elif isinstance(value, dict):
        for key, one in sorted(value.items(), key=lambda item: str(item[0])):
            yield from _bytes(str(key), one)
    elif isinstance(value, str | int | float | torch.dtype | None):
        yield repr(value).encode()
    else:
        raise UsageError(f"its {name!r} is a {type(value).__name__}, which is neither numbers nor tensors")
