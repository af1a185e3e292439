"""A worker whose loop is a user's script: `play` runs the script, and `paceline.attach` in it finds its role here."""

from __future__ import annotations

import random
import runpy
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch

from paceline.errors import RunError, UsageError
from paceline.framework_tasks.framework_start import limit_threads
from paceline.hook import Hook
from paceline.processes.inside import watched
from paceline.processes.memory.board import FAILED, STOP
from paceline.processes.memory.run_memory import RunMemory
from paceline.processes.roles import script_output
from paceline.processes.roles.control_channel import Control

HooksWith = Callable[[list[Hook]], list[Hook]]  # those that attach() was given, and those of the whole run


@dataclass
class ScriptRole:
    """What a launcher has given this process to do."""

    memory: RunMemory
    rank: int
    hooks_with: HooksWith
    control: Control
    loop: Any = None  # the `Pace` that `attach` gave the script


_role: ScriptRole | None = None


def role() -> ScriptRole | None:
    """This process's role; None: the script was started by itself."""
    return _role


def seed_all(seed: int) -> None:
    """Seed the random numbers of Python, numpy and torch."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def play(memory: RunMemory, rank: int, hooks_with: HooksWith, control: Control) -> None:
    """Run the plan's script as a worker."""
    global _role
    script, *arguments = memory.plan.script
    if not Path(script).is_file():
        raise UsageError(f"no script {script!r} (looked in {Path.cwd()})")
    _role = own = ScriptRole(memory, rank, hooks_with, control)
    seed_all(memory.plan.seed)  # alike on all workers, until attach(): a script may split its data at random
    limit_threads(memory.plan.threads)
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    shown = memory.plan.prints == "all" or (memory.plan.prints == "chief" and rank == 0)
    try:
        with script_output.forwarded(control.send) if shown else nullcontext():
            runpy.run_path(script, run_name="__main__")
    except SystemExit as error:
        if error.code:
            raise RunError(f"{script} called sys.exit({error.code!r})") from error
    except Exception:
        watched.settle()
        raise
    if memory.board.run[STOP] == FAILED:
        return  # the process that failed has said why
    if own.loop is None:
        raise UsageError(
            f"{script} has ended without paceline.attach(): put its training loop into a block "
            "`with paceline.attach(model, …) as pace:`, or run it with python"
        )
    if not own.loop.begun:
        raise UsageError(f"{script} has called paceline.attach() and never entered its block: write `with` before it")
    if not own.loop.ended:
        raise RunError(f"{script} called sys.exit() inside the block of attach(); use break, or pace.stop(reason)")
