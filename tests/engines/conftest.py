"""Runs under real engines that are too large for every day: `make test-engines` installs them and runs these tests."""

from __future__ import annotations

import os
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS / "system"), str(TESTS / "contracts")]  # shells for commands; the contract suite of schemes
os.environ.setdefault("KERAS_BACKEND", "tensorflow")
