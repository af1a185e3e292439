"""Convolutions as products of matrices: the values and gradients of torch's own, alone and under vmap."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from paceline.torch_task import stacked_convolutions
from paceline.torch_task.stacked_convolutions import PATCH, PatchConvolutions

SMALL = [
    {"in_channels": 1, "kernel_size": 5, "padding": 2},
    {"in_channels": 3, "kernel_size": 3, "stride": 2},
    {"in_channels": 2, "kernel_size": (3, 4), "stride": (2, 1), "padding": (1, 2), "bias": False},
]
LIBRARY = [
    {"in_channels": PATCH, "kernel_size": 3},
    {"in_channels": 4, "kernel_size": 3, "groups": 2},
    {"in_channels": 2, "kernel_size": 3, "dilation": 2},
    {"in_channels": 2, "kernel_size": 3, "padding": "same"},
]


def gradients(layer: nn.Conv2d, x: Tensor, mode: Any) -> tuple[Any, Tensor]:
    """Gradients of four models' parameters and inputs by vmap, and the losses."""
    weights = {name: torch.stack([one * (k + 1) for k in range(4)]) for name, one in layer.named_parameters()}

    def loss(own: dict[str, Tensor], given: Tensor) -> Tensor:
        with mode():
            return functional_call(layer, own, (given,)).pow(2).sum()

    found: tuple[Any, Tensor] = vmap(grad_and_value(loss, argnums=(0, 1)))(
        {name: one.detach() for name, one in weights.items()}, x
    )
    return found


class Nothing:
    def __enter__(self) -> None: ...
    def __exit__(self, *error: object) -> None: ...


@pytest.mark.parametrize("options", SMALL + LIBRARY)
def test_gradients_under_vmap_are_those_of_the_library(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(3)
    layer = nn.Conv2d(out_channels=4, **options).double()
    x = torch.randn(4, 3, options["in_channels"], 9, 8, dtype=torch.float64)
    calls = []
    apply = stacked_convolutions._Convolution.apply
    monkeypatch.setattr(stacked_convolutions._Convolution, "apply", lambda *a: (calls.append(1), apply(*a))[1])
    torch.testing.assert_close(gradients(layer, x, PatchConvolutions), gradients(layer, x, Nothing))
    assert len(calls) == (1 if options in SMALL else 0)


def test_precision_is_set_back() -> None:
    before = torch.backends.cuda.matmul.allow_tf32
    with PatchConvolutions():
        nn.Conv2d(1, 2, 3)(torch.randn(1, 1, 5, 5))
    assert torch.backends.cuda.matmul.allow_tf32 == before
