"""The listing of a scheme, as several browsers ask for it at once."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from paceline.report.web.scheme_text import listing_of


@pytest.fixture
def interrupted() -> Iterator[None]:
    """The garbage collector runs inside of a parse, and lets another thread go on."""

    def give_way(phase: str, info: dict[str, int]) -> None:
        time.sleep(0)

    threshold = gc.get_threshold()
    gc.callbacks.append(give_way)
    gc.set_threshold(50)
    yield
    gc.set_threshold(*threshold)
    gc.callbacks.remove(give_way)


@pytest.mark.usefixtures("interrupted")
def test_threads_may_ask_at_once() -> None:
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(listing_of, ["sync", "async", "allreduce", "agn"] * 5))
    assert all("async def step" in one["source"] for one in found)
