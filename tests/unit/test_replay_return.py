"""A replayed worker that returns to a checkpoint drops the means that it had started: its next ones may be of other
fragments, and another worker's contribution of the same number belongs to another mean."""

from __future__ import annotations

from pathlib import Path

import torch

from paceline.config import build
from paceline.config.plan import Plan
from paceline.runs.checkpoint import Checkpoint
from paceline.runs.order_history import History, WorkerLife
from paceline.runs.order_log import LogRecord, RecordKind
from paceline.runs.replay.worker_replay import WorkerReplay

GRAD, MEAN = LogRecord(RecordKind.GRAD, (0.0,)), RecordKind.MEAN
RETURN = LogRecord(RecordKind.NOTE, ({"return": 1},))


def replayed(tmp_path: Path, records: list[LogRecord]) -> WorkerReplay:
    plan = Plan(task="toy", scheme="streaming-diloco", workers=2)
    task = build.task_of("toy", {})
    scheme = build.scheme_of("streaming-diloco", {"window": 2, "overlap": 1, "fragments": 2}).fitted(task.parameters())
    begun = {"generation": 0, "position": 0, "cells": "", "t": 0, "gradients": 0, "overrides": {}}
    life = WorkerLife(0, 1, begun, records, cut=False)
    history = History(tmp_path, plan, {"resumed": False}, {}, [life])
    x0 = task.start(plan.seed)
    return WorkerReplay(history, life, scheme, task, x0, torch.device("cpu"), None, lambda *_: None)


def test_means_of_before_a_return_are_dropped(tmp_path: Path) -> None:
    worker = replayed(tmp_path, [GRAD, LogRecord(MEAN, (1,)), GRAD, RETURN, GRAD, LogRecord(MEAN, (2,)), GRAD])
    cells = {f"worker.0.{name}": tensor.clone() for name, tensor in worker.worker.state.saved().items()}
    begun = {"person.0": torch.zeros(3, dtype=torch.int64), "rng.0": worker.worker.rng.get_state()}
    assert not list(worker.go(None))
    assert list(worker.arrived) == [1]
    worker.go_back(1, Checkpoint(tmp_path, 0, cells | begun, {"overrides": {}}))
    assert not list(worker.go(None))
    assert list(worker.arrived) == [2]
