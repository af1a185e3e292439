"""Runs under real engines that are too large for every day: `make test-engines` installs them and runs these tests."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "system"))  # the shells in which commands are started
