"""A run directory: all files of one run.

runs/mnist-mlp-sync-001/
  plan.json           the settings                      history.jsonl      evaluations, a line each
  checkpoints/ best/  see `checkpoint`                  result.json        the result, or the error
  logs/ summaries/    of the processes, of TensorBoard  lock               held while the run lives
  fingerprint.json    what determined the result, of each launch
  progress.jsonl      how it went, for people: see `progress_log`
  sums.json           SHA-256 of these files: see `file_sums`
"""

from __future__ import annotations

import difflib
import fcntl
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

from paceline.errors import DataError, PacelineError, UsageError
from paceline.fields import finite
from paceline.runs import atomic_files, file_sums

RUNS = Path("runs")
STATUS = "status.json"
_NUMBER = int | float
_KINDS: dict[str, Any] = {  # types of the keys of a result that are read back
    **{"updates": int, "gradients": int, "samples": int, "wall_seconds": _NUMBER, "digest": str, "fingerprint": str},
    **{"metrics": dict, "staleness": dict, "history": list, "error": str, "stopped": str, "task": str, "scheme": str},
}


class RunState(StrEnum):
    """The state of a run. Every table of runs has an entry for each member, which a test checks."""

    RUNNING = "running"
    DONE = "done"
    INTERRUPTED = "interrupted"  # ended in order by a signal
    FAILED = "failed"
    BROKEN_OFF = "broken off"  # no living process and no result
    DAMAGED = "damaged"  # its result cannot be read


@dataclass(frozen=True)
class RunDirectory:
    """The paths of one run, and access to its files."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def summaries(self) -> Path:
        return self.path / "summaries"

    @property
    def started(self) -> datetime:
        """The time of the last launch, which writes the plan."""
        return datetime.fromtimestamp(_age(self.path)[0], UTC)

    @classmethod
    def create(cls, path: str | Path | None, name: str, root: Path = RUNS, *, prepared: bool = False) -> RunDirectory:
        """The given directory, which must be new or empty, or else the next free `root/NAME-NUMBER`.
        `prepared`: a launcher may have put files there for this run."""
        try:
            if path is not None and prepared and Path(path).is_dir() and not (Path(path) / "plan.json").exists():
                run = cls(Path(path))
            else:
                run = cls(_numbered(root, name) if path is None else _unused(Path(path)))
            for folder in (run.checkpoints, run.logs, run.summaries):
                folder.mkdir(exist_ok=True)
        except OSError as error:
            where, why = root if path is None else path, atomic_files.cause(error)
            raise UsageError(f"cannot make a run directory in {where}: {why}; name another one with --dir") from error
        return run

    @classmethod
    def open(cls, path: str | Path, root: Path = RUNS) -> RunDirectory:
        """An existing run directory, by its path or by its bare name under `root`."""
        bare = len(Path(path).parts) == 1
        places = [Path(path), root / path] if bare else [Path(path)]
        for place in places:
            if is_run(place):
                return cls(place)
        for place in places:
            if place.is_dir():
                raise UsageError(f"{place} is not a run directory: it has no plan.json")
        looked = root if bare else Path(path).parent
        known = [run.name for run in runs_in(looked)]
        near = difflib.get_close_matches(Path(path).name, known, n=3, cutoff=0.5)
        hint = f"did you mean {', '.join(near)}?" if near else f"there are: {', '.join(known[-5:]) or 'none'}"
        raise UsageError(f"no run {str(path)!r} in {looked.resolve()}; {hint}")

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the lock of the directory while inside. The system releases it when the process ends."""
        try:
            handle = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise UsageError(f"cannot write to {self.path}: {atomic_files.cause(error)}") from error
        try:
            if not _acquired(handle):
                holder = os.pread(handle, 20, 0).decode(errors="replace").strip() or "unknown"
                raise UsageError(
                    f"{self.path}: another run is using it (pid {holder}); wait for its end, or name another --dir"
                )
            os.ftruncate(handle, 0)
            os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
            yield
        finally:
            os.close(handle)

    def is_locked(self) -> bool:
        """Whether a living run holds the lock."""
        return atomic_files.is_locked(self.path / "lock")

    @property
    def state(self) -> RunState:
        if self.is_locked():
            return RunState.RUNNING
        try:
            result = self.result()
        except DataError:
            return RunState.DAMAGED
        if result is None:
            return RunState.BROKEN_OFF
        if result.get("error"):
            return RunState.FAILED
        return RunState.INTERRUPTED if result.get("stopped") == RunState.INTERRUPTED else RunState.DONE

    def begin(self) -> None:
        """A launch begins: delete the result of an earlier one."""
        with atomic_files.failing_as(f"{self.path} could not be written"):
            (self.path / "result.json").unlink(missing_ok=True)
            file_sums.begin(self.path)

    def write_plan(self, plan: Mapping[str, Any]) -> None:
        file_sums.write_json(self.path, "plan.json", dict(plan))

    def plan(self, *, checked: bool = True) -> dict[str, Any]:
        """The settings of the run. `checked`: DataError if the file is not what was written."""
        return self._read("plan.json", checked=checked)

    def write_result(self, result: Mapping[str, Any]) -> None:
        """Write the result as plain data, with `error` if the launch failed: the last file that a launch writes."""
        file_sums.write_json(self.path, "result.json", dict(result))
        with atomic_files.failing_as(f"{self.path} could not be written"):
            file_sums.end(self.path)

    def write_interrupted(self) -> None:
        """Record that a signal ended this launch, unless it has a result already."""
        with suppress(PacelineError), self.lock():  # another launch may hold the lock, or the disk may be full
            if not (self.path / "result.json").exists():
                self.write_result({"stopped": RunState.INTERRUPTED})

    def result(self, *, checked: bool = True) -> dict[str, Any] | None:
        """The result; None if the run has none yet. `checked`: DataError if the file is not what was written."""
        if not (self.path / "result.json").exists():
            return None
        found = self._read("result.json", checked=checked)
        for key, kind in _KINDS.items():
            if not isinstance(found.get(key), kind | None):
                raise DataError(f"run {self.path}: result.json is not what was written: its {key} is {found[key]!r}")
        return found

    def status(self) -> dict[str, Any] | None:
        """The status that the launcher wrote last, with its age in seconds as `age`; None if it cannot be read."""
        try:
            told = atomic_files.read_json(self.path / STATUS)
            return told | {"age": max(0.0, time.time() - float(told["at"]))}
        except (DataError, OSError, KeyError, TypeError, ValueError):
            return None

    def append_history(self, values: Mapping[str, Any]) -> None:
        """Add a line to the history. Numbers that JSON cannot write (NaN, infinity) become null."""
        path = self.path / "history.jsonl"
        line = json.dumps(finite(values), allow_nan=False) + "\n"
        with atomic_files.failing_as(f"{path} could not be written"), path.open("ab+") as stream:
            if stream.tell():
                stream.seek(-1, os.SEEK_END)
                if stream.read(1) != b"\n":  # a crash cut off the last line
                    line = "\n" + line
            stream.write(line.encode())

    def history(self, say: Callable[[str], None] = lambda _: None) -> list[dict[str, Any]]:
        """The lines of the history; `say` is called for each damaged line, which is omitted."""
        path, lines = self.path / "history.jsonl", []
        try:
            text = path.read_bytes() if path.exists() else b""
        except OSError as error:
            raise DataError(f"{path} cannot be read: {atomic_files.cause(error)}") from error
        for number, line in enumerate(text.split(b"\n"), 1):
            if not line:
                continue
            try:
                values = json.loads(line)
            except (ValueError, RecursionError):
                values = None
            if isinstance(values, dict) and all(isinstance(values.get(key), _NUMBER) for key in ("update", "seconds")):
                lines.append(values)
            else:
                say(f"{path.name}: line {number} is not what was written, or a crash cut it off; it is omitted")
        return lines

    def _read(self, name: str, *, checked: bool) -> dict[str, Any]:
        try:
            if checked:
                file_sums.check(self.path, name)
            return atomic_files.read_json(self.path / name)
        except DataError as error:
            raise DataError(f"run {self.path}: {error}") from error


