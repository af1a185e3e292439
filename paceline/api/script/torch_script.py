"""The torch model of a script: its parameters and gradients are views of the run's vectors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from paceline.api.script.script_task import Evaluate, ScriptTask
from paceline.errors import UsageError
from paceline.state import Vector
from paceline.torch_task import FlatModule, seeded


class TorchScript(ScriptTask):
    """A script's torch module. Nothing is copied: the module computes in the memory of the run."""

    def __init__(self, model: nn.Module, evaluate: Evaluate | None, name: str) -> None:
        super().__init__(evaluate, name)
        module = getattr(model, "_orig_mod", model)  # of torch.compile, which would prefix all names
        self.flat = FlatModule(module)
        self._frozen = [parameter for parameter in module.parameters() if not parameter.requires_grad]
        self.device = self.flat.parameters[0].device
        self._x, self._out = self.flat.vector(), torch.zeros(self.flat.size, dtype=self.dtype, device=self.device)
        self._scratch = self._out  # for gradients that are not used
        self._shared: dict[str, Tensor] = {}
        self._buffers = self.flat.buffers()

    @property
    def dtype(self) -> torch.dtype:
        return self.flat.parameters[0].dtype

    def start(self, seed: int) -> Vector:
        return self.flat.vector()

    def buffers(self) -> dict[str, Tensor]:
        return {name: buffer.detach().cpu().clone() for name, buffer in self.flat.buffers().items()}

    def parameters(self) -> list[tuple[str, list[int]]]:
        return self.flat.named()

    @contextmanager
    def standing_at(self, x: Vector, buffers: Mapping[str, Tensor] | None) -> Iterator[nn.Module]:
        module = self.flat.module
        modes = [(one, one.training) for one in module.modules()]
        self.flat.bind(x.detach(), self._scratch)
        if buffers is not None:
            self.flat.bind_buffers(self._here(buffers))
        module.eval()
        try:
            with torch.no_grad(), seeded(0):
                yield module
        finally:
            for one, mode in modes:
                one.training = mode
            self.flat.bind(self._x, self._out)
            self.flat.bind_buffers(self._buffers)

    def _here(self, buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: buffer.to(self.device) for name, buffer in buffers.items()}

    # for the loop

    def settle(self, buffers: dict[str, Tensor]) -> None:
        self._shared, self._buffers = buffers, self._here(buffers)
        self.bind(self._x, self._scratch)

    def bind(self, x: Vector, out: Vector) -> None:
        # other tensors of the same memory: GradientBuffers counts references to a gradient
        self._x, self._out = x.detach(), out.detach()
        self.flat.bind(x, out)
        self.flat.bind_buffers(self._buffers)

    def gather(self, out: Vector) -> bool:
        """Copy gradients that autograd or the script put elsewhere into `out`; False if there were none."""
        found = False
        if self.flat.gradients_in_place():
            self._keep_buffers()
            return found
        place, width = out.data_ptr(), out.element_size()
        views: tuple[Tensor, ...] = ()
        for number, parameter in enumerate(self.flat.parameters):
            grad = parameter.grad
            # after a zero_grad(), which frees the gradients
            if grad is None or grad.is_sparse or grad.data_ptr() != place:
                views = views or torch.split_with_sizes(out.detach(), self.flat.sizes)
                own = views[number].view(parameter.shape)
                if grad is not None:
                    own.copy_(grad.to_dense())
                    found = True
                else:
                    own.zero_()
                parameter.grad = own
            place += self.flat.sizes[number] * width
        self._keep_buffers()
        return found

    def _keep_buffers(self) -> None:
        self.flat.keep_buffers(self._buffers)
        for name, buffer in self._buffers.items():
            if buffer is not self._shared[name]:  # on another device
                self._shared[name].copy_(buffer)

    def drop_gradients(self, kept: Sequence[Tensor]) -> None:
        """Set the gradients of all other parameters to 0."""
        own = {id(parameter) for parameter in kept}
        for parameter in self.flat.parameters:
            if id(parameter) not in own and parameter.grad is not None:
                parameter.grad.zero_()

    def check_parameters(self) -> None:
        """UsageError if the script has changed which parameters train, or has moved them."""
        changed = [one for one in self._frozen if one.requires_grad]
        changed += [one for one in self.flat.parameters if not one.requires_grad]
        if changed:
            names = [name for name, one in self.flat.module.named_parameters() if any(one is p for p in changed)]
            named = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
            raise UsageError(
                f"requires_grad of {named} was changed inside the block: a run trains the parameters that attach() has "
                "found trainable. Freeze or unfreeze before attach(); for stages, give each a run of its own"
            )
        last, end = self.flat.parameters[-1], self._x.numel() - self.flat.sizes[-1]
        if last.numel() and last.data_ptr() != self._x.data_ptr() + end * self._x.element_size():
            raise UsageError(
                "the model was moved or converted inside the block (to(), half(), cuda(), …): its parameters are no "
                "longer those of the run. Do that before attach()"
            )

    def let_go(self, x: Vector | None = None, buffers: Mapping[str, Tensor] | None = None) -> None:
        x, buffers = self._x if x is None else x, self._buffers if buffers is None else buffers
        parts = torch.split_with_sizes(x.to(self.device), self.flat.sizes)
        for parameter, part in zip(self.flat.parameters, parts, strict=True):
            parameter.grad = None
            parameter.data = part.clone().view(parameter.shape)
        self.flat.bind_buffers({name: buffer.clone() for name, buffer in self._here(buffers).items()})
