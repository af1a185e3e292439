"""How far the gradient of a backward pass is: autograd computes it from the last layer to the first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate

from torch import Tensor, nn

from paceline.state import Vector
from paceline.task import GradientStopped

Final = Callable[[int, int], None]


def stopping(useless: Callable[[], bool]) -> Final:
    """What gives a gradient up as soon as it is useless, at any progress of its backward pass."""

    def check(_: int, __: int) -> None:
        if useless():
            raise GradientStopped

    return check


class BackwardProgress:
    """Tells from which index on the flat gradient is final. Autograd writes each parameter's part once; if anything
    else writes to the gradient, its count of writes differs, and what was told is taken back."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._starts = [0, *accumulate(parameter.numel() for parameter in parameters)]
        self._done = [False] * len(parameters)
        self._open = 0  # the parameters before this one are not final
        self._writes = 0
        self._out: Vector | None = None
        self._final: Final | None = None
        for number, parameter in enumerate(parameters):
            parameter.register_post_accumulate_grad_hook(partial(self._written, number))  # type: ignore[no-untyped-call]

    def begin(self, out: Vector, final: Final) -> None:
        """A backward pass begins, into `out`."""
        self._done = [False] * len(self._done)
        self._open, self._writes, self._out, self._final = len(self._done), out._version, out, final

    def abandon(self) -> None:
        """The pass was given up: nothing is told any more."""
        self._out = self._final = None

    def end(self) -> None:
        """The pass is over: parameters without a gradient are final too."""
        out, final = self._out, self._final
        self._out = self._final = None
        if out is not None and final is not None:
            final(0 if out._version == self._writes else -1, out._version)

    def _written(self, number: int, _: Tensor) -> None:
        if self._final is None or self._out is None:
            return
        self._writes += 1
        version = self._out._version
        if self._done[number] or version != self._writes:  # a second write, or one of somebody else
            self._final(-1, version)
            self._out = self._final = None
            return
        self._done[number] = True
        if number == self._open - 1:
            while self._open and self._done[self._open - 1]:
                self._open -= 1
            self._final(self._starts[self._open], version)
