"""Profile the steps of workers."""

from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

from paceline.errors import UsageError
from paceline.fields import Count, Natural
from paceline.hook import Session
from paceline.hooks._options import Checked
from paceline.hooks._periodic import Timer


@dataclass
class Profiler(Checked):
    """Traces `steps` steps in a row every `every` steps with torch.profiler, at most `most` times, on some workers.

    A trace is `profiles/worker-R-step-T.json` in the run directory, T its first step; chrome://tracing and
    ui.perfetto.dev show it.
    """

    every: Count = 100
    steps: Count = 1
    most: Count = 10
    ranks: tuple[Natural, ...] = (0,)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps > self.every:
            raise UsageError(f"{self.name}: steps={self.steps} do not fit between traces every={self.every} steps")

    def begin(self, session: Session) -> None:
        if session.directory is None:
            raise UsageError(
                f"{self.name}: this run has no directory for traces; in virtual time there is nothing to measure, "
                "so use paceline train"
            )
        self._timer = Timer(self.every, None, session.worker.t, session.seconds)
        self._running: profile | None = None
        self._first = 0
        self._left = self.most if session.worker.rank in self.ranks else 0

    def before_step(self, session: Session) -> None:
        if self._running is None and self._left and self._timer.due(session.worker.t, session.seconds):
            activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
            self._first, self._running = session.worker.t, profile(activities=activities)
            self._running.start()

    def after_step(self, session: Session) -> None:
        running = self._running
        if running is None or session.worker.t < self._first + self.steps:
            return
        self._stop()
        self._left -= 1
        assert session.directory is not None
        folder = session.directory / "profiles"
        folder.mkdir(parents=True, exist_ok=True)
        running.export_chrome_trace(str(folder / f"worker-{session.worker.rank}-step-{self._first}.json"))

    def end(self, session: Session) -> None:
        self._stop()  # a trace that was cut short would mislead

    def _stop(self) -> None:
        if self._running is not None:
            self._running.stop()
            self._running = None
