"""Optimizers of torch.optim and of other libraries on a flat vector, with their state in named cells.

An optimizer runs on views of the vector that have the shapes of the parameters. What it keeps is found by trying it on
a copy: tensors like the parameters become vectors (and are sharded with x), numbers of all parameters one column, all
else is stored end to end. The optimizer's own state tensors are views of the cells.
"""

from __future__ import annotations

import inspect
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline import user_code
from paceline.errors import UsageError
from paceline.state import Vector

Shapes = tuple[tuple[int, ...], ...]
Options = tuple[tuple[str, Any], ...]
NO_OPTIONS = {"params", "param_names", "initial_lr"}  # of a group: what is no option of its optimizer


class ParameterGroup(NamedTuple):
    """Parameters that one optimizer treats alike. `parameters` are places in the list of shapes; None means all."""

    path: str  # "torch.optim:AdamW", "package.module:Class", "file.py:Class"
    options: Options = ()
    parameters: tuple[int, ...] | None = None

    @classmethod
    def read(cls, text: str) -> tuple[ParameterGroup, ...]:
        """Groups from JSON."""
        found = []
        for one in json.loads(text):
            path, places = one.pop("optimizer"), one.pop("parameters")
            found.append(cls(path, tuple((key, frozen(value)) for key, value in one.items()), tuple(places)))
        return tuple(found)


def frozen(value: Any) -> Any:
    """Plain data as torch takes it: JSON has no tuples."""
    return tuple(frozen(item) for item in value) if isinstance(value, list | tuple) else value


def written(groups: Sequence[ParameterGroup]) -> str:
    """Groups as JSON."""
    return json.dumps([{"optimizer": g.path, "parameters": g.parameters, **dict(g.options)} for g in groups])


@cache
def optimizer_class(path: str) -> type[Optimizer]:
    """An optimizer by `package.module:Class` or `file.py:Class`."""
    found: Any = user_code.function("optimizer", path)
    if not (inspect.isclass(found) and issubclass(found, Optimizer)):
        raise UsageError(f"{path!r} is no optimizer: it must name a subclass of torch.optim.Optimizer")
    return found


def path_of(cls: type) -> str:
    """The path by which every process can find a class of optimizers or schedulers."""
    home, name = cls.__module__, cls.__qualname__
    if getattr(torch.optim, name, None) is cls:
        return f"torch.optim:{name}"
    if home == "__main__" or "<locals>" in name:
        raise UsageError(
            f"other processes cannot find {name}, which is defined in the program itself: put the class into a file of "
            "its own and import it"
        )
    # a module without a package is a file of the program's folder
    return f"{home}:{name}" if "." in home else f"{Path(inspect.getfile(cls)).resolve()}:{name}"


def label(path: str) -> str:
    """The name of an optimizer in cells."""
    return path.rpartition(":")[2].lower()


def made(groups: Sequence[ParameterGroup], tensors: Sequence[Tensor]) -> list[tuple[Optimizer, list[int]]]:
    """The optimizers of some groups over these parameters, each with the numbers of its groups."""
    found: list[tuple[Optimizer, list[int]]] = []
    for path in dict.fromkeys(group.path for group in groups):
        cls, numbers = optimizer_class(path), [n for n, group in enumerate(groups) if group.path == path]
        given = []
        for number in numbers:
            places = groups[number].parameters
            own = tensors if places is None else [tensors[place] for place in places]
            given.append({"params": list(own), **dict(groups[number].options)})
        needed = list(inspect.signature(cls).parameters.values())[1:]
        known = {"lr": 1e-3} | given[0]  # each step sets the rate
        plain = [one.name for one in needed if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD]
        required = {name: known[name] for name in plain if name in known}
        try:
            found.append((cls(given, **required), numbers))
        except (TypeError, ValueError, KeyError, RuntimeError) as error:
            raise UsageError(f"the optimizer {label(path)} cannot be made: {error}") from error
    return found


def stepped(optimizer: Optimizer) -> None:
    try:
        optimizer.step()
    except (TypeError, RuntimeError, ValueError, ArithmeticError, LookupError, AssertionError) as error:
        name = type(optimizer).__name__
        raise UsageError(f"{name} cannot make a step from gradients alone: {error}") from error


