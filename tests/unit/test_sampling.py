"""Which samples a mini-batch holds."""

from __future__ import annotations

from itertools import islice
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline import sampling
from paceline.errors import UsageError
from paceline.fields import Feed
from paceline.sampling import Stream, permute, portion, sample_seed

FEEDS = get_args(Feed)
seeds = st.integers(0, 2**64)


def take(stream: Stream, first: int, batches: int) -> np.ndarray:
    return np.stack(list(islice(stream.from_(first), batches)))


@given(n=st.integers(1, 3000), key=st.integers(0, 2**64 - 1))
def test_permutation_is_one_to_one(n, key):
    image = permute(np.arange(n, dtype=np.uint64), n, np.array([key], np.uint64))
    assert np.array_equal(np.sort(image), np.arange(n))


@pytest.mark.parametrize("n", [2, 3, 4])
def test_every_order_of_a_few_samples_occurs(n):
    places = np.arange(n, dtype=np.uint64)
    orders = {tuple(permute(places, n, np.array([sample_seed(0, 0, k)], np.uint64)).tolist()) for k in range(600)}
    assert len(orders) == {2: 2, 3: 6, 4: 24}[n]


def test_an_order_looks_random():
    n = 60_000
    image = permute(np.arange(n, dtype=np.uint64), n, np.array([7], np.uint64)).astype(float)
    assert abs(np.corrcoef(image, np.arange(n))[0, 1]) < 0.02
    assert abs(np.corrcoef(image[:-1], image[1:])[0, 1]) < 0.02
    assert (image == np.arange(n)).sum() < 8
    assert (np.abs(np.diff(image)) == 1).sum() < 12


@given(n=st.integers(1, 200), batch=st.integers(1, 70), rank=st.integers(0, 5), seed=seeds)
def test_every_epoch_holds_every_sample_once(n, batch, rank, seed):
    stream = Stream(n, batch, "shared", True, rank, 6, seed)
    drawn = take(stream, 0, -(-3 * n // batch)).reshape(-1)[: 3 * n].reshape(3, n)
    assert np.array_equal(np.sort(drawn, axis=1), np.broadcast_to(np.arange(n), (3, n)))


def test_epochs_ranks_and_seeds_have_orders_of_their_own():
    n = 100
    orders = [Stream(n, n, "shared", True, 0, 4, 0).indices(epoch) for epoch in range(3)]
    orders += [Stream(n, n, "shared", True, rank, 4, 0).indices(0) for rank in (1, 2)]
    orders += [Stream(n, n, "shared", True, 0, 4, seed).indices(0) for seed in (1, 2)]
    assert len({tuple(order) for order in orders}) == len(orders)


@given(
    n=st.integers(6, 500),
    batch=st.integers(6, 40),
    kind=st.sampled_from(FEEDS),
    shuffle=st.booleans(),
    rank=st.integers(0, 5),
    first=st.integers(0, 10**12),
    seed=seeds,
)
def test_seeking_equals_iterating(n, batch, kind, shuffle, rank, first, seed):
    stream = Stream(n, batch, kind, shuffle, rank, 6, seed)
    run = take(stream, first, 7)
    assert np.array_equal(run, np.stack([stream.indices(first + k) for k in range(7)]))
    assert np.array_equal(run[3:], take(stream, first + 3, 4))
    assert run.dtype == np.int64
    assert run.shape == (7, stream.size)


@pytest.mark.parametrize("chunk", [1, 7, 50, 5000])
def test_chunks_change_nothing(monkeypatch, chunk):
    stream = Stream(37, 5, "shared", True, 2, 4, 11)
    before = take(stream, 3, 100)
    monkeypatch.setattr(sampling, "CHUNK", chunk)
    assert np.array_equal(take(stream, 3, 100), before)


@given(n=st.integers(1, 300), workers=st.integers(1, 12), seed=seeds)
def test_shards_are_disjoint_and_cover_all(n, workers, seed):
    workers = min(n, workers)
    streams = [Stream(n, 1, "shard", True, rank, workers, seed) for rank in range(workers)]
    shards = [take(stream, 0, stream.n).reshape(-1) for stream in streams]
    assert np.array_equal(np.sort(np.concatenate(shards)), np.arange(n))
    assert max(map(len, shards)) - min(map(len, shards)) <= 1
    for rank, shard in enumerate(shards):
        assert set(shard % workers) <= {rank}


@given(
    n=st.integers(1, 100),
    batch=st.integers(1, 50),
    workers=st.integers(1, 9),
    count=st.integers(0, 10**9),
    shuffle=st.booleans(),
    seed=seeds,
)
def test_slices_join_to_the_common_batch(n, batch, workers, count, shuffle, seed):
    workers = min(workers, batch)
    whole = Stream(n, batch, "slice", shuffle, 0, 1, seed).indices(count)
    streams = [Stream(n, batch, "slice", shuffle, rank, workers, seed) for rank in range(workers)]
    slices = [stream.indices(count) for stream in streams]
    for mine, expected in zip(slices, np.array_split(whole, workers), strict=True):
        assert np.array_equal(mine, expected)
    assert [s.weight for s in streams] == [workers * len(part) / batch for part in slices]
    assert sum(s.weight for s in streams) == pytest.approx(workers)


def test_with_one_worker_the_feeds_agree():
    runs = [take(Stream(30, 4, kind, True, 0, 1, 5), 0, 20) for kind in FEEDS]
    assert np.array_equal(runs[0], runs[1])
    assert np.array_equal(runs[0], runs[2])


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("shared", [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 1]]),
        ("shard", [[1, 4, 7, 1], [4, 7, 1, 4], [7, 1, 4, 7]]),
        ("slice", [[2], [6], [0]]),
    ],
)
def test_unshuffled_is_the_stored_order(kind, expected):
    assert take(Stream(10, 4, kind, False, 1, 3, 0), 0, 3).tolist() == expected


