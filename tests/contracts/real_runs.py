"""Runs of any scheme in real processes, begun by fork from the test's own: each takes a few tenths of a second."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from beds.short_windows import short

from paceline.api.execute import execute
from paceline.config import build, discovery
from paceline.config.validate import planned
from paceline.result import Result
from paceline.runs.run_directory import RunDirectory
from paceline.scheme import Scheme


def trained(directory: Path, task: Any, scheme: Any, *, hyper: dict[str, Any] | None = None, **settings: Any) -> Result:
    """Train into a new directory; what the processes wrote into their logs is told if it fails."""
    shortened = short(scheme) if isinstance(scheme, str) else {}
    plan, chosen, objects = planned(task, scheme, hyper=shortened | (hyper or {}), **settings)
    place = RunDirectory.create(directory, "run")
    plan = dataclasses.replace(plan, directory=str(place.path), title="test")
    try:
        return execute(plan, chosen, objects, tell=lambda *_: None, watch=lambda _: None)
    except BaseException as error:
        for log in sorted(place.logs.iterdir()):
            error.add_note(f"{log.name}: {log.read_text(encoding='utf-8')[-2000:]}")
        raise


def default(name: str) -> Scheme:
    return build.scheme_of(discovery.schemes()[name].value, short(name))


def servers(name: str, wanted: int) -> int:
    """The number of servers: one for a scheme that needs all of the vector at once, or that has none."""
    return 1 if default(name).whole() or not default(name).methods else wanted
