"""The profile of a launch, from the words of the board and the traces in the run directory."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from paceline.config.plan import Plan
from paceline.processes.memory.board import Board
from paceline.processes.roles.step_trace import FOLDER, SKIPPED, file_of
from paceline.processes.roles.stopwatch import CATEGORIES
from paceline.result import Profile
from paceline.runs import atomic_files

TIMES = "times.json"


def clear(directory: Path) -> None:
    """Delete the profile of an earlier launch."""
    for path in [*(directory / FOLDER).glob("*.trace.json.gz"), directory / FOLDER / TIMES]:
        path.unlink(missing_ok=True)


def collected(plan: Plan, board: Board) -> Profile | None:
    """The profile, if the run was to have one. Boards of all nodes are alike: it has the roles of all nodes."""
    if not plan.profile:
        return None
    places = {f"worker:{rank}": rank for rank in range(plan.workers)}
    places |= {f"server:{shard}": board.server_place(shard) for shard in range(min(plan.servers, board.servers))}
    roles = {
        role: {name: board.times[place][number] / 1e9 for number, name in enumerate(CATEGORIES)}
        for role, place in places.items()
        if any(board.times[place])
    }
    notes = _note("no times of", places.keys() - roles.keys(), "no step was begun there")
    directory, traced = Path(plan.directory), range(plan.hosts)
    traces = [file_of(rank) for rank in traced if (directory / file_of(rank)).exists()]
    absent = [rank for rank in traced if file_of(rank) not in traces]
    seen = board.node[0]
    short = [f"worker:{rank}" for rank in absent if board.node[rank] == seen]
    far = [f"worker:{rank}" for rank in absent if board.node[rank] != seen]
    if any(hook.startswith("profiler") for hook in plan.hooks):
        notes.append("the hook profiler traces in place of --profile")
    else:
        notes += _note("no trace of", short, f"a trace begins after {SKIPPED} steps")
        notes += _note("no trace of", far, f"it begins after {SKIPPED} steps, on nodes that see the run directory")
    return Profile(roles, traces, notes)


def _note(what: str, names: Iterable[str], why: str) -> list[str]:
    """A sentence on what is missing, if anything is."""
    known = sorted(names)
    return [f"{what} {', '.join(known)}: {why}"] if known else []


def write(directory: Path, profile: Profile | None) -> None:
    """Write the profile to the run directory. A full disk does not end the run here: the result has it too."""
    if profile is not None:
        with suppress(OSError):
            (directory / FOLDER).mkdir(exist_ok=True)
            atomic_files.write_json(directory / FOLDER / TIMES, asdict(profile))
