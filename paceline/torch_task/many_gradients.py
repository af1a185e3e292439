"""Gradients of a TorchTask at many points at once, each on its own mini-batch: one call of torch.func.vmap."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call, grad_and_value, vmap

from paceline.errors import UsageError
from paceline.sampling import sample_seed
from paceline.state import Vector
from paceline.task import GradientBlock
from paceline.torch_task.batch_parts import Parts, tensors_in
from paceline.torch_task.drawn_together import Drawn, GatheredBatches, StackedBatches, gatherable
from paceline.torch_task.dropout_masks import DropoutCall, GivenMasks, RecordedDropout, masks_of
from paceline.torch_task.losses import checked_loss
from paceline.torch_task.random_numbers import seeded
from paceline.torch_task.samples import Samples
from paceline.torch_task.stacked_convolutions import PatchConvolutions

if TYPE_CHECKING:
    from paceline.torch_task import TorchTask

CPU_BYTES = 1 << 28  # of one block on a CPU: larger ones are not faster
GPU_SHARE = 0.7  # of the free memory of a GPU, for one block
CLOSE = (
    0.1  # the largest relative difference between the first gradient computed alone and by vmap (ties of a max pool)
)


class ManyGradients:
    """The gradients of many workers, in blocks that fit into memory.

    The first gradient is computed alone as well. A model for which vmap gives anything else, or which draws random
    numbers otherwise than by dropout, is refused.
    """

    def __init__(self, task: TorchTask, workers: int, seed: int) -> None:
        self._task, self._seed = task, seed
        if task._compile is not None:
            raise UsageError(f"task {task.name!r} is compiled, and batched runs its model by vmap: omit one of the two")
        if buffers := task.buffers():
            raise UsageError(
                f"task {task.name!r} has buffers that a gradient may change, such as those of BatchNorm "
                f"({', '.join(sorted(buffers)[:2])}): its gradients are computed one by one; omit batched"
            )
        named = task.flat.named()
        self._names, self._shapes = [name for name, _ in named], [shape for _, shape in named]
        self._sizes = [math.prod(shape) for shape in self._shapes]
        self._most, self._measured = workers, False
        x = task.start(seed).to(task._device)
        alone = self._first(x, workers)
        self._batches = self._source(x, alone, workers)

    def _first(self, x: Vector, workers: int) -> Vector:
        """The first gradient as a run of single gradients has it. Notes calls of dropout and the memory of a gradient;
        refuses other random numbers."""
        task, batch = self._task, next(self._task.batches(0, workers, self._seed))
        saved, g = 0, torch.empty_like(x)

        def noted(tensor: Tensor) -> Tensor:
            nonlocal saved
            saved += tensor.nbytes
            return tensor

        hooks = torch.autograd.graph.saved_tensors_hooks(noted, lambda one: one)
        bound = task._at(x, g, None, training=True)
        with RecordedDropout() as dropout, hooks, bound, torch.enable_grad(), seeded(batch.seed):
            task._differentiated(batch, g)
            by_model = _random_state(task._device)
        self._calls: list[DropoutCall] = dropout.calls
        with seeded(batch.seed):
            for call in self._calls:
                call.mask()
            by_masks = _random_state(task._device)
        if not torch.equal(by_masks, by_model):
            raise UsageError(
                f"task {task.name!r}: its model draws random numbers otherwise than by dropout of its own, and vmap "
                "cannot draw those of each batch's seed; omit batched"
            )
        self._row_bytes = 2 * saved + 4 * x.nbytes + 2 * sum(one.nbytes for one in tensors_in(batch.data))
        return g

    def _source(self, x: Vector, alone: Vector, workers: int) -> GatheredBatches | StackedBatches:
        """Samples gathered on the device if that gives the first gradient, else the workers' own batches, stacked."""
        task = self._task
        if (columns := gatherable(task)) is not None and not _prepares_at_random(task):
            gathered = GatheredBatches(task, workers, self._seed, columns)
            # `prepare` may take no stacked batches, or want them on the CPU
            with suppress(Exception):
                if _close(self._gradients(gathered, x[None], [0], [0])[1][0], alone):
                    return gathered
        stacked = StackedBatches(task, workers, self._seed)
        try:
            found = self._gradients(stacked, x[None], [0], [0])[1][0]
        except UsageError:
            raise
        except Exception as error:
            said = str(error).partition("\n")[0]
            raise UsageError(f"task {task.name!r} cannot run under torch.func.vmap: {said}; omit batched") from error
        if not _close(found, alone):
            raise UsageError(f"task {task.name!r}: torch.func.vmap gives another gradient than autograd; omit batched")
        return stacked

    def capacity(self) -> int:
        """The number of gradients that fit into memory at once."""
        device = self._task._device
        if device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(device)
            free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
            budget = int(GPU_SHARE * free)
        else:
            budget = CPU_BYTES
        return max(1, min(self._most, budget // self._row_bytes))

    def compute(self, points: Tensor, ranks: Sequence[int], numbers: Sequence[int]) -> GradientBlock:
        """The gradients at the rows of `points`, each on the batch with this number of the worker with this rank."""
        pieces: list[tuple[Tensor, Tensor, list[int]]] = []
        at = 0
        while at < len(ranks):
            end = min(len(ranks), at + self.capacity())
            try:
                pieces.append(self._gradients(self._batches, points[at:end], ranks[at:end], numbers[at:end]))
            except RuntimeError as error:
                if not _out_of_memory(error) or end - at == 1:
                    raise
                self._most = (end - at) // 2
                if self._task._device.type == "cuda":
                    torch.cuda.empty_cache()
                continue
            at = end
        if len(pieces) == 1:
            losses, gradients, sizes = pieces[0]
            return GradientBlock(losses, gradients, sizes)
        losses, gradients = (torch.cat(same) for same in zip(*(piece[:2] for piece in pieces), strict=True))
        return GradientBlock(losses, gradients, [size for piece in pieces for size in piece[2]])

    def _gradients(
        self, batches: GatheredBatches | StackedBatches, points: Tensor, ranks: Sequence[int], numbers: Sequence[int]
    ) -> tuple[Tensor, Tensor, list[int]]:
        device = self._task._device
        measured = device.type == "cuda" and not self._measured and len(ranks) >= 8
        if measured:
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
        sizes = [0] * len(ranks)
        losses = gradients = None
        for drawn in batches.draw(ranks, numbers):
            for row in drawn.rows:
                sizes[row] = drawn.size
            whole = len(drawn.rows) == len(ranks)
            masks = masks_of(self._calls, (sample_seed(self._seed, ranks[row], numbers[row]) for row in drawn.rows))
            some_losses, some = self._at(points if whole else points[drawn.rows], drawn, masks)
            if whole:
                losses, gradients = some_losses, some
                break
            if losses is None or gradients is None:
                losses, gradients = some_losses.new_empty(len(ranks)), torch.empty_like(points)
            losses[drawn.rows], gradients[drawn.rows] = some_losses, some
        assert losses is not None
        assert gradients is not None
        if measured:
            self._row_bytes = max(1, (torch.cuda.max_memory_allocated(device) - before) // len(ranks))
            self._measured = True
        return losses, gradients, sizes

    def _at(self, points: Tensor, drawn: Drawn, masks: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Losses and gradients of one stack of batches."""
        task, module = self._task, self._task.flat.module
        if not module.training:
            module.train()

        def loss_of(x: Vector, parts: Parts, own: tuple[Tensor, ...]) -> Tensor:
            cut = zip(self._names, torch.split_with_sizes(x, self._sizes), self._shapes, strict=True)
            weights = {name: part.view(shape) for name, part, shape in cut}

            def run(*args: Any, **kwargs: Any) -> Any:
                return functional_call(module, weights, args, kwargs)

            with GivenMasks(own), PatchConvolutions():
                parts = parts if drawn.prepared else task._cast_parts(parts)
                with task._precision():
                    loss = checked_loss(task._output_and_loss(parts, run)[1], trains=False)
            return loss if drawn.weight == 1.0 else loss * drawn.weight

        gradients, losses = vmap(grad_and_value(loss_of))(points, drawn.parts, masks)
        if task.clip is not None:  # as torch's clip_grad_norm_
            norms = torch.linalg.vector_norm(gradients, dim=1, keepdim=True)
            gradients *= (task.clip / (norms + 1e-6)).clamp(max=1.0)
        return losses.reshape(len(points)), gradients


def _close(found: Vector, expected: Vector) -> bool:
    difference, norm = torch.linalg.vector_norm(found - expected), torch.linalg.vector_norm(expected)
    return bool(difference <= CLOSE * norm + torch.finfo(expected.dtype).tiny)


def _prepares_at_random(task: TorchTask) -> bool:
    """Whether the task's `prepare` draws random numbers, which differ from batch to batch."""
    assert isinstance(task.train, Samples)
    with seeded(0):
        before = torch.default_generator.get_state()
        task._cast_parts(task.train.take(np.arange(1)))
        return not torch.equal(before, torch.default_generator.get_state())


def _out_of_memory(error: RuntimeError) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "not enough memory" in str(error)


def _random_state(device: torch.device) -> Tensor:
    """Where the random numbers of this moment are."""
    states = [torch.default_generator.get_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return torch.cat(states)
