"""The order logs of a run, by which it can be replayed: opens them, keeps the states that a replay starts from, and
records what a worker does."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from paceline.config import build
from paceline.config.plan import Plan
from paceline.hook import Hook
from paceline.processes.calls.client import CallClient
from paceline.processes.memory import snapshot
from paceline.processes.memory.board import fence
from paceline.processes.memory.run_memory import RunMemory
from paceline.processes.roles.waiting import Waiting
from paceline.processes.roles.worker_cells import WorkerCells
from paceline.processes.transport import Means
from paceline.result import digest
from paceline.runs import atomic_files, order_log, times_log
from paceline.runs.checkpoint import Checkpoint
from paceline.runs.order_log import OrderLogWriter, RecordKind, launches, place, returned, trim
from paceline.runs.times_log import Spent, Times

GRAD, STEP = RecordKind.GRAD, RecordKind.STEP  # bound here: looking up a member of an enum is slow


def prepare(plan: Plan, versions: dict[str, Any], start: Checkpoint | None, objects: dict[str, Any]) -> None:
    """Make the folder of a launch. `start`: the checkpoint that it resumes from; `objects`: those without a name."""
    if not plan.record or plan.script:
        return
    at = place(plan.directory, plan.launch)
    at.mkdir(parents=True)
    if start is not None:
        _linked(start.path, at / order_log.START)
    hooks = [*map(build.hook_of, plan.hooks), *objects.get("hooks", ())]
    feeding = [type(hook).__name__ for hook in hooks if type(hook).feed is not Hook.feed]
    unnamed = [name for name in ("task", "scheme") if name in objects]
    about = {"format": order_log.FORMAT, "plan": asdict(plan), "resumed": start is not None, "versions": versions}
    atomic_files.write_json(at / order_log.ABOUT, about | {"unnamed": unnamed, "feeding": feeding})


def next_launch(directory: Path) -> int:
    """The number of the next launch."""
    return 1 + max((int(path.name) for path in launches(directory)), default=0)


def trim_all(directory: Path) -> None:
    """Cut every log to its records: a process that was killed has left its log longer."""
    for path in sorted((directory / "order").glob("*/*.log")):
        with suppress(OSError):
            trim(path)
    for path in sorted((directory / "order").glob(f"*/*{times_log.SUFFIX}")):
        times_log.trim(path)


def keep_return(plan: Plan, generation: int, saved: Path) -> None:
    """The run returns to a checkpoint: keep it beside the logs, where newer checkpoints do not replace it."""
    if place(plan.directory, plan.launch).is_dir():
        _linked(saved, returned(place(plan.directory, plan.launch), generation))


def journal_of(memory: RunMemory, role: str, **header: Any) -> tuple[OrderLogWriter | None, int]:
    """A new log for a role that starts, and the number of its life; None for runs that cannot be replayed."""
    if not memory.recorded():
        return None, 1
    at = place(memory.plan.directory, memory.plan.launch)
    for life in count(1):
        path = at / f"{role}-{life}.log"
        try:
            on_gpu = {"gpu": True} if memory.on_gpu else {}  # where calls and means are computed: it decides their bits
            return OrderLogWriter(path, {"role": role, "life": life, **header, **on_gpu}), life
        except FileExistsError:
            trim(path)  # of an earlier life
    raise AssertionError("unreachable")


def save_cells(memory: RunMemory, rank: int, life: int, generator: torch.Generator | None) -> str:
    """Write a worker's cells to a file beside its log; gives the file's name."""
    state = memory.worker_state(rank)
    tensors = {f"cell.{name}": state.cell(name).clone() for name in state}
    tensors |= {f"buffer.{name}": buffer.clone() for name, buffer in memory.buffers(rank).items()}
    if generator is not None:
        tensors["rng"] = generator.get_state()
    at = place(memory.plan.directory, memory.plan.launch)
    for number in count():
        name = f"worker-{rank}-{life}.{number}.safetensors"
        if not (at / name).exists():
            break
    save_file(tensors, at / name)
    return name


def _linked(source: Path, target: Path) -> None:
    """Link the files of a checkpoint to another folder; copy them where the file system cannot link."""
    if target.exists():
        return
    with atomic_files.writing(target.parent) as folder:
        for file in source.iterdir():
            try:
                os.link(file, folder / file.name)
            except OSError:
                shutil.copyfile(file, folder / file.name)
        atomic_files.put(folder, target.name)


class RunLog:
    """One worker's log; where the run keeps none, every method does nothing."""

    def __init__(self, memory: RunMemory, rank: int, cells: WorkerCells, waiting: Waiting) -> None:
        self._memory, self._rank, self._cells, self._waiting = memory, rank, cells, waiting
        self._journal, self._life = journal_of(memory, f"worker-{rank}", rank=rank)
        self._times = self._new_times() if self._journal is not None else None
        self.stamp = self._times.stamp if self._times is not None else None
        self._began = False  # the log says from which cells this life began

    @property
    def journal(self) -> OrderLogWriter | None:
        return self._journal

    def _new_times(self) -> Times | None:
        """A file of the times of this life; None if it cannot be written."""
        memory, rank = self._memory, self._rank
        path = times_log.path_of(place(memory.plan.directory, memory.plan.launch), rank, self._life)
        methods = sorted(memory.scheme.methods)
        header = {"rank": rank, "life": self._life, "began": memory.board.get("began"), "methods": methods}
        with suppress(OSError):
            return Times(path, header)
        return None

    def spent(self, kind: Spent, began: int) -> None:
        """Note an interval that ends now."""
        if self.stamp is not None:
            self.stamp(kind, began)

    def start(self, calls: CallClient | None, means: Means) -> bool:
        """Record where this life begins, and with which cells if they are not those of the run's start; from now on
        calls and means record too. False if the run has returned to a checkpoint meanwhile: then the servers' position
        is of another generation than this worker."""
        position = int(self._memory.board.performed[0])
        fence()
        if self._waiting.rolled_back():
            return False
        if not self._began:
            self.cells(position, first=self._life == 1 and not self._waiting.generation)
        means.journal = self._journal
        if calls is not None:
            calls.journal = self._journal
        return True

    def cells(self, position: int = 0, *, first: bool = False) -> None:
        """Record the worker's step and cells: a replay cannot know what the process before had done."""
        if self._journal is None:
            return
        board, rank, self._began = self._memory.board, self._rank, True
        self._cells.mirror()
        name = None if first else save_cells(self._memory, rank, self._life, self._cells.worker._rng)
        counts = {"t": board.t[rank], "v": int(self._cells.shared.v), "gradients": board.gradients[rank]}
        where = {"generation": self._waiting.generation, "position": position, "cells": name}
        self._journal.note(counts | {"overrides": self._memory.overrides} | where)

    def stopped(self) -> None:
        """Record that a gradient was given up."""
        if self._journal is not None:
            self._journal.add(RecordKind.STOPPED)

    def step(self, *, flush: bool) -> None:
        if (journal := self._journal) is not None:
            if flush:
                journal.record(STEP)
            else:
                journal.add(STEP)

    def change(self, hyper: dict[str, Any]) -> None:
        """Record hyper-parameters that a hook has changed."""
        if self._journal is not None:
            self._journal.text(RecordKind.CHANGE, hyper)

    def checkpoint(self) -> None:
        """Record the checkpoint that the chief has written."""
        if self._journal is not None:
            model = snapshot.model_of(self._memory, prefix=snapshot.KEEP)
            step = self._memory.board.get("checkpoint")
            told = {"checkpoint": step, "digest": digest(model), "generation": self._waiting.generation}
            of = {"of": snapshot.averaged(self._memory, snapshot.KEEP)} if self._memory.scheme.decentralised else {}
            self._journal.note(told | of)

    def returned(self, generation: int) -> None:
        """Record that the worker has returned to a checkpoint."""
        if self._journal is not None:
            self._journal.note({"return": generation, "t": self._memory.board.t[self._rank]})

    def end(self) -> None:
        if self._journal is not None:
            self._journal.add(RecordKind.END)
            self._journal.flush()

    def close(self) -> None:
        if self._journal is not None:
            self._journal.close()
        if self._times is not None:
            self._times.close()
