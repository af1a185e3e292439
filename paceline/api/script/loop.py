"""The loop of a PyTorch script as a worker: each `step` gives the session one gradient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial

from torch import Tensor
from torch.optim import Optimizer

from paceline.api.script.optimizer_guard import OptimizerGuard, ScriptOptimizer
from paceline.api.script.script_loop import ScriptLoop
from paceline.api.script.torch_script import TorchScript
from paceline.errors import UsageError
from paceline.hook import Hook
from paceline.processes.roles.worker_session import WorkerSession
from paceline.state import Vector
from paceline.torch_task import checked_loss, seeded


class Pace(ScriptLoop):
    """The training of a script: `with paceline.attach(model, …) as pace: for … in pace.share(loader): …`"""

    _task: TorchScript
    seeding = staticmethod(seeded)

    def __init__(
        self,
        session: WorkerSession,
        task: TorchScript,
        hooks: Sequence[Hook],
        around: ExitStack,
        optimizers: Sequence[Optimizer] = (),
        named: Mapping[str, Optimizer] | None = None,
    ) -> None:
        super().__init__(session, task, hooks, around)
        self._guard = OptimizerGuard(task.flat.parameters, optimizers)
        self._turns = {
            name: [p for group in one.param_groups for p in group["params"]] for name, one in (named or {}).items()
        }
        self._probe: Tensor | None = None  # a view of the gradient to come
        self._clean = 0  # its version before any backward pass
        self._losses: float | None = None  # of the backward passes since the last step

    @property
    def optimizer(self) -> ScriptOptimizer:
        """An optimizer whose step() is `pace.step()`, for GradScaler and the like. The scheme has the learning rate."""
        return ScriptOptimizer(self._task.flat.parameters, self.step)

    @property
    def optimizers(self) -> dict[str, ScriptOptimizer]:
        """The same for optimizers that are stepped in turns: the step() of each is `pace.step(of=NAME)`."""
        return {name: ScriptOptimizer(own, partial(self.step, of=name)) for name, own in self._turns.items()}

    def _guarded(self) -> None:
        self._around.enter_context(self._guard.watching())

    def backward(self, loss: Tensor) -> None:
        """`loss.backward()`, for a step of several backward passes. The run shows the sum of their losses: divide each
        by their number, as for the gradient."""
        self._inside("backward()")
        if self._out is not None:
            self._backward(loss)
            self._losses = loss.item() if self._losses is None else self._losses + loss.item()

    def step(self, loss: Tensor | float | None = None, size: int | None = None, of: str | None = None) -> bool:
        """Give the gradient to the session, and set the model to the parameters of the next step; False at the end.

        loss: of autograd: its backward pass is run first. A number, or a tensor without a graph (`loss.detach()`): the
              script has run the backward pass itself, and this is shown. None: that of `pace.backward`, or none.
        size: samples that the gradient is of; default: those from share() since the last step.
        of:   the optimizer that makes this step, where attach() was given several by name. Gradients of parameters that
              are not its own are dropped."""
        self._inside("step()")
        if self._out is None:
            return False
        if of not in (self._turns or {None}):
            known = (
                f"one of {', '.join(map(repr, self._turns))}" if self._turns else "None: attach() was given no names"
            )
            raise UsageError(f"of={of!r} is no optimizer of this run; it must be {known}")
        if isinstance(loss, Tensor) and (loss.requires_grad or not self._touched()):
            self.backward(loss)
        elif loss is not None:
            shown = float(loss)
            self._losses = shown if self._losses is None else self._losses + shown
        self._task.check_parameters()
        self._guard.check_rates()
        touched = self._touched()
        if not (self._task.gather(self._out) or touched):
            raise UsageError(
                "there is no gradient to give: no backward pass since the last step. Call loss.backward() first, or "
                "pass the loss: pace.step(loss)"
            )
        if of is not None:
            self._task.drop_gradients(self._turns[of])
        losses, self._losses = self._losses, None
        self._give(losses, size)
        return not self.done

    def _backward(self, loss: Tensor) -> None:
        try:
            checked_loss(loss, trains=True).backward()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            if "backward through the graph a second time" in str(error):
                error.add_note("pace.step(loss) runs the backward pass: after your own, write pace.step(loss.detach())")
            raise

    def _touched(self) -> bool:
        """Whether a backward pass has added to the gradient in place."""
        return self._probe is not None and self._probe._version != self._clean

    def _place(self, x: Vector, out: Vector) -> None:
        out.zero_()
        super()._place(x, out)
        self._probe = self._task.flat.parameters[0].grad  # a view: all views of the vector have one version
        self._clean = self._probe._version if self._probe is not None else 0
