"""Data of Keras and TensorFlow as tensors of torch: a `keras.utils.PyDataset` or a `tf.data.Dataset` gives whole
batches, and is read from its start; so is what a function returns."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.errors import UsageError
from paceline.framework_tasks.framework_start import start_tensorflow


def taken(data: Any) -> Any:
    """The data as a task takes them: arrays of a framework become arrays of numpy, and sources of batches are
    converted where they are read."""
    if isinstance(data, tuple | list):
        return type(data)(_array(one) for one in data)
    if isinstance(data, Mapping):
        return {name: _array(one) for name, one in data.items()}
    if data is None or hasattr(data, "__next__"):  # an iterator is refused with a reason of its own
        return data
    if _is_py_dataset(data) or _is_tf_data(data) or (callable(data) and not hasattr(data, "__getitem__")):
        return ConvertedBatches(data)
    return data


class ConvertedBatches:
    """The batches of one epoch at a time."""

    def __init__(self, source: Any) -> None:
        self._source = source

    def __iter__(self) -> Iterator[Any]:
        source = self._source
        if "tensorflow" in sys.modules:
            tf = sys.modules["tensorflow"]
            start_tensorflow(tf)
            tf.random.set_seed(torch.initial_seed() & 0x7FFFFFFF)  # the reader has seeded torch for this epoch
        if callable(source) and not _is_py_dataset(source) and not _is_tf_data(source):
            source = source()
        if _is_py_dataset(source):
            for index in range(len(source)):
                yield _converted(source[index])
            source.on_epoch_end()
            return
        for batch in source:
            yield _converted(batch)


def _is_py_dataset(data: Any) -> bool:
    return any(cls.__name__ == "PyDataset" and cls.__module__.startswith("keras") for cls in type(data).__mro__)


def _is_tf_data(data: Any) -> bool:
    return any(cls.__module__.startswith("tensorflow.python.data") for cls in type(data).__mro__)


def _converted(batch: Any) -> Any:
    """A batch as a tuple or dictionary of tensors; nested inputs are listed one after another."""
    if isinstance(batch, Mapping):
        return {name: _tensor(one) for name, one in batch.items()}
    parts = batch if isinstance(batch, tuple | list) else (batch,)
    listed: list[Any] = []
    for part in parts:
        if isinstance(part, Mapping):
            raise UsageError("a batch of named inputs and a target cannot be taken: give the inputs as a tuple")
        listed += part if isinstance(part, tuple | list) else [part]
    return tuple(_tensor(one) for one in listed)


def _tensor(one: Any) -> Tensor:
    array = np.asarray(one)
    wider = {"uint16": np.int64, "uint32": np.int64, "uint64": np.int64}.get(array.dtype.name, array.dtype)
    return one if isinstance(one, Tensor) else torch.from_numpy(np.array(array, wider))


def _array(one: Any) -> Any:
    module = type(one).__module__
    return np.asarray(one) if module.startswith(("jax", "tensorflow")) and hasattr(one, "shape") else one
