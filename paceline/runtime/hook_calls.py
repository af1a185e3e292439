"""Calls the hooks of one worker, in every world."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack

from paceline.errors import LossError
from paceline.hook import Hook, Rest, Session
from paceline.task import Batch


class HookCalls:
    """The hooks of one worker. A hook that does not define a method is not called for it."""

    def __init__(self, hooks: Sequence[Hook], session: Session) -> None:
        self._hooks, self._session = list(hooks), session
        self._begun: list[Hook] = []
        self._feeding = [hook for hook in hooks if type(hook).feed is not Hook.feed]
        self._before = [hook for hook in hooks if type(hook).before_step is not Hook.before_step]
        self._after = [hook for hook in hooks if type(hook).after_step is not Hook.after_step]
        self.watching = [hook for hook in hooks if type(hook).after_gradient is not Hook.after_gradient]
        self._stepping = [hook for hook in hooks if hook in self._before or hook in self._after]
        self._rest: Rest | None = None  # of all of them
        self._guards_loss = any(hook.guards_loss for hook in hooks)

    @property
    def any(self) -> bool:
        return bool(self._hooks)

    def begin(self) -> None:
        """Begin all hooks that have not begun yet."""
        for hook in self._hooks[len(self._begun) :]:
            hook.begin(self._session)
            self._begun.append(hook)

    def before_step(self) -> None:
        if self._rest is None or self._rested(self._rest):
            for hook in self._before:
                hook.before_step(self._session)

    def feed(self, batch: Batch) -> Batch:
        for hook in self._feeding:
            batch = hook.feed(self._session, batch)
        return batch

    def check_loss(self, loss: float) -> None:
        """LossError for a loss that is not finite, unless a hook decides what that means."""
        if not math.isfinite(loss) and not self._guards_loss:
            worker = self._session.worker
            raise LossError(
                f"worker:{worker.rank}, step {worker.t}, update {self._session.updates}: the loss is {loss}; "
                "a smaller lr (or fewer workers at this lr) is the usual cure"
            )

    def after_gradient(self, loss: float | None) -> None:
        for hook in self.watching:
            if loss is not None:
                hook.after_gradient(self._session, loss)
            elif not hook.guards_loss:
                hook.after_gradient(self._session, math.nan)

    def after_step(self) -> None:
        if self._stepping and (self._rest is None or self._rested(self._rest)):
            for hook in self._after:
                hook.after_step(self._session)
            rests = [hook.rests(self._session) for hook in self._stepping]
            known = [rest for rest in rests if rest is not None]
            if len(known) == len(rests):
                self._rest = Rest(min(rest.updates for rest in known), min(rest.seconds for rest in known))

    def _rested(self, rest: Rest) -> bool:
        """Whether a hook may have something to do."""
        session = self._session
        if session.seconds < rest.seconds and (rest.updates == math.inf or session.updates < rest.updates):
            return False
        self._rest = None
        return True

    def failed(self, error: BaseException) -> None:
        """The run was aborted by an error."""
        with ExitStack() as rest:
            rest.callback(self.end)
            for hook in self._begun:
                rest.callback(hook.failed, self._session, error)

    def end(self) -> None:
        hooks, self._begun = self._begun, []
        with ExitStack() as ends:  # every end runs, in reverse order, whatever another one raises
            for hook in hooks:
                ends.callback(hook.end, self._session)
