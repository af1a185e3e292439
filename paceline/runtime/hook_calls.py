"""Calls the hooks of one worker, in every world."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from math import inf, isfinite, nan

from paceline.errors import LossError
from paceline.hook import Hook, Rest, Session
from paceline.task import Batch


class HookCalls:
    """The hooks of one worker. A hook that does not define a method is not called for it."""

    def __init__(self, hooks: Sequence[Hook], session: Session) -> None:
        self._hooks, self._session = list(hooks), session
        self._begun: list[Hook] = []
        self.feeding = [hook for hook in hooks if type(hook).feed is not Hook.feed]
        self._before = [hook for hook in hooks if type(hook).before_step is not Hook.before_step]
        self._after = [hook for hook in hooks if type(hook).after_step is not Hook.after_step]
        self.watching = [hook for hook in hooks if type(hook).after_gradient is not Hook.after_gradient]
        self._restless = [hook for hook in hooks if type(hook).rests is Hook.rests]
        # the hooks that do not rest now: those that are called, and those that may rest after a step
        self._before_now, self._after_now = self._before, self._after
        self._tired = self._that_may_rest = [
            hook for hook in self._both(self._before, self._after) if not _holds(self._restless, hook)
        ]
        self._rest: Rest | None = None  # until when none of the others is called
        self._guards_loss = any(hook.guards_loss for hook in hooks)

    @property
    def any(self) -> bool:
        return bool(self._hooks)

    def begin(self) -> None:
        """Begin all hooks that have not begun yet."""
        for hook in self._hooks[len(self._begun) :]:
            hook.begin(self._session)
            self._begun.append(hook)

    @property
    def stepping(self) -> bool:
        """Whether a hook is ever called before or after a step."""
        return bool(self._before or self._after)

    def before_step(self) -> None:
        if self._rest is not None:
            self._wake_if_rested(self._rest)
        for hook in self._before_now:
            hook.before_step(self._session)

    def feed(self, batch: Batch) -> Batch:
        for hook in self.feeding:
            batch = hook.feed(self._session, batch)
        return batch

    def check_loss(self, loss: float) -> None:
        """LossError for a loss that is not finite, unless a hook decides what that means."""
        if not isfinite(loss) and not self._guards_loss:
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
                hook.after_gradient(self._session, nan)

    def after_step(self) -> None:
        if self._rest is not None:
            self._wake_if_rested(self._rest)
        for hook in self._after_now:
            hook.after_step(self._session)
        if self._tired:
            self._let_rest()

    def _let_rest(self) -> None:
        """Ask the hooks that do not rest whether they do from now on."""
        rests = [(hook, hook.rests(self._session)) for hook in self._tired]
        known = [rest for _, rest in rests if rest is not None]
        if known:
            resting = [hook for hook, rest in rests if rest is not None]
            self._before_now = [hook for hook in self._before_now if not _holds(resting, hook)]
            self._after_now = [hook for hook in self._after_now if not _holds(resting, hook)]
            self._tired = [hook for hook, rest in rests if rest is None]
            both = known if self._rest is None else [*known, self._rest]
            self._rest = Rest(*(min(times) for times in zip(*both, strict=True)))

    def _wake_if_rested(self, rest: Rest) -> None:
        """Call all hooks again if one of those that rest may have something to do."""
        session = self._session
        updates, seconds, steps = rest
        if (
            session.seconds >= seconds
            or (updates != inf and session.updates >= updates)
            or (steps != inf and session.worker.t >= steps)
        ):
            self._rest = None
            self._before_now, self._after_now, self._tired = self._before, self._after, self._that_may_rest

    @staticmethod
    def _both(before: list[Hook], after: list[Hook]) -> list[Hook]:
        return [*before, *(hook for hook in after if not _holds(before, hook))]

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


def _holds(hooks: list[Hook], one: Hook) -> bool:
    """Whether this very hook is among them: hooks with equal options are equal."""
    return any(hook is one for hook in hooks)
