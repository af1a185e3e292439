"""Replace or extend mini-batches by a function of the user."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from paceline import user_code
from paceline.errors import UsageError
from paceline.hook import Session
from paceline.hooks._options import Checked
from paceline.task import Batch


@dataclass
class FeedFunction(Checked):
    """Calls `function(batch, session)` for every mini-batch; its result replaces the mini-batch, or is added to it.

    The function is named as file.py:NAME or package.module:NAME, or given as such from Python. It returns a tuple of
    tensors like batch.data, a Batch, or None to leave the mini-batch as it is. With `mode=add` its tensors are
    appended to those of the batch, sample by sample.
    """

    function: str | Callable[[Batch, Session], Any] = ""
    mode: Literal["replace", "add"] = "replace"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._resolved()  # a misspelt name is an error before anything starts

    def begin(self, session: Session) -> None:
        self._call = self._resolved()

    def feed(self, session: Session, batch: Batch) -> Batch:
        given = self._call(batch, session)
        if given is None:
            return batch
        if isinstance(given, Batch):
            if self.mode == "replace":
                return given
            given = given.data
        if isinstance(given, Mapping) or any(isinstance(part, Mapping) for part in batch.data):
            return self._named(given, batch)
        tensors = self._checked(given)
        if self.mode == "replace":
            return replace(batch, data=tensors, size=_rows(tensors, batch.size))
        pairs = list(zip(batch.data, tensors, strict=False))
        if len(tensors) != len(batch.data) or any(old.shape[1:] != new.shape[1:] for old, new in pairs):
            raise UsageError(
                f"{self.name}: tensors of shape {_shapes(tensors)} cannot be added to a mini-batch of "
                f"{_shapes(batch.data)}; give as many, equal in all dimensions but the first"
            )
        data = tuple(torch.cat((old, new)) for old, new in pairs)
        return replace(batch, data=data, size=batch.size + _rows(tensors, 0))

    def _named(self, given: Any, batch: Batch) -> Batch:
        """A batch that is a dictionary is replaced as a whole."""
        if self.mode == "add" or not isinstance(given, Mapping):
            raise UsageError(
                f"{self.name}: the mini-batch is a dictionary, or shall become one: let the function give a dictionary "
                "(or a Batch), with mode=replace"
            )
        tensors = tuple(one for one in given.values() if isinstance(one, Tensor))
        return replace(batch, data=(dict(given),), size=_rows(tensors, batch.size))

    def _checked(self, given: Any) -> tuple[Tensor, ...]:
        tensors = (given,) if isinstance(given, Tensor) else given
        if not isinstance(tensors, tuple | list) or not all(isinstance(one, Tensor) for one in tensors):
            raise UsageError(
                f"{self.name}: the function gave a {type(given).__name__}; "
                "it must give a tuple of tensors, a paceline Batch, or None"
            )
        if len({len(one) for one in tensors if one.dim()}) > 1:
            raise UsageError(f"{self.name}: the function gave tensors of unequal length: {_shapes(tensors)}")
        return tuple(tensors)

    def _resolved(self) -> Callable[[Batch, Session], Any]:
        given = self.function
        return user_code.function(f"function of {self.name}", given) if isinstance(given, str) else given


def _rows(tensors: tuple[Tensor, ...], otherwise: int) -> int:
    return next((len(one) for one in tensors if one.dim()), otherwise)


def _shapes(tensors: tuple[Tensor, ...] | list[Tensor]) -> str:
    return ", ".join(str(tuple(one.shape)) for one in tensors) or "no tensors"
