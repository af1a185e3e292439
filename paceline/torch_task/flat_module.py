"""A module whose trainable parameters are one flat vector."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from paceline.errors import UsageError
from paceline.state import Vector
from paceline.torch_task.backward_progress import BackwardProgress

REMEMBERED = 2  # vectors of gradients whose views are cached


def complete(module: Any) -> nn.Module:
    """The module; UsageError if it is none, or has weights without a size."""
    if not isinstance(module, nn.Module):
        raise UsageError(f"model must be a torch.nn.Module or a function that builds one, not {module!r}")
    lazy = [name for name, one in (*module.named_parameters(), *module.named_buffers()) if is_lazy(one)]
    if lazy:
        raise UsageError(
            f"{type(module).__name__} has weights without a size yet ({', '.join(lazy)}): "
            "run the model once on a batch first, or use layers with given sizes"
        )
    return module


class FlatModule:
    """A module whose trainable parameters and gradients are views of flat vectors: nothing is copied.

    Tied parameters are in the vector once; frozen ones (`requires_grad=False`) stay in the module. Persistent buffers
    are bound by name.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = complete(module)
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        kinds = {(p.dtype, p.device) for p in self.parameters}
        if not kinds:
            raise UsageError(f"{type(module).__name__} has no trainable parameters: nothing to train")
        if len(kinds) > 1:
            found = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds))
            raise UsageError(
                f"{type(module).__name__} mixes parameters of {found}; one flat vector needs one kind: "
                f"convert the model, or pass dtype="
            )
        self.sizes = [p.numel() for p in self.parameters]
        self.size = sum(self.sizes)
        self._bound: tuple[int, ...] | None = None
        self._released: tuple[int, ...] | None = None  # what was bound before the gradients were released
        self._places: dict[tuple[int, int, torch.dtype], list[Tensor]] = {}
        self._in_place: list[tuple[Tensor, int]] = []  # the views of the gradient that is bound, and their addresses
        self._progress: BackwardProgress | None = None
        saved = module.state_dict(keep_vars=True).keys()
        self._slots = {
            name: (module.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2])
            for name, _ in module.named_buffers()
            if name in saved
        }

    def named(self) -> list[tuple[str, list[int]]]:
        """Names and shapes of the parameters, in the order of the vector."""
        names = {id(parameter): name for name, parameter in self.module.named_parameters()}
        return [(names[id(parameter)], list(parameter.shape)) for parameter in self.parameters]

    def vector(self) -> Vector:
        """The present weights as a new vector."""
        return torch.cat([p.detach().reshape(-1) for p in self.parameters])

    def buffers(self) -> dict[str, Tensor]:
        """The present buffers by name, not copied."""
        return {name: owner._buffers[key] for name, (owner, key) in self._slots.items()}  # type: ignore[misc]

    def bind(self, x: Vector, out: Vector) -> None:
        """Make the parameters views of x and their gradients views of out; nearly free if they already are."""
        places = (x.data_ptr(), x.numel(), out.data_ptr(), out.numel())
        bound = self._bound
        if places == bound:  # the views keep that memory alive, so it is the same vector
            return
        self._bound = None
        if bound is None or places[:2] != bound[:2]:
            self._check(x, "x")
            for parameter, weight in zip(self.parameters, self._cut(x), strict=True):
                parameter.grad = None  # torch would compare it with the new data
                parameter.data = weight
            bound = None
        if bound is None or places[2:] != bound[2:]:
            views = self._grads(out)
            for parameter, grad in zip(self.parameters, views, strict=True):
                parameter.grad = grad
            self._in_place = [(view, view.data_ptr()) for view in views]
        self._bound = places

    def release_gradients(self) -> None:
        """Let autograd give each parameter a gradient of its own in the next backward pass, which it need not add to
        zeros. `take_gradients` puts them where they belong."""
        self._released, self._bound = self._bound, None
        for parameter in self.parameters:
            parameter.grad = None

    def take_gradients(self, out: Vector) -> None:
        """Copy the gradients of a backward pass into `out`, and bind it again."""
        views, given, missing = self._grads(out), list[Tensor](), list[Tensor]()
        places: list[Tensor] = []
        for parameter, view in zip(self.parameters, views, strict=True):
            if parameter.grad is None:
                missing.append(view)
            else:
                places.append(view)
                given.append(parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad)
            parameter.grad = view
        if places:
            torch._foreach_copy_(places, given)
        if missing:
            torch._foreach_zero_(missing)
        self._in_place = [(view, view.data_ptr()) for view in views]
        self._bound = self._released

    def gradients_in_place(self) -> bool:
        """Whether the gradients are still where `bind` put them: nobody has replaced or freed one."""
        for parameter, (view, place) in zip(self.parameters, self._in_place, strict=True):
            if parameter.grad is not view or view.data_ptr() != place:
                return False
        return True

    def progress(self) -> BackwardProgress:
        """What tells how far the gradient of a backward pass is."""
        if self._progress is None:
            self._progress = BackwardProgress(self.parameters)
        return self._progress

    def _cut(self, vector: Vector) -> list[Tensor]:
        parts = torch.split_with_sizes(vector.detach(), self.sizes)
        return [part.view(parameter.shape) for part, parameter in zip(parts, self.parameters, strict=True)]

    def _grads(self, out: Vector) -> list[Tensor]:
        """The views of a gradient vector, cached: gradients are written to a few vectors in turn."""
        key = (out.data_ptr(), out.numel(), out.dtype)
        views = self._places.get(key)
        if views is None:
            self._check(out, "out")
            if len(self._places) >= REMEMBERED:
                del self._places[next(iter(self._places))]
            views = self._places[key] = self._cut(out)
        return views

    def bind_buffers(self, buffers: Mapping[str, Tensor]) -> None:
        """Make the module read and update these tensors."""
        if buffers.keys() != self._slots.keys():
            raise UsageError(f"buffers must be {sorted(self._slots)}, not {sorted(buffers)}")
        for name, (owner, key) in self._slots.items():
            owner._buffers[key] = buffers[name]

    def keep_buffers(self, buffers: Mapping[str, Tensor]) -> None:
        """Copy buffers that the module has replaced, instead of changed in place, into the bound tensors."""
        for name, (owner, key) in self._slots.items():
            held = owner._buffers[key]
            if held is not buffers[name] and held is not None:
                buffers[name].copy_(held)

    def _check(self, vector: Vector, what: str) -> None:
        like = self.parameters[0]
        if vector.shape != (self.size,) or vector.dtype != like.dtype or not vector.is_contiguous():
            raise UsageError(
                f"{what} must be a contiguous vector of {self.size} {like.dtype} numbers, "
                f"not {vector.dtype} of shape {tuple(vector.shape)}"
            )


class Originals:
    """Where the parameters of a model that was copied are in the vector: an optimizer may be made of them. Other
    processes, to which a task is pickled, do not have that model."""

    def __init__(self, parameters: Iterable[nn.Parameter] = ()) -> None:
        self._places = WeakIdKeyDictionary()
        for place, parameter in enumerate(one for one in parameters if one.requires_grad):
            self._places[parameter] = place

    def place(self, parameter: Tensor) -> int | None:
        found: int | None = self._places.get(parameter)  # type: ignore[no-untyped-call]
        return found

    def __reduce__(self) -> Any:
        return Originals, ()
