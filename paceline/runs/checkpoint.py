"""Checkpoints on disk: named tensors and plain numbers, written atomically and never pickled.

checkpoints/0000000400/state.safetensors    the tensors
checkpoints/0000000400/manifest.json        the numbers, SHA-256 sums to detect damage, and `aliases`: names of tensors
                                            that are in the file once, under the name of another one with the same bits
best/0000000400/                            a copy of the best checkpoint so far, and `best.json`: its metrics
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from paceline import __version__
from paceline.errors import DataError, UnknownName, UsageError
from paceline.runs import atomic_files, tensor_file

R = TypeVar("R")
FORMAT = 1
STATE, MANIFEST, BEST = "state.safetensors", "manifest.json", "best.json"


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint: `model` and `model_buffer.NAME` are evaluated, the other tensors are for resuming."""

    path: Path
    step: int
    tensors: dict[str, Tensor]
    numbers: dict[str, Any]

    @property
    def model(self) -> Tensor:
        """The parameters; DataError if there are none."""
        if "model" not in self.tensors:
            raise DataError(f"checkpoint {self.path} holds no tensor 'model': paceline did not write it")
        return self.tensors["model"]

    def under(self, prefix: str) -> dict[str, Tensor]:
        """The tensors whose names begin with a prefix, by the rest of their names."""
        return {name.removeprefix(prefix): one for name, one in self.tensors.items() if name.startswith(prefix)}


@dataclass(frozen=True)
class Best:
    """The best checkpoint so far by a metric."""

    path: Path
    step: int
    metric: str
    value: float
    smaller_is_better: bool
    metrics: dict[str, float]


def save(
    directory: Path, step: int, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any], *, keep: int = 5
) -> Path:
    """Write a checkpoint, then delete all but the last `keep`. `numbers` is plain data that JSON can hold.

    A checkpoint of the same step is replaced. Older ones are deleted after the new one is on the disk.
    """
    if keep < 1:
        raise UsageError(f"keep must be at least 1, not {keep}: the checkpoint itself is one")
    what = f"checkpoint of step {step} could not be written to {directory}"
    with atomic_files.failing_as(what), atomic_files.writing(directory) as folder:
        _write(folder, step, tensors, numbers)
        place = atomic_files.put(folder, f"{step:010d}")
        _prune(directory, step, keep)
    return place


def load(path: Path) -> Checkpoint:
    """Read a checkpoint; DataError says what is wrong with a damaged one."""
    manifest = _manifest(path)
    try:
        if atomic_files.sha256(path / STATE) != manifest["sha256"]:
            raise _damaged(path, f"the bytes of {STATE} are not those that were written (SHA-256)")
        # copied out of the file: a later deletion cannot reach them, and they are aligned in memory like new tensors,
        # on which the last bits of a matrix product can depend
        tensors = {name: tensor.clone() for name, tensor in load_file(path / STATE).items()}
        tensors |= {name: tensors[other].clone() for name, other in manifest.get("aliases", {}).items()}
    except (OSError, SafetensorError) as error:
        raise _damaged(path, f"{STATE} cannot be read: {atomic_files.cause(error)}") from error
    return Checkpoint(path, manifest["step"], tensors, manifest["numbers"])


def newest(directory: Path, say: Callable[[str], None]) -> Checkpoint | None:
    """The newest whole checkpoint; `say` is called for each damaged one that was passed over."""
    return next(_readable(reversed(folders(directory)), load, say), None)


def resumed_from(directory: Path, say: Callable[[str], None]) -> Checkpoint | None:
    """The newest whole checkpoint; None if none was ever written. DataError if all are damaged: whether to train from
    the beginning instead is the user's decision."""
    found = newest(directory, say)
    if found is None and folders(directory):
        raise DataError(f"no checkpoint in {directory} is whole: there is nothing to resume from; train a new run")
    return found


def steps(directory: Path, say: Callable[[str], None] = lambda _: None) -> list[int]:
    """The steps that have a checkpoint, in order. Only manifests are read; `say` is called for damaged ones."""
    return sorted({_step(path) for path, _ in _readable(folders(directory), lambda path: (path, _manifest(path)), say)})


def of_step(directory: Path, step: int) -> Checkpoint:
    """The checkpoint of a step; DataError if it is not there."""
    path = find(directory, step)
    if path is None:
        raise DataError(f"the checkpoint of update {step} is not in {directory}")
    return load(path)


def find(directory: Path, step: int) -> Path | None:
    """The folder of that step's checkpoint, whole or damaged."""
    return next((path for path in reversed(folders(directory)) if _step(path) == step), None)


def best(run: Path, say: Callable[[str], None] = lambda _: None) -> Best | None:
    """The best checkpoint of a run directory, if one was kept; `say` is called for damaged ones."""
    chosen = None
    for one in _readable(folders(run / "best"), _read_best, say):  # two only if a crash kept the old one
        if chosen is None or _beats(one.value, chosen):
            chosen = one
    return chosen


