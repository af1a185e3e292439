"""Commands under the limits of a small machine: a sentence that says which limit it is, never a traceback."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest
from processes import children

TRAIN = ("train", "digits-mlp", "-s", "async", "--workers", "2", "--steps", "20", "--no-summaries", "--dir", "run")


def under(limit: int, value: int, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "paceline", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        preexec_fn=lambda: resource.setrlimit(limit, (value, value)),
    )


@pytest.mark.parametrize("files", [10, 16, 20, 24])
def test_few_open_files(files: int, tmp_path: Path) -> None:
    ran = under(resource.RLIMIT_NOFILE, files, tmp_path, *TRAIN)
    said = ran.stdout + ran.stderr
    assert "Traceback" not in said
    assert not children()
    if files > 20 and ran.returncode == 0:
        return  # how many are needed depends on what the starting process had open
    assert ran.returncode == 1, said
    assert "no more open files: raise the limit with `ulimit -n`" in said
    again = subprocess.run(
        [sys.executable, "-m", "paceline", "show", "run"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert "(run, failed)" in again.stdout or "(run, broken off)" in again.stdout


def test_small_files(tmp_path: Path) -> None:
    """Not even a log can grow."""
    ran = under(resource.RLIMIT_FSIZE, 2000, tmp_path, *TRAIN)
    said = ran.stdout + ran.stderr
    assert "Traceback" not in said
    assert ran.returncode == 1, said
    assert "error: " in said


@pytest.mark.parametrize("megabytes", [900, 1200])
def test_little_memory(megabytes: int, tmp_path: Path) -> None:
    """Either it is enough, or the reason is said."""
    ran = under(resource.RLIMIT_AS, megabytes * 2**20, tmp_path, *TRAIN)
    said = ran.stdout + ran.stderr
    assert "Traceback" not in said
    assert ran.returncode == 0 or "error: " in said, said
