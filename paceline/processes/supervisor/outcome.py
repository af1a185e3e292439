"""How a launch ended: what its roles have said and the board holds, and the `Result` made of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.config import build
from paceline.config.plan import Plan
from paceline.errors import PacelineError
from paceline.result import Evaluations, Point, Profile, Result, epochs_of
from paceline.runs import checkpoint, fingerprint
from paceline.runs.accounts import Standing
from paceline.runs.checkpoint import Checkpoint
from paceline.scheme import Scheme


@dataclass
class Outcome:
    """What is known at the end of a launch."""

    result: dict[str, Any] | None = None  # as the chief has sent it
    error: PacelineError | None = None
    stopped: str | None = None  # why the run stopped
    interrupted: bool = False
    notice: str | None = None
    warnings: list[str] = field(default_factory=list)
    batch: int = 0
    epoch_size: int | None = None
    task: str = ""
    history: list[dict[str, Any]] = field(default_factory=list)
    peak_rss: int = 0  # KiB, of the largest process
    words: dict[str, int] = field(default_factory=dict)  # of the board
    profile: Profile | None = None
    traffic: dict[str, list[int]] | None = None  # bytes of each worker

    def note(self, kind: str, content: Any) -> None:
        """Take what a role's message says of the outcome."""
        match kind:
            case "record":
                self.history.append(content)
            case "stopped":
                self.stopped = self.stopped or content
            case "result" | "batch" | "epoch_size" | "task" | "notice":
                setattr(self, kind, content)


def result_of(
    plan: Plan, scheme: Scheme, outcome: Outcome, before: list[dict[str, Any]], first: Checkpoint | None = None
) -> Result | None:
    """The result of a launch: counts and parameters are those of the newest checkpoint; None without a checkpoint.
    `before`: the history of earlier launches; `first`: the checkpoint that this launch resumed from."""
    found = checkpoint.newest(Path(plan.directory) / "checkpoints", lambda _: None)
    if found is None:
        return None
    told = outcome.result or {}
    board = outcome.words
    seconds = max(board["stopped"] - board["first_step"], 0) / 1e9 if board["first_step"] else 0.0
    standing = Standing.of(found, scheme, plan.workers)
    already = Standing.of(first, scheme, plan.workers).samples if first else 0
    return Result(
        scheme=scheme.name,
        task=outcome.task or plan.task or "task",
        workers=plan.hosts,
        micro=plan.micro if plan.exact else None,
        servers=plan.servers,
        **vars(standing),
        epochs=epochs_of(standing.samples, outcome.epoch_size),
        virtual_seconds=None,
        metrics=told.get("metrics", {}),
        vector=found.tensors["model"],
        seed=plan.seed,
        batch=outcome.batch or plan.batch or 0,
        hyper=build.hyper_of(scheme),
        history=Evaluations(Point.from_dict(line) for line in [*before, *outcome.history]),
        warnings=outcome.warnings,
        notice=outcome.notice,
        stopped=outcome.stopped or None,
        wall_seconds=seconds,
        samples_per_second=max(board["samples"] - already, 0) / seconds if seconds else 0.0,
        time_to_first_step=(board["first_step"] - board["began"]) / 1e9 if board["first_step"] else None,
        restarts=board["restarts"],
        rolled_back_updates=board["rolled_back"],
        lost_updates=max(board["reached"] - standing.updates, 0),
        peak_rss_mb=outcome.peak_rss / 1024,
        directory=plan.directory,
        fingerprint=fingerprint.last_of(Path(plan.directory)),
        profile=outcome.profile,
        compress=str(scheme.compressor or ""),
        traffic=outcome.traffic,
    )
