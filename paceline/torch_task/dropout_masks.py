"""The masks of dropout as inputs of a model: drawn from a batch's seed as the model itself would draw them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from paceline.errors import RunError
from paceline.torch_task.random_numbers import seeded


@dataclass(frozen=True)
class DropoutCall:
    """One call of dropout during a forward pass."""

    p: float
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    def mask(self) -> Tensor:
        """What dropout multiplies its input with."""
        return functional.dropout(torch.ones(self.shape, dtype=self.dtype, device=self.device), self.p)


class _DropoutMode(TorchFunctionMode):
    """Gives the calls of dropout that take effect to `called`."""

    def __init__(self, called: Callable[[Tensor, float], Tensor | None]) -> None:
        super().__init__()
        self._called = called

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is functional.dropout:
            given = dict(zip(("input", "p", "training"), args, strict=False)) | kwargs
            p = float(given.get("p", 0.5))
            if given.get("training", True) and p > 0 and (result := self._called(given["input"], p)) is not None:
                return result
        return function(*args, **kwargs)


class RecordedDropout(_DropoutMode):
    """Inside, calls of dropout are noted in `calls`."""

    def __init__(self) -> None:
        super().__init__(self._note)
        self.calls: list[DropoutCall] = []

    def _note(self, given: Tensor, p: float) -> None:
        self.calls.append(DropoutCall(p, given.shape, given.dtype, given.device))


class GivenMasks(_DropoutMode):
    """Inside, calls of dropout multiply with these masks in turn."""

    def __init__(self, masks: Sequence[Tensor]) -> None:
        super().__init__(self._multiply)
        self._masks = iter(masks)

    def _multiply(self, given: Tensor, p: float) -> Tensor:
        mask = next(self._masks, None)
        if mask is None:
            raise RunError("the model calls dropout more often than for the first batch: run it without batched")
        return given * mask


def masks_of(calls: Sequence[DropoutCall], seeds: Iterable[int]) -> tuple[Tensor, ...]:
    """The masks of each call, stacked over the batches with these seeds."""
    if not calls:
        return ()
    generators = [torch.default_generator]
    devices = {call.device for call in calls}
    generators += [torch.cuda.default_generators[device.index or 0] for device in devices if device.type == "cuda"]
    rows = []
    with seeded(0):
        for seed in seeds:
            for generator in generators:
                generator.manual_seed(seed)
            rows.append([call.mask() for call in calls])
    return tuple(torch.stack(column) for column in zip(*rows, strict=True))
