"""Jobs for the tests of launchers, and programs that stand in for an engine's own."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.launcher import Job

SECRET = bytes(range(32))
COMMAND = ("paceline", "train", "digits-mlp", "--scheme", "async", "--dir", "/runs/one")


@dataclass
class Made:
    """A job, and what it has said."""

    job: Job
    said: list[str] = field(default_factory=list)


def made(directory: Path, *tasks: str, command: tuple[str, ...] = COMMAND, **options: Any) -> Made:
    """Options with a dash are written with an underscore."""
    said: list[str] = []
    named = {key.replace("_", "-"): str(value) for key, value in options.items()}
    tasks = tasks or ("chief", "worker:0", "worker:1", "server:0")
    return Made(Job(command, tasks, directory, "one", named, secret=SECRET, say=said.append), said)


def program(path: Path, text: str) -> Path:
    """A shell script that can be run."""
    path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    path.chmod(0o755)
    return path
