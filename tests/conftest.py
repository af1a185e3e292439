"""Where the tests find real data; none of them needs a network."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"

if SHARED.is_dir():
    os.environ.setdefault("PACELINE_DATA", str(SHARED))
os.environ.setdefault("PACELINE_OFFLINE", "1")


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    os.environ.setdefault("PACELINE_CACHE", str(tmp_path_factory.mktemp("cache")))