@settings(max_examples=20)
@given(kind=st.sampled_from(FEEDS), count=st.integers(10**9, 10**30))
def test_far_batches_need_no_walk(kind, count):
    indices = Stream(60_000, 100, kind, True, 3, 8, 0).indices(count)
    assert ((indices >= 0) & (indices < 60_000)).all()


def test_the_streams_are_fixed_for_ever():
    """A changed hash would silently change every recorded run."""
    assert Stream(60_000, 4, "shared", True, 1, 2, 42).indices(3).tolist() == [33282, 12063, 46698, 13094]
    assert sample_seed(42, 1, 3) == 9130711263118566316


def test_sample_seeds_differ_and_have_63_bits():
    drawn = {sample_seed(s, r, c) for s in range(10) for r in range(10) for c in range(10)}
    assert len(drawn) == 1000
    assert all(0 <= seed < 2**63 for seed in drawn)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((0, 1, "shared", True, 0, 1, 0), "empty"),
        ((10, 0, "shared", True, 0, 1, 0), "batch must be at least 1"),
        ((10, 1, "shared", True, 2, 2, 0), "rank must be from 0 to 1"),
        ((10, 1, "sliced", True, 0, 1, 0), "feed must be one of shared, shard, slice"),
        ((3, 1, "shard", True, 0, 4, 0), "only 3; use at most 3 workers"),
        ((10, 3, "slice", True, 0, 4, 0), "one common batch of 3 between 4 workers"),
    ],
)
def test_what_cannot_be_is_refused(arguments, says):
    with pytest.raises(UsageError, match=says):
        Stream(*arguments)


def test_portions_of_a_batch():
    assert [portion(10, "slice", rank, 4)[:2] for rank in range(4)] == [(0, 3), (3, 3), (6, 2), (8, 2)]
    assert portion(10, "shared", 1, 4) == (0, 10, 1.0)