def keep_best(
    run: Path, checkpoint: Checkpoint, metrics: Mapping[str, float], metric: str, *, smaller_is_better: bool
) -> bool:
    """Write this checkpoint to the run's `best` if it beats the one there; True if it did. The files that it was read
    from may have been deleted."""
    if metric not in metrics:
        raise UnknownName("metric", metric, metrics)
    value, before = metrics[metric], best(run)
    if math.isnan(value):
        return False
    same = before is not None and (before.metric, before.smaller_is_better) == (metric, smaller_is_better)
    if before is not None and same and not _beats(value, before):
        return False
    step, directory = checkpoint.step, run / "best"
    with (
        atomic_files.failing_as(f"the best checkpoint, of step {step}, could not be written to {directory}"),
        atomic_files.writing(directory) as folder,
    ):
        _write(folder, step, checkpoint.tensors, checkpoint.numbers)
        told = {"step": step, "metric": metric, "value": value, "smaller_is_better": smaller_is_better}
        _save_json(folder / BEST, told | {"metrics": dict(metrics)})
        place = atomic_files.put(folder, f"{step:010d}")
        for other in folders(directory):
            if other != place:
                atomic_files.discard(other)
    return True


def _beats(value: float, held: Best) -> bool:
    return value < held.value if held.smaller_is_better else value > held.value


def _read_best(path: Path) -> Best:
    step = _manifest(path)["step"]
    try:
        told = atomic_files.read_json(path / BEST)
        value, metrics = float(told["value"]), {str(name): float(one) for name, one in told["metrics"].items()}
        return Best(path, step, str(told["metric"]), value, bool(told["smaller_is_better"]), metrics)
    except DataError as error:
        raise _damaged(path, str(error)) from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _damaged(path, f"{BEST} is not what was written: {error!r}") from error


# writing


def _prune(directory: Path, step: int, keep: int) -> None:
    """Delete older checkpoints. Damaged ones do not count, and later ones are of a course that a return gave up."""
    whole, kept = steps(directory), 1
    for path in reversed(folders(directory)):
        if _step(path) >= step:
            continue
        if kept >= keep:
            with suppress(OSError):  # the new checkpoint is safe all the same
                atomic_files.discard(path)
        elif _step(path) in whole:
            kept += 1


def _write(folder: Path, step: int, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any]) -> None:
    _text(numbers)  # refused before the tensors are written
    written = tensor_file.write(folder / STATE, tensors, first=("model",))
    manifest = {
        "format": FORMAT,
        "step": step,
        "numbers": dict(numbers),
        "sha256": written.sha256,
        "sizes": {STATE: (folder / STATE).stat().st_size},
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"paceline": __version__, "torch": str(torch.__version__), "python": platform.python_version()},
    }
    if written.aliases:
        manifest["aliases"] = written.aliases
    _save_json(folder / MANIFEST, manifest | {"manifest_sha256": _sum_of(manifest)})


def _save_json(path: Path, content: Mapping[str, Any]) -> None:
    text = _text(content, indent=1)
    if len(text) > atomic_files.LARGEST_JSON:
        raise UsageError(f"{path.name} of {len(text):,} bytes is too large: put arrays into tensors, not into numbers")
    path.write_bytes(text)
    atomic_files.sync(path)


def _text(content: Mapping[str, Any], indent: int | None = None) -> bytes:
    try:
        return json.dumps(content, indent=indent).encode()
    except (TypeError, ValueError) as error:
        raise UsageError(f"the numbers of a checkpoint must be plain data that JSON can hold: {error}") from None


# reading


def _readable(paths: Iterable[Path], read: Callable[[Path], R], say: Callable[[str], None]) -> Iterator[R]:
    """What `read` gives for each path; `say` is called for damaged ones."""
    for path in paths:
        try:
            found = read(path)
        except DataError as error:
            say(f"passed over: {error}")
        else:
            yield found


def folders(directory: Path) -> list[Path]:
    """The checkpoints of a directory, whole or damaged, oldest first; of one step the newer comes last."""
    name = re.compile(rf"\d{{10,}}({re.escape(atomic_files.NEW)})?")
    found = [path for path in directory.iterdir() if name.fullmatch(path.name)] if directory.is_dir() else []
    return sorted(found, key=lambda path: (_step(path), path.name))


def _step(path: Path) -> int:
    return int(path.name.removesuffix(atomic_files.NEW))


def _manifest(path: Path) -> dict[str, Any]:
    """The manifest; DataError if it, or the size of the tensors' file, is not what was written."""
    if not path.is_dir():
        raise DataError(f"there is no checkpoint {path}")
    try:
        manifest = atomic_files.read_json(path / MANIFEST)
    except DataError as error:
        raise _damaged(path, str(error)) from error
    if manifest.get("format") != FORMAT:
        found = manifest.get("format")
        raise _damaged(path, f"{MANIFEST} is of format {found!r}; this version of paceline reads format {FORMAT}")
    if manifest.pop("manifest_sha256", None) != _sum_of(manifest):
        raise _damaged(path, f"{MANIFEST} is not what was written (SHA-256)")
    for key, kind in (("step", int), ("numbers", dict), ("sha256", str), ("sizes", dict)):
        if not isinstance(manifest.get(key), kind):
            raise _damaged(path, f"{MANIFEST} has no {key}")
    try:
        size = (path / STATE).stat().st_size
    except OSError as error:
        raise _damaged(path, f"{STATE} cannot be read: {atomic_files.cause(error)}") from error
    if size != manifest["sizes"].get(STATE):
        raise _damaged(path, f"{STATE} has {size:,} bytes, not {manifest['sizes'].get(STATE)}")
    return manifest


def _damaged(path: Path, what: str) -> DataError:
    return DataError(f"checkpoint {path} is damaged: {what}")


def _sum_of(content: Mapping[str, Any]) -> str:
    """SHA-256 of the content as JSON in a fixed order: the same before writing and after reading."""
    kept = json.dumps(json.loads(_text(content)), sort_keys=True)
    return hashlib.sha256(kept.encode()).hexdigest()
