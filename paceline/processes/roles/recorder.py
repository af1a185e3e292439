"""What a real run writes down so that it can be repeated: who opens which log, which states are kept beside them."""

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
from paceline.processes.memory.run_memory import RunMemory
from paceline.runs import atomic_files
from paceline.runs.checkpoint import Checkpoint
from paceline.runs.order_log import ABOUT, FORMAT, START, OrderLogWriter, launches, place, returned, trim


def prepare(plan: Plan, versions: dict[str, Any], start: Checkpoint | None, objects: dict[str, Any]) -> None:
    """A launch begins. `start`: what it goes on from; `objects`: what was handed over without a name."""
    if not plan.record or plan.script:
        return
    at = place(plan.directory, plan.launch)
    at.mkdir(parents=True)
    if start is not None:
        _linked(start.path, at / START)
    hooks = [*map(build.hook_of, plan.hooks), *objects.get("hooks", ())]
    feeding = [type(hook).__name__ for hook in hooks if type(hook).feed is not Hook.feed]
    unnamed = [name for name in ("task", "scheme") if name in objects]
    about = {"format": FORMAT, "plan": asdict(plan), "resumed": start is not None, "versions": versions}
    atomic_files.write_json(at / ABOUT, about | {"unnamed": unnamed, "feeding": feeding})


def next_launch(directory: Path) -> int:
    """The number of the launch that begins now."""
    return 1 + max((int(path.name) for path in launches(directory)), default=0)


def trim_all(directory: Path) -> None:
    """Cut every log to what was written: those of processes that were killed still have room for more."""
    for path in sorted((directory / "order").glob("*/*.log")):
        with suppress(OSError):
            trim(path)


def keep_return(plan: Plan, generation: int, saved: Path) -> None:
    """The run goes back to a checkpoint: it stays beside the logs, however many are written after it."""
    if place(plan.directory, plan.launch).is_dir():
        _linked(saved, returned(place(plan.directory, plan.launch), generation))


def journal_of(memory: RunMemory, role: str, **header: Any) -> tuple[OrderLogWriter | None, int]:
    """A new log for a role that begins, and how often it has begun; none where the order of things is not known."""
    at = place(memory.plan.directory, memory.plan.launch)
    if not memory.plan.record or memory.plan.script or memory.direct() or not at.is_dir():
        return None, 1
    for life in count(1):
        path = at / f"{role}-{life}.log"
        try:
            return OrderLogWriter(path, {"role": role, "life": life, **header}), life
        except FileExistsError:
            trim(path)  # of a life that has ended
    raise AssertionError("numbers do not end")


def save_cells(memory: RunMemory, rank: int, life: int, generator: torch.Generator | None) -> str:
    """A worker's cells as they are now, beside its log; gives the file's name."""
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
    """The files of a checkpoint once more: the same ones where the file system can, else copies."""
    if target.exists():
        return
    aside = target.with_name(target.name + ".new")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    for file in source.iterdir():
        try:
            os.link(file, aside / file.name)
        except OSError:
            shutil.copyfile(file, aside / file.name)
    aside.rename(target)
