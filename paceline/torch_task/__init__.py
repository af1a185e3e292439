"""A task of a PyTorch model, a loss and data: what most users need."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Self, get_args

import torch
from torch import Tensor, nn

from paceline.errors import UsageError
from paceline.fields import Feed
from paceline.state import Vector
from paceline.task import Batch, BufferPolicy
from paceline.torch_task.backward_progress import stopping
from paceline.torch_task.batch_parts import Parts, mapped, named, placed
from paceline.torch_task.flat_module import FlatModule, Originals, complete
from paceline.torch_task.losses import accuracy, checked_loss, own_loss
from paceline.torch_task.many_gradients import ManyGradients
from paceline.torch_task.random_numbers import all_seeded, seeded
from paceline.torch_task.sampled_task import EVALUATION_CHUNK, SampledTask
from paceline.torch_task.samples import Collate, Samples
from paceline.torch_task.streams import StreamSamples
from paceline.torch_task.tokens import Tokens

__all__ = ["EVALUATION_CHUNK", "FlatModule", "SampledTask", "Samples", "StreamSamples", "Tokens", "TorchTask"]
__all__ += ["accuracy", "checked_loss", "seeded"]

Loss = Callable[[Any, Any], Tensor]
Metric = Callable[[Any, Any], float]


class TorchTask(SampledTask):
    """A model, a loss and data.

    model:   a module (start: its present weights; it is copied, yours stays as it is), or a function that
             builds one (start(seed): built under that seed; frozen weights and buffers are those of seed 0);
    loss:    of (output, target), a mean over the samples. A batch (a, b, …, target) gives model(a, b, …); a batch that
             is a dictionary gives model(**batch), and the target is the dictionary. None: the model gets the whole
             batch and returns its own loss;
    train, test: tensors or arrays in a tuple or dictionary, a map-style data set, a DataLoader, `Tokens`, an
             IterableDataset, or a function that returns batches; without test, evaluated on train;
    batch, shuffle: those of the DataLoader, or 32 and True;
    collate: makes a batch of a list of samples (default: torch's);
    num_workers: processes of each worker that read its batches ahead; they change no bit;
    prepare: of a batch's parts, gives those the model and the loss take, e.g. uint8 to float;
    metrics: by name, functions of (output, target): means over the samples;
    dtype:   casts the model and every floating-point input; a model of 16-bit numbers has its inputs cast as well;
    clip:    the largest norm of a gradient, of all parameters together, as torch's clip_grad_norm_ has it;
    autocast: the type of mixed precision, such as torch.bfloat16;
    compile: True, or the arguments of torch.compile.

    Dropout, and random numbers in `prepare` and in a data set, draw from the batch's seed. Under `slice` the loss, like
    its gradient, carries the batch's weight: both average to the common batch's.
    """

    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module],
        loss: Loss | None,
        train: Any,
        test: Any = None,
        *,
        batch: int | None = None,
        feed: Feed | None = None,
        shuffle: bool | None = None,
        collate: Collate | None = None,
        num_workers: int | None = None,
        name: str = "task",
        metrics: Mapping[str, Metric] | None = None,
        prepare: Callable[..., Any] | None = None,
        buffer_policy: BufferPolicy = "average",
        dtype: torch.dtype | None = None,
        clip: float | None = None,
        autocast: torch.dtype | None = None,
        compile: bool | Mapping[str, Any] = False,
        notice: str | None = None,
    ) -> None:
        if buffer_policy not in get_args(BufferPolicy):
            raise UsageError(f"buffer_policy must be one of {', '.join(get_args(BufferPolicy))}, not {buffer_policy!r}")
        if dtype is not None and not dtype.is_floating_point:
            raise UsageError(f"dtype must be a floating-point type, such as torch.float64, not {dtype}")
        if autocast is not None and autocast not in (torch.bfloat16, torch.float16):
            raise UsageError(f"autocast must be torch.bfloat16 or torch.float16, not {autocast}")
        if clip is not None and not clip > 0:
            raise UsageError(f"clip must be above 0, not {clip:g}")
        self.name, self.notice, self.buffer_policy = name, notice, buffer_policy
        self.loss, self.metrics, self.prepare, self.dtype = loss, dict(metrics or {}), prepare, dtype
        self.clip, self.autocast = clip, autocast
        self._take_data(train, test, collate, batch, shuffle, num_workers)
        self.feed = feed or ("shard" if isinstance(self.train, StreamSamples) else "shared")
        self._check_feed()
        if isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):  # compiled: parameters have other names
            model, compile = inner, compile or True
        self._compile = {} if compile is True else dict(compile) if compile else None
        self._build = model if callable(model) and not isinstance(model, nn.Module) else None
        mine = self._cast(copy.deepcopy(complete(model))) if self._build is None else self._built(0)
        # a launcher that has a tensor on a GPU could not fork processes that use one: `on` moves the task there
        self._given_on = next((str(one.device) for one in mine.parameters() if one.device.type != "cpu"), None)
        self.flat = FlatModule(mine.cpu() if self._given_on else mine)
        self.originals = Originals([] if self._build is not None else model.parameters())  # type: ignore[union-attr]
        self._compiled: Callable[..., Any] | None = None
        self._first, self._first_seed = self.flat.vector(), 0
        self._final: Callable[[int, int], None] | None = None
        self._useless: Callable[[], bool] | None = None
        if dtype is None and self._first.dtype in (torch.bfloat16, torch.float16):
            self.dtype = self._first.dtype  # data rarely have this type
        self._state = {key: value.clone() for key, value in self.flat.buffers().items()}
        self._out = torch.empty_like(self._first)
        self._device = self._first.device

    def _check_feed(self) -> None:
        super()._check_feed()
        if self.clip is not None and self.feed == "slice":
            raise UsageError(
                "clip= limits the norm of a worker's gradient; with feed=slice, which exact runs have, that is the "
                "gradient of a part of the batch, and clipped parts do not add up to the clipped whole"
            )

    def _built(self, seed: int) -> nn.Module:
        assert self._build is not None
        with seeded(seed):
            return self._cast(complete(self._build()))

    def _cast(self, module: nn.Module) -> nn.Module:
        return module if self.dtype is None else module.to(self.dtype)

    def warnings(self, workers: int) -> Iterator[str]:
        yield from super().warnings(workers)
        if self._given_on is not None and self._device.type == "cpu":
            yield f"the model was on {self._given_on} and trains on the CPU: give device='cuda'"

    def start(self, seed: int) -> Vector:
        if self._build is not None and seed != self._first_seed:
            # kept: building a large model takes seconds, and the launcher and the chief both ask for its weights
            self._first, self._first_seed = FlatModule(self._built(seed).cpu()).vector().to(self._device), seed
        return self._first.clone()

    def parameters(self) -> list[tuple[str, list[int]]]:
        """Names and shapes of the parameters, in the order of the vector."""
        return self.flat.named()

    def on(self, device: torch.device) -> Self:
        other = copy.copy(self)
        other.flat = FlatModule(copy.deepcopy(self.flat.module).to(device))
        other._first, other._out = self._first.to(device), self._out.to(device)
        other._state = {name: buffer.to(device) for name, buffer in self._state.items()}
        other._device, other._compiled = device, None
        return other

    def buffers(self) -> dict[str, Tensor]:
        return {key: value.clone() for key, value in self._state.items()}

    def grad(
        self, x: Vector, batch: Batch, out: Vector | None = None, buffers: Mapping[str, Tensor] | None = None
    ) -> tuple[float, Vector]:
        out = self._out if out is None else out
        with self._at(x, out, buffers, training=True), torch.enable_grad(), seeded(batch.seed):
            return self._differentiated(batch, out).item(), out

    def _differentiated(self, batch: Batch, out: Vector) -> Tensor:
        """The loss at the vector that the module is bound to; its gradient is written into `out`."""
        # a kernel that adds to zeros for each parameter costs a GPU more than one copy of all
        taken = out.is_cuda and self._final is None and self._useless is None
        if taken:
            self.flat.release_gradients()
        else:
            out.zero_()
        with self._precision():
            loss = checked_loss(self._output_and_loss(batch.data)[1], trains=True)
        if batch.weight != 1.0:
            loss = loss * batch.weight
        final, self._final = self._final, None
        if self._useless is not None:
            final = stopping(self._useless)
            final(-1, 0)
        if final is not None:
            self.flat.progress().begin(out, final)
        try:
            loss.backward()  # type: ignore[no-untyped-call]
        except BaseException:
            if final is not None:
                self.flat.progress().abandon()
            raise
        if final is not None:
            self.flat.progress().end()
        if taken:
            self.flat.take_gradients(out)
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.flat.parameters, self.clip)
        return loss

    def batched(self, workers: int, seed: int) -> ManyGradients:
        return ManyGradients(self, workers, seed)

    @property
    def follows(self) -> bool:
        return self.clip is None  # which changes the whole gradient at the end

    def follow(self, final: Callable[[int, int], None] | None) -> None:
        self._final = final

    def watch(self, useless: Callable[[], bool] | None) -> None:
        """Gradients are stopped after the forward pass, or after any parameter's part of the backward pass."""
        self._useless = useless

    def _precision(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.autocast is None else torch.autocast(self._device.type, self.autocast)

    def _output_and_loss(self, parts: Parts, module: Callable[..., Any] | None = None) -> tuple[Any, Any]:
        """The output for a batch, and the loss, of the model or of a function that takes its place."""
        if module is None:
            module = self.flat.module
        if self._compile is not None:
            if self._compiled is None:  # in the process that computes: compiled code is not handed to another
                self._compiled = torch.compile(self.flat.module, **self._compile)
            module = self._compiled
        if (keywords := named(parts)) is not None:
            output, target = module(**keywords), keywords
        elif self.loss is None:
            output, target = module(*parts), None
        else:
            output, target = module(*parts[:-1]), parts[-1]
        return output, own_loss(output) if self.loss is None else self.loss(output, target)

    def evaluate(self, x: Vector, buffers: Mapping[str, Tensor] | None = None) -> dict[str, float]:
        sums: dict[str, float] = {}
        total = 0
        random = seeded if isinstance(self.test, Samples) and not self.test.draws else all_seeded
        with self._at(x, self._out, buffers, training=False), torch.no_grad(), random(0), self._precision():
            for chunk, size in self.test.chunks(EVALUATION_CHUNK):
                parts = self._prepared(chunk)
                output, loss = self._output_and_loss(parts)
                values = {"loss": checked_loss(loss, trains=False).item()}
                target = named(parts) or parts[-1]
                values |= {name: float(metric(output, target)) for name, metric in self.metrics.items()}
                total += size
                for name, value in values.items():
                    sums[name] = sums.get(name, 0.0) + value * size
        if not total:
            raise UsageError(f"task {self.name!r}: the test data give no samples")
        return {name: value / total for name, value in sums.items()}

    def trained_model(self, x: Vector, buffers: Mapping[str, Tensor] | None = None) -> nn.Module:
        module = self.module(x, buffers)
        for one in module.parameters():  # their memory is that of x
            one.data = one.data.clone()
        return module

    def outputs(self, model: nn.Module, inputs: Parts) -> Any:
        return model(*inputs)

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

    def _prepared(self, parts: Parts) -> Parts:
        return self._placed(self._cast_parts(parts))

    def _cast_parts(self, parts: Parts) -> Parts:
        """The parts that the model takes, on the CPU."""
        if self.prepare is not None:
            made = self.prepare(*parts)
            parts = (made,) if isinstance(made, dict) else tuple(made)
        if len(parts) < 2 and self.loss is not None and named(parts) is None:
            raise UsageError(f"task {self.name!r}: a batch must hold inputs and a target, not {len(parts)} tensor")
        if self.dtype is None:
            return parts
        kind = self.dtype
        cast: Parts = mapped(lambda one: one.to(kind) if one.is_floating_point() else one, parts)
        return cast

    def _pinned(self, parts: Parts) -> Parts:
        if self._device.type != "cuda":
            return parts
        with torch.cuda.device(self._device):
            pinned: Parts = mapped(torch.Tensor.pin_memory, parts)
        return pinned

    def _placed(self, parts: Parts) -> Parts:
        return parts if self._device.type == "cpu" else tuple(placed(part, self._device) for part in parts)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_compiled": None}  # another process compiles for itself
