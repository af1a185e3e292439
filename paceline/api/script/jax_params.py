"""The parameters of a JAX script, a pytree of arrays: copied from the run's vector, and their gradients into it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from paceline.api.script.numpy_views import array_of, copy_into, numbers_of
from paceline.api.script.script_task import Evaluate, ScriptTask
from paceline.errors import UsageError
from paceline.state import Vector


def path_name(path: Any) -> str:
    """The name of a leaf: `layers.0.kernel`."""
    keys = (getattr(key, "key", getattr(key, "idx", getattr(key, "name", key))) for key in path)
    return ".".join(str(key) for key in keys)


class FlatTree:
    """The leaves of a pytree in one vector. Arrays of JAX do not change: every vector gives a new tree."""

    def __init__(self, tree: Any) -> None:
        import jax  # of the script, which has loaded it

        self._jax = jax
        found, self.structure = jax.tree_util.tree_flatten_with_path(tree)
        if not found:
            raise UsageError("attach() was given a pytree without arrays: nothing to train")
        for path, leaf in found:
            if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
                raise UsageError(
                    f"the pytree's leaf {path_name(path) or 'at its top'} is a {type(leaf).__name__}, not an array: "
                    "attach only what is trained (Equinox: eqx.partition(model, eqx.is_array); Flax: nnx.split)"
                )
        self.names = [path_name(path) or "params" for path, _ in found]
        leaves = [jax.numpy.asarray(leaf) for _, leaf in found]  # arrays of numpy too, with the precision that JAX has
        kinds = [(name, str(leaf.dtype)) for name, leaf in zip(self.names, leaves, strict=True)]
        self.dtype = numbers_of(kinds, "the pytree")
        self._kind = leaves[0].dtype
        self.shapes = [tuple(leaf.shape) for leaf in leaves]
        self.sizes = [leaf.size for leaf in leaves]
        self.size = sum(self.sizes)
        devices = {device for leaf in leaves for device in leaf.devices()}
        if len(devices) > 1:
            raise UsageError(
                f"the pytree's arrays are on {len(devices)} devices; a worker trains on one: start a worker for each "
                "device, with one visible to it (CUDA_VISIBLE_DEVICES)"
            )
        (self._device,) = devices
        self._flatten = jax.jit(lambda leaves: jax.numpy.concatenate([leaf.reshape(-1) for leaf in leaves]))
        self._cut = jax.jit(self._pieces)

    def named(self) -> list[tuple[str, list[int]]]:
        """Names and shapes of the leaves, in the order of the vector."""
        return [(name, list(shape)) for name, shape in zip(self.names, self.shapes, strict=True)]

    def write(self, tree: Any, out: Vector) -> None:
        """Copy a tree of the same structure into a vector; UsageError for another one."""
        jax = self._jax
        found, structure = jax.tree_util.tree_flatten_with_path(tree)
        if structure != self.structure:
            raise UsageError(self._other_structure(found, structure))
        for name, shape, (_, leaf) in zip(self.names, self.shapes, found, strict=True):
            if tuple(getattr(leaf, "shape", ())) != shape:
                raise UsageError(f"the gradient of {name} has the shape {getattr(leaf, 'shape', ())}, not {shape}")
        flat = self._flatten([leaf for _, leaf in found])
        if flat.dtype != self._kind:
            raise UsageError(f"the gradients are of {flat.dtype}, the parameters of {self._kind}")
        copy_into(out, 0, jax.device_get(flat))

    def read(self, x: Vector) -> Any:
        """The vector as a tree of new arrays."""
        # a copy of its own: JAX may use the memory of an array that it is given
        flat = self._jax.device_put(array_of(x, self._kind).copy(), self._device)
        return self._jax.tree_util.tree_unflatten(self.structure, self._cut(flat))

    def _pieces(self, flat: Any) -> list[Any]:
        pieces, first = [], 0
        for size, shape in zip(self.sizes, self.shapes, strict=True):
            pieces.append(flat[first : first + size].reshape(shape))
            first += size
        return pieces

    def _other_structure(self, found: Any, structure: Any) -> str:
        names = [path_name(path) or "params" for path, _ in found]
        missing = [name for name in self.names if name not in names]
        unknown = [name for name in names if name not in self.names]
        told = [
            *([f"without {', '.join(missing[:3])}"] if missing else []),
            *([f"with {', '.join(unknown[:3])}"] if unknown else []),
        ] or [f"{structure} in place of {self.structure}"]
        return (
            f"step() was given a pytree of another structure than the parameters: {' and '.join(told)}. Pass the "
            "gradients as jax.grad gives them for pace.params"
        )


class JaxParams(ScriptTask):
    """The parameters of a JAX script."""

    def __init__(self, tree: Any, evaluate: Evaluate | None, name: str) -> None:
        super().__init__(evaluate, name)
        self.flat = FlatTree(tree)
        self._first = torch.empty(self.flat.size, dtype=self.flat.dtype)
        self.flat.write(tree, self._first)
        self.params = tree  # at which the next gradient is wanted; after the run, the final ones

    def start(self, seed: int) -> Vector:
        return self._first.clone()

    def parameters(self) -> list[tuple[str, list[int]]]:
        return self.flat.named()

    @contextmanager
    def standing_at(self, x: Vector, buffers: Mapping[str, Tensor] | None) -> Iterator[Any]:
        yield self.flat.read(x)

    def settle(self, buffers: dict[str, Tensor]) -> None:
        pass  # a pytree has no buffers

    def bind(self, x: Vector, out: Vector) -> None:
        self.params = self.flat.read(x)

    def let_go(self, x: Vector | None = None, buffers: Mapping[str, Tensor] | None = None) -> None:
        if x is not None:
            self.params = self.flat.read(x)
