"""Numbers that share a word are found again."""

from __future__ import annotations

import pytest
import torch

from paceline.processes.memory import packed_words
from paceline.runs.order_log import MemberEvent


@pytest.mark.parametrize(("generation", "count"), [(0, 0), (0, 1), (3, 7), (1, (1 << 32) - 1)])
def test_a_calls_number(generation: int, count: int) -> None:
    number = packed_words.call_number(generation, count)
    assert (packed_words.generation_of(number), packed_words.count_of(number)) == (generation, count)


def test_a_requests_kind() -> None:
    for method in (0, 5):
        kind = packed_words.asks_when(method)
        assert packed_words.only_asks_when(kind)
        assert not packed_words.only_asks_when(method)
        assert packed_words.method_of(kind) == packed_words.method_of(method) == method


def test_a_kind_that_no_worker_sends_is_no_method() -> None:
    twice = packed_words.asks_when(packed_words.asks_when(0))
    assert packed_words.method_of(twice) >= 1 << 16
    assert packed_words.method_of(-3) == -3


@pytest.mark.parametrize("event", list(MemberEvent))
@pytest.mark.parametrize("rank", [0, 1, 12])
def test_an_entry_of_the_order(rank: int, event: MemberEvent) -> None:
    entry = packed_words.member_entry(rank, event)
    assert entry < 0
    assert packed_words.member_of(entry) == (rank, event)


@pytest.mark.parametrize("entry", [-1, -2, -6, -10, -19])
def test_an_entry_that_is_no_event(entry: int) -> None:
    with pytest.raises(ValueError, match="not a valid MemberEvent"):
        packed_words.member_of(entry)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
def test_a_vectors_shape(dtype: torch.dtype) -> None:
    v = torch.zeros(123, dtype=dtype)
    found = packed_words.empty_of(packed_words.shape_word(v), "cpu")
    assert (found.shape, found.dtype) == (v.shape, v.dtype)


def test_the_key_of_a_mean() -> None:
    keys = [packed_words.mean_key(among, generation) for among in (None, (0, 1), (0, 2)) for generation in (0, 1, 2)]
    assert len(set(keys)) == len(keys)
    assert 0 not in keys
