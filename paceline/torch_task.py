"""A task of a PyTorch model, a loss and data: what most users need."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any, Protocol, Self, cast, get_args

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.data import IterableDataset, TensorDataset, default_collate

from paceline.errors import UsageError
from paceline.fields import Feed
from paceline.sampling import Indices, Stream, sample_seed
from paceline.state import Vector
from paceline.task import Batch, BufferPolicy, Task

Loss = Callable[[Tensor, Tensor], Tensor]
Metric = Callable[[Tensor, Tensor], float]

REMEMBERED = 2  # vectors of gradients whose views are cached
EVALUATION_CHUNK = 500  # samples per forward pass of an evaluation: fast, and small enough for any memory


class MapDataset(Protocol):
    """Torch's map-style data set: a length, and samples by index."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draws torch's random numbers from `seed` inside; outside, those of the CPU continue as before. Costs 3 µs."""
    generator = torch.default_generator
    before = generator.get_state()
    generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(before)


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


def _complete(module: Any) -> nn.Module:
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
        self.module = _complete(module)
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
        self._places: dict[tuple[int, int, torch.dtype], list[Tensor]] = {}
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
            for parameter, grad in zip(self.parameters, self._grads(out), strict=True):
                parameter.grad = grad
        self._bound = places

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


class Samples:
    """Samples by index, from tensors or from a map-style data set."""

    def __init__(self, data: Sequence[Tensor] | MapDataset, what: str) -> None:
        if isinstance(data, TensorDataset):
            data = data.tensors
        self.tensors: tuple[Tensor, ...] | None = None
        if isinstance(data, (tuple, list)) and all(isinstance(t, Tensor) for t in data):
            if not all(t.dim() for t in data):
                raise UsageError(f"the {what} tensors must have a first dimension, the samples; one is a single number")
            lengths = [len(t) for t in data]
            if len(set(lengths)) > 1:
                raise UsageError(f"the {what} tensors must be equally long, not {lengths}")
            self.tensors = tuple(data)
            self.length = lengths[0] if lengths else 0
        elif isinstance(data, IterableDataset) or not all(hasattr(data, one) for one in ("__getitem__", "__len__")):
            raise UsageError(
                f"{what} must be a tuple of tensors or a data set with a length (__len__) and samples by index "
                f"(__getitem__), not {type(data).__name__}: batches are drawn by index"
            )
        else:
            self.length = len(data)
        if not self.length:
            raise UsageError(f"the {what} data set is empty")
        self.data = cast(MapDataset, data)

    def first(self, number: int) -> Samples:
        """The first `number` of these samples."""
        fewer = copy.copy(self)
        fewer.length = min(number, self.length)
        return fewer

    def take(self, indices: Indices) -> tuple[Tensor, ...]:
        if self.tensors is not None:
            places = torch.from_numpy(indices)
            return tuple(t.index_select(0, places) for t in self.tensors)
        return _tensors(default_collate([self.data[int(i)] for i in indices]))

    def chunks(self, size: int) -> Iterator[tuple[Tensor, ...]]:
        for first in range(0, self.length, size):
            last = min(first + size, self.length)
            if self.tensors is not None:
                yield tuple(t[first:last] for t in self.tensors)
            else:
                yield _tensors(default_collate([self.data[i] for i in range(first, last)]))


def _tensors(collated: Any) -> tuple[Tensor, ...]:
    parts = (collated,) if isinstance(collated, Tensor) else collated
    if isinstance(parts, (tuple, list)) and all(isinstance(part, Tensor) for part in parts):
        return tuple(parts)
    raise UsageError(f"a sample must be a tuple of tensors or numbers; collated it is {type(collated).__name__}")


class TorchTask(Task):
    """A model, a loss and data.

    model:   a module (start: its present weights; it is copied, yours stays as it is), or a function that
             builds one (start(seed): built under that seed; frozen weights and buffers are those of seed 0);
    loss:    of (output, target), a mean over the samples. A batch (a, b, …, target) gives model(a, b, …);
    train, test: a tuple of equally long tensors, or a map-style data set; without test, evaluated on train;
    prepare: of a batch's tensors, gives those the model and the loss take, e.g. uint8 to float;
    metrics: by name, functions of (output, target): means over the samples;
    dtype:   casts the model and every floating-point input; a model of 16-bit numbers has its inputs cast as well.

    Dropout, and torch's random numbers in `prepare` and in a data set, draw from the batch's seed. Under
    `slice` the loss, like its gradient, carries the batch's weight: both average to the common batch's.
    """

    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module],
        loss: Loss,
        train: Sequence[Tensor] | MapDataset,
        test: Sequence[Tensor] | MapDataset | None = None,
        *,
        batch: int = 32,
        feed: Feed = "shared",
        shuffle: bool = True,
        name: str = "task",
        metrics: Mapping[str, Metric] | None = None,
        prepare: Callable[..., tuple[Tensor, ...]] | None = None,
        buffer_policy: BufferPolicy = "average",
        dtype: torch.dtype | None = None,
        notice: str | None = None,
    ) -> None:
        if buffer_policy not in get_args(BufferPolicy):
            raise UsageError(f"buffer_policy must be one of {', '.join(get_args(BufferPolicy))}, not {buffer_policy!r}")
        if dtype is not None and not dtype.is_floating_point:
            raise UsageError(f"dtype must be a floating-point type, such as torch.float64, not {dtype}")
        self.name, self.notice = name, notice
        self.batch, self.feed, self.shuffle, self.buffer_policy = batch, feed, shuffle, buffer_policy
        self.loss, self.metrics, self.prepare, self.dtype = loss, dict(metrics or {}), prepare, dtype
        self.train = Samples(train, "train")
        self.epoch_size = self.train.length
        self.test = self.train if test is None else Samples(test, "test")
        self._build = model if callable(model) and not isinstance(model, nn.Module) else None
        mine = self._cast(copy.deepcopy(_complete(model))) if self._build is None else self._built(0)
        self.flat = FlatModule(mine)
        self._first = self.flat.vector()
        if dtype is None and self._first.dtype in (torch.bfloat16, torch.float16):
            self.dtype = self._first.dtype  # data rarely have this type
        self._state = {key: value.clone() for key, value in self.flat.buffers().items()}
        self._out = torch.empty_like(self._first)
        self._device = self._first.device

    def _built(self, seed: int) -> nn.Module:
        assert self._build is not None
        with seeded(seed):
            return self._cast(_complete(self._build()))

    def _cast(self, module: nn.Module) -> nn.Module:
        return module if self.dtype is None else module.to(self.dtype)

    def start(self, seed: int) -> Vector:
        return self._first.clone() if self._build is None else FlatModule(self._built(seed)).vector()

    def parameters(self) -> list[tuple[str, list[int]]]:
        """Names and shapes of the parameters, in the order of the vector."""
        return self.flat.named()

    def on(self, device: torch.device) -> Self:
        other = copy.copy(self)
        other.flat = FlatModule(copy.deepcopy(self.flat.module).to(device))
        other._first, other._out = self._first.to(device), self._out.to(device)
        other._state = {name: buffer.to(device) for name, buffer in self._state.items()}
        other._device = device
        return other

    def limited(self, samples: int) -> Self:
        if samples < 1:
            raise UsageError(f"at least 1 test sample must be taken, not {samples}")
        other = copy.copy(self)
        other.test = self.test.first(samples)
        return other

    def buffers(self) -> dict[str, Tensor]:
        return {key: value.clone() for key, value in self._state.items()}

    def batches(self, rank: int, workers: int, seed: int, first: int = 0) -> Iterator[Batch]:
        stream = Stream(self.train.length, self.batch, self.feed, self.shuffle, rank, workers, seed)

        def drawn() -> Iterator[Batch]:
            for number, indices in zip(count(first), stream.from_(first), strict=False):
                own = sample_seed(seed, rank, number)
                with seeded(own ^ 1):  # other numbers than those of dropout
                    data = self._prepared(self.train.take(indices))
                yield Batch(data, stream.size, own, stream.weight)

        return drawn()  # so that a wrong request fails here, not at the first batch

    def grad(
        self, x: Vector, batch: Batch, out: Vector | None = None, buffers: Mapping[str, Tensor] | None = None
    ) -> tuple[float, Vector]:
        out = self._out if out is None else out
        with self._at(x, out, buffers, training=True), torch.enable_grad(), seeded(batch.seed):
            out.zero_()
            loss = checked_loss(self.loss(self.flat.module(*batch.data[:-1]), batch.data[-1]), trains=True)
            if batch.weight != 1.0:
                loss = loss * batch.weight
            loss.backward()  # type: ignore[no-untyped-call]
        return loss.item(), out

    def evaluate(self, x: Vector, buffers: Mapping[str, Tensor] | None = None) -> dict[str, float]:
        sums: dict[str, float] = {}
        with self._at(x, self._out, buffers, training=False), torch.no_grad(), seeded(0):
            for chunk in self.test.chunks(EVALUATION_CHUNK):
                *inputs, target = self._prepared(chunk)
                output = self.flat.module(*inputs)
                parts = {"loss": checked_loss(self.loss(output, target), trains=False).item()}
                parts |= {name: float(metric(output, target)) for name, metric in self.metrics.items()}
                for name, value in parts.items():
                    sums[name] = sums.get(name, 0.0) + value * len(chunk[0])
        return {name: value / self.test.length for name, value in sums.items()}

    def module(self, x: Vector, buffers: Mapping[str, Tensor] | None = None) -> nn.Module:
        """A copy of the model with the weights x."""
        with self._at(x, self._out, buffers, training=False):
            module = copy.deepcopy(self.flat.module)
        module.zero_grad(set_to_none=True)
        return module

    @contextmanager
    def _at(self, x: Vector, out: Vector, buffers: Mapping[str, Tensor] | None, *, training: bool) -> Iterator[None]:
        """Binds the module to x and to the caller's buffers (None: copies of the first ones)."""
        if self.flat.module.training != training:
            self.flat.module.train(training)
        self.flat.bind(x, out)
        if self._state:
            buffers = self.buffers() if buffers is None else buffers
            self.flat.bind_buffers(buffers)
        try:
            yield
        except Exception as error:
            error.add_note(f"in task {self.name!r}")
            raise
        if self._state and buffers is not None:
            self.flat.keep_buffers(buffers)

    def _prepared(self, data: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if self.prepare is not None:
            data = tuple(self.prepare(*data))
        if len(data) < 2:
            raise UsageError(f"task {self.name!r}: a batch must hold inputs and a target, not {len(data)} tensor")
        if self._device.type != "cpu":
            data = tuple(part.to(self._device, non_blocking=True) for part in data)
        if self.dtype is None:
            return data
        return tuple(part.to(self.dtype) if part.is_floating_point() else part for part in data)
