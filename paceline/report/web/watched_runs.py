"""The runs that a page shows: those that were named, and those of folders, also when they are made later."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline.errors import UsageError
from paceline.report.web.run_view import DELETED, RunView
from paceline.report.web.scheme_text import listing_of
from paceline.runs import stop_request
from paceline.runs.run_directory import RunDirectory, is_run, runs_in

KEEP = 0.5  # seconds for which what was read is told to further browsers
MOST_SHOWN = 12  # runs side by side


class WatchedRuns:
    """Finds runs, and reads them for one request at a time."""

    def __init__(self, named: Iterable[Path], folders: Iterable[Path] = ()) -> None:
        self._folders = list(folders)
        self._named = [_key(path) for path in named]
        self._views = {_key(path): RunView(RunDirectory(path), _key(path)) for path in named}
        self._asked: set[str] = set(self._views)  # runs that stay in the list when their directory is deleted
        self._kept: dict[tuple[str, ...], tuple[float, dict[str, Any]]] = {}
        self._stopping: dict[str, str] = {}  # the launches that were asked to end: key of the run, pid of the launcher
        self._one = threading.Lock()

    def overview(self, shown: Sequence[str]) -> dict[str, Any]:
        """All runs in a line each, and those of `shown` (keys; if empty, the newest one) in detail."""
        wanted, now = tuple(shown[:MOST_SHOWN]), time.monotonic()
        with self._one:
            then, kept = self._kept.get(wanted, (0.0, {}))
            if kept and now - then < KEEP:
                return kept
            self._find()
            summaries = [view.summary() for view in self._views.values()]
            for key in [one["key"] for one in summaries if one["state"] == DELETED and one["key"] not in self._asked]:
                del self._views[key]
            summaries = [one for one in summaries if one["key"] in self._views]
            if not wanted:
                wanted = tuple(self._named[:MOST_SHOWN]) or tuple(self._newest(summaries))
            chosen = [key for key in wanted if key in self._views]
            self._asked.update(chosen)
            for one in summaries:
                one["asked"] = one["state"] == "running" and self._was_asked(one["key"])
            told = {
                "now": time.time(),
                "folders": [str(folder.absolute()) for folder in self._folders],
                "runs": summaries,
                "shown": {key: self._views[key].detail() for key in chosen},
            }
            self._kept = {tuple(shown[:MOST_SHOWN]): (now, told)} | dict(list(self._kept.items())[:8])
            return told

    def log(self, key: str, file: str) -> dict[str, Any]:
        view = self._views.get(key)
        return view.log(file) if view is not None else {"file": file, "text": "", "bytes": 0}

    def about(self, key: str) -> dict[str, Any]:
        """The plan of a run and the listing of its scheme."""
        view = self._views.get(key)
        if view is None:
            return {"plan": {}, "scheme": listing_of(None)}
        return {"plan": view.about(), "scheme": listing_of(view.plan.get("scheme"))}

    def stop(self, key: str) -> str:
        """Have a run end with a checkpoint."""
        with self._one:  # two browsers, or a second press: the second signal would end the run at once
            view = self._views.get(key)
            if view is None:
                raise UsageError("there is no such run")
            if view.run.is_locked() and self._was_asked(key):
                return f"{view.run.name} has been asked to end"
            said = stop_request.stop(view.run)
            self._stopping[key] = stop_request.launcher_of(view.run)
            return said

    def _was_asked(self, key: str) -> bool:
        return key in self._stopping and self._stopping[key] == stop_request.launcher_of(self._views[key].run)

    def _find(self) -> None:
        for folder in self._folders:
            found: list[RunDirectory] = []
            with suppress(OSError):  # a run may be deleted while the folder is read
                found = runs_in(folder)
            for run in found:
                key = _key(run.path)
                if key not in self._views:
                    self._views[key] = RunView(run, key)

    @staticmethod
    def _newest(summaries: Sequence[dict[str, Any]]) -> list[str]:
        living = [one for one in summaries if one["state"] != DELETED]
        running = [one["key"] for one in living if one["state"] == "running"]
        return running[-4:] or [one["key"] for one in living[-1:]]


def chosen(names: Sequence[str], root: Path) -> WatchedRuns:
    """The runs of a command line: run directories, names of runs under `root`, folders of runs; none: all of `root`."""
    named: list[Path] = []
    folders = [] if names else [root]
    for name in names:
        if Path(name).is_dir() and not is_run(Path(name)) and not is_run(root / name):
            folders.append(Path(name))
        else:
            named.append(RunDirectory.open(name, root).path)
    return WatchedRuns(named, folders)


def _key(path: Path) -> str:
    return hashlib.sha256(str(path.absolute()).encode()).hexdigest()[:12]