def is_run(path: Path) -> bool:
    """Whether a folder is a run directory, perhaps one without a plan yet."""
    return (path / "plan.json").is_file() or all((path / part).is_dir() for part in ("checkpoints", "logs"))


def runs_in(root: Path = RUNS) -> list[RunDirectory]:
    """The runs in a folder, oldest first."""
    found = [path for path in root.iterdir() if is_run(path)] if root.is_dir() else []
    return [RunDirectory(path) for path in sorted(found, key=_age)]


def _age(path: Path) -> tuple[float, str]:
    plan = path / "plan.json"
    return (plan if plan.exists() else path).stat().st_mtime, path.name


def _numbered(root: Path, name: str) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    plain = re.sub(r"[^A-Za-z0-9_.]+", "-", name).strip("-.") or "run"
    taken = [re.fullmatch(rf"{re.escape(plain)}-(\d+)", path.name) for path in root.iterdir()]
    number = 1 + max((int(match[1]) for match in taken if match), default=0)
    while True:
        path = root / f"{plain}-{number:03d}"
        try:
            path.mkdir()
            return path
        except FileExistsError:  # taken by another run
            number += 1


def _unused(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    # a start that failed early leaves empty folders and the lock
    if any(one.name != "lock" and not one.is_dir() for one in path.rglob("*")):
        raise UsageError(f"{path} exists and is not empty; use --resume to resume it, or another --dir")
    return path


def _acquired(handle: int) -> bool:
    """Whether the lock was free. `is_locked` of another process takes it for a moment: try for half a second."""
    for _ in range(50):
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.01)
        except OSError:  # a file system without locks
            return True
        else:
            return True
    return False
