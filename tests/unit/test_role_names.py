"""Words for roles, and the two numberings of workers."""

from __future__ import annotations

import pytest

from paceline.config.role_names import KINDS, TF_WORDS, WORDS, of_rank, parsed, role_of_task, task_of_role, written
from paceline.errors import UsageError

NUMBERINGS = [  # (a cluster's task, its role in a run)
    ("chief", "chief"),
    ("worker:0", "worker:1"),
    ("worker:7", "worker:8"),
    ("server:0", "server:0"),
    ("server:3", "server:3"),
    ("evaluator", "evaluator"),
]


@pytest.mark.parametrize(("task", "role"), NUMBERINGS)
def test_both_numberings(task: str, role: str) -> None:
    assert role_of_task(*parsed(task)) == role
    assert task_of_role(*parsed(role)) == task
    assert written(*parsed(role)) == role


def test_the_chief_is_the_worker_of_rank_0() -> None:
    assert [of_rank(rank) for rank in range(3)] == ["chief", "worker:1", "worker:2"]


def test_words() -> None:
    assert parsed(" ps:2 ") == parsed("server:2") == ("server", 2)
    assert set(WORDS.values()) == set(TF_WORDS.values()) == set(KINDS)
    for text in ("", "gpu:0", "worker:x", "worker:-1", "master"):
        with pytest.raises(UsageError, match="there are: chief, worker:N, server:N"):
            parsed(text)
