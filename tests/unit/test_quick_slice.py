"""The slice of the system tests that `make test` runs names tests that are there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SYSTEM = Path(__file__).resolve().parents[1] / "system"


def test_every_name_of_the_slice_is_a_test() -> None:
    names: dict[str, frozenset[str]] = {}
    exec(compile((SYSTEM / "conftest.py").read_text(), "conftest.py", "exec"), names)
    told = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "quick", "-p", "no:cacheprovider", str(SYSTEM)],
        cwd=SYSTEM.parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    found = {line.removeprefix("tests/system/") for line in told.stdout.splitlines() if "::" in line}
    assert found == names["QUICK"], told.stderr
