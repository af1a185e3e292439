"""Convolutions of many models at once, as products of matrices where grouped convolutions are slow.

vmap makes one convolution with a group per model of the convolutions of many models. For few input channels, such as
those of an image, that is slower than a product of two matrices: of the kernel and the patches of the input, and for
the kernel's gradient, of the output's gradient and those patches.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional, grad
from torch.overrides import TorchFunctionMode

PATCH = 128  # numbers in a patch: with more of them, copying patches costs more than it saves

Pair = tuple[int, int]


class PatchConvolutions(TorchFunctionMode):
    """Inside, 2-D convolutions of small patches are products of matrices."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is functional.conv2d or function is torch.conv2d:
            given = dict(zip(_NAMES, args, strict=False)) | kwargs
            if (result := _by_patches(**given)) is not None:
                return result
        return function(*args, **kwargs)


_NAMES = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")


def _by_patches(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Pair = 1,
    padding: int | Pair | str = 0,
    dilation: int | Pair = 1,
    groups: int = 1,
) -> Tensor | None:
    """The convolution, or None where the library's own is to be taken."""
    small = weight[0].numel() <= PATCH
    if not small or isinstance(padding, str) or _pair(dilation) != (1, 1) or groups != 1 or input.dim() != 4:
        return None
    out: Tensor = _Convolution.apply(  # type: ignore[no-untyped-call]
        input, weight, _pair(stride), _pair(padding)
    )
    return out if bias is None else out + bias[:, None, None]


class _Convolution(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, kernel: Tensor, stride: Pair, padding: Pair) -> Tensor:
        patches = _patches(x, kernel, stride, padding)
        count, _, high, wide = patches.shape[:4]
        rows = patches.permute(0, 2, 3, 1, 4, 5).reshape(count * high * wide, -1)
        with _precision_of_convolutions():
            out = kernel.flatten(1) @ rows.t()
        return out.view(-1, count, high, wide).transpose(0, 1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Pair, Pair], output: Tensor) -> None:
        x, kernel, ctx.stride, ctx.padding = inputs
        ctx.save_for_backward(x, kernel)

    @staticmethod
    def backward(ctx: Any, given: Tensor) -> tuple[Tensor | None, Tensor, None, None]:
        x, kernel = ctx.saved_tensors
        down = None
        if ctx.needs_input_grad[0]:
            down = grad.conv2d_input(x.shape, kernel, given, ctx.stride, ctx.padding)  # type: ignore[no-untyped-call]
        patches = _patches(x, kernel, ctx.stride, ctx.padding)
        with _precision_of_convolutions():
            found = torch.einsum("bohw,bchwij->ocij", given, patches)
        return down, found, None, None


def _patches(x: Tensor, kernel: Tensor, stride: Pair, padding: Pair) -> Tensor:
    """The part of the input that each number of the output is made of: (samples, channels, rows, columns, kernel)."""
    up, left = padding
    padded = functional.pad(x, (left, left, up, up))
    return padded.unfold(2, kernel.shape[2], stride[0]).unfold(3, kernel.shape[3], stride[1])


@contextmanager
def _precision_of_convolutions() -> Iterator[None]:
    """Products of matrices are as precise on a GPU as convolutions are."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def _pair(value: int | Pair | list[int]) -> Pair:
    return (value, value) if isinstance(value, int) else (value[0], value[1] if len(value) > 1 else value[0])
