"""Losses and metrics of a model's output."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from paceline.errors import UsageError


def accuracy(output: Tensor, target: Tensor) -> float:
    """The share of samples whose largest output is the target; the classes are the last dimension."""
    return (output.argmax(-1) == target).double().mean().item()


def checked_loss(loss: Any, *, trains: bool) -> Tensor:
    """The loss; UsageError unless it is one number, which depends on the weights if it `trains`."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        found = type(loss).__name__ + (f" of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else "")
        raise UsageError(f"the loss must be a tensor of one number, the mean over the samples, not a {found}")
    if trains and not loss.requires_grad:
        raise UsageError("the loss does not depend on the model's weights: autograd cannot follow it")
    return loss


def own_loss(output: Any) -> Any:
    """The loss that a model gives itself: `.loss`, the key "loss", a tensor, or the only single number of a tuple."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping) and "loss" in output:
        return output["loss"]
    if getattr(output, "loss", None) is not None:
        return output.loss
    if isinstance(output, tuple | list):
        single = [one for one in output if isinstance(one, Tensor) and one.dim() == 0]
        if len(single) == 1:
            return single[0]
    raise UsageError(
        f"the model gives a {type(output).__name__} without a loss: give a loss function, or let the model return "
        "its loss (a tensor, `.loss`, or the key 'loss')"
    )
