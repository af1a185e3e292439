"""`sums.json` of a run directory: the SHA-256 of the run's files, to detect later changes.

A sum is recorded before its file is written. Until the end of the launch the former content is valid too: a process
that is killed between the two writes leaves nothing that looks changed. Not covered: `checkpoints/` and the tensors in
`best/`, whose manifests have sums of their own, `logs/` and `summaries/`, which are never read back, and
`progress.jsonl`, which only `paceline watch` shows.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.errors import DataError
from paceline.runs import atomic_files

FILE, FORMAT = "sums.json", 1
_COVERED = ("plan.json", "fingerprint.json", "result.json", "history.jsonl", "best/**/*.json", "order/**/*")
_WITH_OWN_SUMS = "order/*/*/*.safetensors"  # tensors of checkpoints
_FOR_ALL_LAUNCHES = ("plan.json", "fingerprint.json")  # files that a resumed run reads, besides the order logs


@dataclass
class Sums:
    """The recorded sums. `ended`: the list is complete, because the launch ended in order."""

    files: dict[str, list[str]] = field(default_factory=dict)  # name -> SHA-256 of valid contents; empty: any
    ended: bool = False


def read(root: Path) -> Sums | None:
    """The sums of a run; None for a run of a version that did not record them."""
    if not (root / FILE).exists():
        return None
    content = atomic_files.read_json(root / FILE)
    noted = content.pop("sha256", None)
    files = content.get("files")
    if noted != _seal(content) or content.get("format") != FORMAT or not isinstance(files, dict):
        raise DataError(f"{FILE} is not what was written; delete it to use the run without these sums")
    return Sums(files, bool(content.get("ended")))


def write_json(root: Path, name: str, content: Any) -> None:
    """Write a JSON file of the run directory and record its sum."""
    text = atomic_files.json_bytes(content)
    sums = _known(root)
    before = sums.files.get(name, [])[-1:] or ([_sum(root / name)] if (root / name).is_file() else [])
    sums.files[name] = list(dict.fromkeys([*before, hashlib.sha256(text).hexdigest()]))
    sums.ended = False
    _write(root, sums)
    with atomic_files.failing_as(f"{root / name} could not be written"):
        atomic_files.write_bytes(root / name, text)


def begin(root: Path) -> None:
    """A launch begins: forget the sums of files that it changes. The order logs of earlier launches are final."""
    before = _known(root).files
    kept = {name: sums for name, sums in before.items() if name in _FOR_ALL_LAUNCHES or name.startswith("order/")}
    added = {name: [_sum(root / name)] for name in _present(root) if name.startswith("order/") and name not in kept}
    _write(root, Sums(kept | added))


def end(root: Path) -> None:
    """A launch has ended in order: record every file. Earlier sums stay, so that no change is approved."""
    final = {name: sums[-1:] for name, sums in _known(root).files.items()}
    for name in _present(root):
        if name not in final:
            # a process on a host that the run has lost may still write its log
            final[name] = [] if atomic_files.is_locked(root / name) else [_sum(root / name)]
    _write(root, Sums(final, ended=True))


def check(root: Path, name: str) -> None:
    """Raise DataError if a file is not what was written."""
    for attempt in (1, 2):  # a living run may replace the file and the sums in between
        sums = read(root)
        if sums is None or name not in sums.files or not (root / name).exists():
            return
        if not sums.files[name] or _sum(root / name) in sums.files[name]:
            return
        if attempt == 2:
            raise DataError(_altered(name))


def changed(root: Path, under: str = "") -> list[str]:
    """The changes since the sums were recorded: a sentence for each file whose name begins with `under`."""
    sums, found = read(root), []
    for name, right in sums.files.items() if sums is not None else ():
        if not name.startswith(under):
            continue
        if not (root / name).is_file():
            found.append(f"{name} is missing")
        elif right and _sum(root / name) not in right:
            found.append(_altered(name))
    if sums is not None and sums.ended:
        strange = [name for name in _present(root) if name not in sums.files and name.startswith(under)]
        found += [f"{name} was not there when the run ended" for name in strange]
    return found


def _known(root: Path) -> Sums:
    return read(root) or Sums()


def _present(root: Path) -> Iterator[str]:
    for pattern in _COVERED:
        for path in sorted(root.glob(pattern)):
            if path.is_file() and not path.match(_WITH_OWN_SUMS) and not path.name.startswith("."):
                yield path.relative_to(root).as_posix()


def _altered(name: str) -> str:
    return f"{name} is not what was written (its SHA-256 is not that of {FILE})"


def _write(root: Path, sums: Sums) -> None:
    content = {"format": FORMAT, "ended": sums.ended, "files": sums.files}
    atomic_files.write_json(root / FILE, content | {"sha256": _seal(content)})


def _seal(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _sum(path: Path) -> str:
    try:
        return atomic_files.sha256(path)
    except OSError as error:
        raise DataError(f"{path.name} cannot be read: {atomic_files.cause(error)}") from error