class StateKind(NamedTuple):
    """One thing that an optimizer keeps of a parameter: a tensor, or a number of Python."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str
    number: type | None


@dataclass(frozen=True)
class StateLayout:
    """What the optimizers of some groups keep. `kinds`: name -> number | like | other; `grouped`: (group, key)."""

    per_parameter: tuple[dict[str, StateKind], ...]
    kinds: dict[str, str]
    grouped: tuple[tuple[int, str, type], ...]


@cache
def layout_of(groups: tuple[ParameterGroup, ...], shapes: Shapes, dtype: torch.dtype, device: str) -> StateLayout:
    """Found by two steps on random numbers."""
    generator = torch.Generator().manual_seed(0)
    tensors = [nn.Parameter(torch.rand(shape, generator=generator).to(device, dtype)) for shape in shapes]
    optimizers = made(groups, tensors)
    before = [dict(group) for group in _groups_in_order(optimizers, len(groups))]
    found: list[dict[str, StateKind]] = []
    for turn in range(2):
        for tensor in tensors:
            tensor.grad = torch.rand(tensor.shape, generator=generator).to(device, dtype)
        for optimizer, _ in optimizers:
            stepped(optimizer)
        states: list[dict[str, Any]] = [next((o.state[t] for o, _ in optimizers if t in o.state), {}) for t in tensors]
        now = [{name: _kept(name, value) for name, value in state.items() if value is not None} for state in states]
        if turn and now != found:
            raise UsageError("the optimizer keeps other things after its second step than after its first")
        found = now
    changed = []
    for number, (then, group) in enumerate(zip(before, _groups_in_order(optimizers, len(groups)), strict=True)):
        for key, value in group.items():
            if key != "params" and isinstance(value, int | float) and value != then.get(key):
                changed.append((number, key, type(value)))
    kinds: dict[str, str] = {}
    for name in dict.fromkeys(name for one in found for name in one):
        pairs = [(one[name], shape) for one, shape in zip(found, shapes, strict=True) if name in one]
        if len({kept.dtype for kept, _ in pairs}) > 1:
            raise UsageError(f"the optimizer keeps {name!r} in several types of numbers")
        if all(not kept.shape for kept, _ in pairs):
            kinds[name] = "number"
        elif all(kept.shape == shape and kept.dtype.is_floating_point for kept, shape in pairs):
            kinds[name] = "like"
        else:
            kinds[name] = "other"
    return StateLayout(tuple(found), kinds, tuple(changed))


def _groups_in_order(optimizers: Sequence[tuple[Optimizer, list[int]]], number: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [{}] * number
    for optimizer, numbers in optimizers:
        for place, group in zip(numbers, optimizer.param_groups, strict=True):
            found[place] = group
    return found


def _kept(name: str, value: Any) -> StateKind:
    if isinstance(value, Tensor):
        return StateKind(tuple(value.shape), value.dtype, value.device.type, None)
    if isinstance(value, int | float):
        return StateKind((), torch.float64 if isinstance(value, float) else torch.int64, "cpu", type(value))
    raise UsageError(f"the optimizer keeps {name!r}, a {type(value).__name__}: only tensors and numbers can be saved")


def cells_of(
    groups: tuple[ParameterGroup, ...], shapes: Shapes, x: Vector, *, separate: bool = False
) -> dict[str, Tensor]:
    """The cells of the optimizers at the start; names are without the rule's own. `separate`: optimizers are stepped in
    turns, so that each parameter has a first step of its own."""
    layout = layout_of(groups, shapes, x.dtype, x.device.type)
    cells: dict[str, Tensor] = {"begun": torch.zeros((), dtype=torch.int64)}
    if separate:
        if layout.grouped:
            raise UsageError("an optimizer that counts its steps in its groups cannot be stepped in turns with another")
        cells["begun_each"] = torch.zeros((len(shapes), 1), dtype=torch.int64)
    flat = list(itertools.chain.from_iterable((len(shape), *shape) for shape in shapes))
    cells["shapes"] = torch.tensor(flat, dtype=torch.int64)
    for name, kind in layout.kinds.items():
        kept = [one[name] for one in layout.per_parameter if name in one]
        if kind == "like":
            cells[name] = torch.zeros_like(x, dtype=kept[0].dtype)
        else:  # a column: never as long as x, which would shard it
            rows = len(shapes) if kind == "number" else sum(math.prod(one.shape) for one in kept)
            cells[name] = torch.zeros((rows, 1), dtype=kept[0].dtype)
    for number, key, sort in layout.grouped:
        cells[f"group{number}_{key}"] = torch.zeros((), dtype=torch.float64 if sort is float else torch.int64)
    return cells


def shapes_in(cell: Tensor) -> Shapes:
    """The shapes of the parameters, from the cell that holds them."""
    numbers, shapes, at = cell.tolist(), [], 0
    while at < len(numbers):
        shapes.append(tuple(numbers[at + 1 : at + 1 + numbers[at]]))
        at += 1 + numbers[at]
    return tuple(shapes)


class BoundOptimizers:
    """Optimizers over the cells of one state, which may be a shard: `first` is where it begins in the whole vector."""

    def __init__(self, groups: tuple[ParameterGroup, ...], x: Vector, cells: Mapping[str, Tensor], first: int) -> None:
        self._groups, self._x, self._cells = groups, x, cells
        self._begun_each = cells.get("begun_each")
        shapes = shapes_in(cells["shapes"])
        sizes = [math.prod(shape) for shape in shapes]
        whole = sum(sizes)
        if whole < first + x.numel():
            raise UsageError(f"the parameters have {whole} numbers, the vector {first + x.numel()}")
        self._layout = layout_of(groups, shapes, x.dtype, x.device.type)
        edges = [min(max(edge - first, 0), x.numel()) for edge in itertools.accumulate(sizes, initial=0)]
        self._ranges = list(itertools.pairwise(edges))
        complete = whole == x.numel()
        # in a shard every parameter has a piece, though it may be empty: its numbers (steps, …) are the same everywhere
        self._shapes = [shape if complete else (high - low,) for shape, (low, high) in self._pieces(shapes)]
        self._tensors = [nn.Parameter(x[low:high].view(shape)) for shape, (low, high) in self._pieces(self._shapes)]
        self._copies = any(not group.path.startswith("torch.optim:") for group in groups)
        self._views = self._bound_views()
        self._make()

    def _pieces(self, shapes: Sequence[tuple[int, ...]]) -> Any:
        return zip(shapes, self._ranges, strict=True)

    def _make(self) -> None:
        self._optimizers = made(self._groups, self._tensors)
        self.param_groups = _groups_in_order(self._optimizers, len(self._groups))
        self._own = [next((o for o, _ in self._optimizers if _has(o, tensor)), None) for tensor in self._tensors]
        if self._cells["begun"].item():
            self._adopt()

    def _bound_views(self) -> list[dict[str, Tensor]]:
        """What is kept of every parameter, as views of the cells."""
        views: list[dict[str, Tensor]] = []
        ends = dict.fromkeys(self._layout.kinds, 0)
        for place, (kept, (low, high)) in enumerate(zip(self._layout.per_parameter, self._ranges, strict=True)):
            views.append({})
            for name, one in kept.items():
                cell = self._cells[name]
                if self._layout.kinds[name] == "number":
                    views[-1][name] = cell[place, 0]
                elif self._layout.kinds[name] == "like":
                    views[-1][name] = cell[low:high].view(self._shapes[place])
                else:
                    size = math.prod(one.shape)
                    views[-1][name] = cell[ends[name] : ends[name] + size, 0].view(one.shape)
                    ends[name] += size
        return views

    def _adopt(self) -> None:
        """Give the optimizers the state in the cells: views of them, where their device and sort allow."""
        for tensor, own, views, kept in self._each(begun=True):
            if own is None:
                continue
            for name, view in views.items():
                one = kept[name]
                if one.number is not None:
                    own.state[tensor][name] = one.number(view.item())
                elif view.device.type != one.device:
                    own.state[tensor][name] = view.to(one.device, copy=True)
                elif own.state[tensor].get(name) is not view:
                    own.state[tensor][name] = view
        for number, key, sort in self._layout.grouped:
            self.param_groups[number][key] = sort(self._cells[f"group{number}_{key}"].item())

    def _keep(self) -> None:
        """Put what the optimizers keep outside the cells into them."""
        for tensor, own, views, _ in self._each(begun=True):
            if own is None:
                continue
            state = own.state[tensor]
            for name, view in views.items():
                value = state[name]
                if isinstance(value, Tensor):
                    if value is not view:
                        view.copy_(value)
                else:
                    view.fill_(value)
        for number, key, _ in self._layout.grouped:
            self._cells[f"group{number}_{key}"].fill_(self.param_groups[number][key])

    def _each(self, *, begun: bool) -> Any:
        """Parameters, and what is kept of them; `begun`: of those that have been stepped."""
        every = zip(self._tensors, self._own, self._views, self._layout.per_parameter, strict=True)
        if self._begun_each is None:
            return every
        return itertools.compress(every, (flag == begun for flag in self._begun_each[:, 0].bool().tolist()))

    def step(self, g: Vector, values: Sequence[Mapping[str, Any]]) -> None:
        """One step with a gradient; `values` are options of each group for this step."""
        begun = bool(self._cells["begun"].item())
        for tensor, own, _, _ in () if self._begun_each is None else self._each(begun=False):
            if own is not None:
                own.state.pop(tensor, None)  # the run has returned to before its first step
        if not begun and any(optimizer.state for optimizer, _ in self._optimizers):
            self._make()  # the run has returned to its beginning
        elif begun:
            self._adopt()
        for group, given in zip(self.param_groups, values, strict=True):
            group.update(given)
        g = g.clone() if self._copies else g
        for tensor, (low, high), shape in zip(self._tensors, self._ranges, self._shapes, strict=True):
            tensor.grad = g[low:high].view(shape)
        if self._begun_each is not None:
            for place, tensor in enumerate(self._tensors):
                if tensor.grad is not None and tensor.grad.any():
                    self._begun_each[place] = 1
                else:
                    tensor.grad = None  # of an optimizer that another step is for
        version = self._x._version
        for optimizer, _ in self._optimizers:
            stepped(optimizer)
        if self._x._version == version:  # fused optimizers do not count their changes
            self._x[:0].zero_()
        for tensor in self._tensors:
            tensor.grad = None
        self._keep()
        if not begun:
            self._cells["begun"].fill_(1)
            self._adopt()


def _has(optimizer: Optimizer, tensor: Tensor) -> bool:
    return any(tensor is one for group in optimizer.param_groups for one in group["params"])


@cache
def indivisible(groups: tuple[ParameterGroup, ...]) -> str | None:
    """Why the vector cannot be sharded under these optimizers; None if each number is treated by itself. Found by
    comparing steps on a matrix with steps on pieces of it."""
    for group in dict.fromkeys(ParameterGroup(one.path, one.options) for one in groups):
        name = optimizer_class(group.path).__name__
        if dict(group.options).get("fused"):
            return f"a fused {name} rounds the ends of a range otherwise than its middle"
        generator = torch.Generator().manual_seed(1)
        whole = nn.Parameter(torch.randn(37, 11, generator=generator))
        flat, cuts = whole.detach().clone().view(-1), ((0, 5), (5, 5), (5, 203), (203, 407))
        pieces = [nn.Parameter(flat[low:high]) for low, high in cuts]
        reason = f"{name} needs whole parameters, not ranges of them"
        try:
            ours, theirs = made([group], [whole]), made([group], pieces)
            for _ in range(5):
                g = torch.randn(37, 11, generator=generator)
                whole.grad = g.clone()
                for piece, (low, high) in zip(pieces, cuts, strict=True):
                    piece.grad = g.view(-1)[low:high].clone()
                stepped(ours[0][0])
                stepped(theirs[0][0])
        except UsageError:
            return reason
        if not torch.equal(whole.detach().view(-1), flat):
            return reason
    return None
