"""Where the tests find real data; none of them needs a network."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"

if SHARED.is_dir():
    os.environ.setdefault("PACELINE_DATA", str(SHARED))
os.environ.setdefault("PACELINE_OFFLINE", "1")

# as in a terminal: under nohup or behind `&` they are ignored, by the processes that tests start too
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

with suppress(ImportError):  # only some tests need it
    from hypothesis import HealthCheck, settings

    # on a busy machine making examples takes long, which says nothing about the code
    settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("busy")


SKIPPED = os.environ.get("PACELINE_SKIPPED")  # a file: the tests that were skipped, for a later run to make up for them


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if SKIPPED and report.skipped:
        with Path(SKIPPED).open("a", encoding="utf-8") as file:
            file.write(f"{report.nodeid}\n")


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """As the processes of a run have it: another number adds in another order. Where all cores are busy, the threads of
    MKL also wait a thousand times as long for each other as they compute on a small vector."""
    import torch

    if torch.get_num_threads() != 1:
        torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    os.environ.setdefault("PACELINE_CACHE", str(tmp_path_factory.mktemp("cache")))
