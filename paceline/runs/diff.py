"""`diff` compares two runs: their final bits, what determined them, and where they first differ."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

from paceline.errors import DataError
from paceline.result import digest
from paceline.runs import checkpoint, fingerprint
from paceline.runs.checkpoint import Checkpoint
from paceline.runs.fingerprint import Fingerprint, differing
from paceline.runs.order_history import read_all
from paceline.runs.run_directory import RunDirectory
from paceline.state import Vector

COUNTS = ("updates", "gradients", "dropped", "samples")
Pair = tuple[Any, Any]


@dataclass(frozen=True)
class Parting:
    """The first common checkpoint at which the models differ."""

    update: int
    same_until: int | None  # the last common checkpoint at which they are equal
    numbers: int  # elements that differ
    of: int  # elements of the model
    largest: float | None  # the largest difference; None if one is NaN
    parameter: str | None  # the first parameter that differs, if the checkpoints have names


@dataclass(frozen=True)
class Difference:
    """Two runs side by side. Every pair is (of the first, of the second); equal values are omitted."""

    runs: tuple[str, str]
    same: bool  # the final models have the same bits
    updates: tuple[int, int]  # of the final models
    digests: tuple[str, str]
    fingerprints: tuple[str | None, str | None]
    config: dict[str, Pair]
    data: dict[str, Pair]
    versions: dict[str, Pair]
    counts: dict[str, Pair]
    common: tuple[int, ...]  # updates of which both runs have a whole checkpoint
    model: Parting | None
    history: dict[str, Any] | None  # the first evaluation that differs, if the bits differ
    order: dict[str, Any] | None
    notes: tuple[str, ...] = ()  # what could not be compared, and why

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)


def diff(a: str | Path, b: str | Path) -> Difference:
    """Whether two runs have the same final bits, and if not, where they first differ."""
    runs = RunDirectory.open(a), RunDirectory.open(b)
    notes: list[str] = []
    last = [_newest(run, notes) for run in runs]
    digests = digest(last[0].model), digest(last[1].model)
    noted = [_noted(run, notes) for run in runs]
    parts: dict[str, dict[str, Pair]] = {"config": {}, "data": {}, "versions": {}}
    if noted[0] is not None and noted[1] is not None:
        parts = {name: differing(getattr(noted[0], name), getattr(noted[1], name)) for name in parts}
        if noted[0].before != noted[1].before:
            parts["config"]["earlier launches"] = noted[0].before, noted[1].before
    common, parting = _parting(*runs, notes)
    same = digests[0] == digests[1]
    return Difference(
        runs=(runs[0].name, runs[1].name),
        same=same,
        updates=(last[0].step, last[1].step),
        digests=digests,
        fingerprints=(fingerprint.last_of(runs[0].path), fingerprint.last_of(runs[1].path)),
        **parts,
        counts=differing(*(_counts(run, notes) for run in runs)),
        common=tuple(common),
        model=parting,
        # the chief may evaluate an update while the next is made: of equal runs a difference says nothing
        history=None if same else _first_other_evaluation(*(run.history(_noting(run, notes)) for run in runs)),
        order=order_parts(runs[0].path, runs[1].path, notes.append),
        notes=tuple(dict.fromkeys(notes)),
    )


def order_parts(a: Path, b: Path, say: Callable[[str], None] = lambda _: None) -> dict[str, Any] | None:
    """The first difference in the order of the servers' calls; None if they are the same, or not known."""
    try:
        rows = [[row for launch in read_all(run) for row in launch.rows()] for run in (a, b)]
    except DataError as error:
        say(str(error))
        return None
    if not all(rows):
        return None
    for number, pair in enumerate(zip_longest(*rows)):
        if pair[0] != pair[1]:
            return {"call": number + 1, "a": pair[0] or "nothing more", "b": pair[1] or "nothing more"}
    return None


def _noting(run: RunDirectory, notes: list[str]) -> Callable[[str], None]:
    return lambda text: notes.append(f"{run.name}: {text}")


def _newest(run: RunDirectory, notes: list[str]) -> Checkpoint:
    found = checkpoint.newest(run.checkpoints, _noting(run, notes))
    if found is None:
        raise DataError(f"run {run.name} has no whole checkpoint: there is no model to compare")
    return found


def _noted(run: RunDirectory, notes: list[str]) -> Fingerprint | None:
    try:
        launches = fingerprint.read(run.path)
    except DataError as error:
        notes.append(f"{run.name}: {error}")
        return None
    if not launches:
        notes.append(f"{run.name} has no {fingerprint.FILE}: an earlier version wrote it")
        return None
    return launches[-1].fingerprint


def _counts(run: RunDirectory, notes: list[str]) -> dict[str, Any]:
    try:
        result = run.result()
    except DataError as error:
        notes.append(str(error))
        return {}
    if result is None:
        notes.append(f"{run.name} has no result.json: it is running, or was broken off")
    return {name: (result or {}).get(name) for name in COUNTS}


def _parting(a: RunDirectory, b: RunDirectory, notes: list[str]) -> tuple[list[int], Parting | None]:
    """The common whole checkpoints, up to the first at which the models differ."""
    shared = sorted({*checkpoint.steps(a.checkpoints)} & {*checkpoint.steps(b.checkpoints)})
    compared: list[int] = []
    for step in shared:
        try:
            one, other = (checkpoint.of_step(run.checkpoints, step) for run in (a, b))
            x, y = one.model, other.model
        except DataError as error:
            notes.append(str(error))
            continue
        if x.shape != y.shape or x.dtype != y.dtype:
            shown = " and ".join(f"{v.numel():,} numbers of {str(v.dtype).removeprefix('torch.')}" for v in (x, y))
            notes.append(f"the models have {shown}: they cannot be compared number by number")
            return compared, None
        if digest(x) != digest(y):
            return [*compared, step], _parted(step, compared[-1] if compared else None, x, y, one.numbers)
        compared.append(step)
    return compared, None


def _parted(step: int, same_until: int | None, x: Vector, y: Vector, numbers: Mapping[str, Any]) -> Parting:
    width = x.element_size()  # compared by bits, as the digest is: -0.0 is not 0.0, and NaN may equal NaN
    other = (x.contiguous().view(torch.uint8) != y.contiguous().view(torch.uint8)).view(-1, width).any(1)
    largest = (x.double() - y.double()).abs().max().item()
    place = int(other.nonzero()[0])
    return Parting(
        update=step,
        same_until=same_until,
        numbers=int(other.sum()),
        of=x.numel(),
        largest=largest if math.isfinite(largest) else None,
        parameter=_name_at(place, numbers.get("parameters")),
    )


def _name_at(place: int, parameters: Any) -> str | None:
    """The parameter that an element of the vector belongs to."""
    for name, shape in parameters or ():
        place -= math.prod(shape)
        if place < 0:
            return str(name)
    return None


def _first_other_evaluation(a: list[dict[str, Any]], b: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The first evaluation that differs, apart from times and lines of hooks, which may differ between equal runs."""
    mine, theirs = ({one["update"]: one for one in lines if "loss" in one and "update" in one} for lines in (a, b))
    for update in sorted(mine.keys() & theirs.keys()):
        keys = (mine[update].keys() & theirs[update].keys()) - {"seconds", "update"}
        parted = {key: (mine[update][key], theirs[update][key]) for key in sorted(keys)}
        parted = {key: pair for key, pair in parted.items() if pair[0] != pair[1]}
        if parted:
            return {"update": update, "metrics": parted}
    return None
