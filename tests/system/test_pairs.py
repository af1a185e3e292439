"""Two deaths at once, one of them inside a call: the run goes on, replay gives its bits, its account adds up.

Data: scikit-learn's digits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pairs import run_with_pairs

from paceline.runs.replay.accounting import account, audit

WORKER = [("worker:1", "worker:2 inside"), ("worker:2 inside", "worker:1"), ("server:0", "worker:1 inside")]
CHIEF = [("chief", "worker:1 inside"), ("worker:2 inside", "chief"), ("chief inside", "server:0")]
# of two servers, each performs its part of a call
WORKER_OF_TWO = [("worker:1", "server:0 inside"), ("server:0 inside", "worker:1"), ("worker:2", "server:0 inside")]
CHIEF_OF_TWO = [("chief", "server:0 inside"), ("server:0 inside", "chief"), ("chief", "server:0 inside")]
SERVERS = [("worker:1", "server:1 inside"), ("server:0 inside", "server:1 inside"), ("chief", "server:1 inside")]


@pytest.mark.parametrize(
    ("scheme", "servers", "pairs", "hyper"),
    [
        ("agn", 1, CHIEF, {"window": 3}),
        ("agn", 2, WORKER_OF_TWO, {"window": 3}),
        ("downpour", 1, WORKER, {"window": 5}),
        ("downpour", 2, CHIEF_OF_TWO, {"n_push": 3, "n_fetch": 2}),
        ("aeamsgd", 1, WORKER, {"window": 3}),
        ("async", 2, SERVERS, {}),
        ("sync", 1, CHIEF, {}),
    ],
)
def test_a_process_and_another_inside_a_call(
    scheme: str, servers: int, pairs: list[tuple[str, str]], hyper: dict[str, Any], tmp_path: Path
) -> None:
    story, dealer = run_with_pairs(tmp_path / "run", scheme, pairs, seed=servers, servers=servers, hyper=hyper)
    assert story.error is None, f"{story.error}\n{story.said}\n{story.logs()}"
    assert dealer.torn  # at least one of them was inside a call, and the run went back
    assert audit(tmp_path / "run") == [], story.said
    told = account(tmp_path / "run")
    assert told.drawn == told.used + told.dropped + told.lost + told.rolled_back
    assert story.result is not None
    assert told.counted == story.result.gradients
