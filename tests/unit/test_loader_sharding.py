"""A script's data cut among its workers."""

from __future__ import annotations

from collections import Counter
from itertools import islice

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from paceline.api.script.loader_sharding import own_items, size_of
from paceline.errors import UsageError

SAMPLES = torch.arange(40)


def part(loader, rank=0, workers=2, *, number, seed=0):
    return list(islice(own_items(loader, rank, workers, seed), number))


class Numbers(IterableDataset):
    def __iter__(self):
        return iter(range(12))


@pytest.mark.parametrize("loader", [list(range(6)), range(6), lambda: iter(range(6)), lambda: range(6)])
def test_item_i_is_for_worker_i_modulo_workers(loader):
    assert part(loader, 0, number=6) == [0, 2, 4, 0, 2, 4]
    assert part(loader, 1, number=6) == [1, 3, 5, 1, 3, 5]
    assert part(loader, 3, 4, number=3) == [3, 3, 3]


@pytest.mark.parametrize("more", [{}, {"num_workers": 1}, {"generator": True}])
def test_workers_that_shuffle_share_every_epoch_without_rest(more):
    counted: list[Counter[int]] = [Counter(), Counter()]
    firsts = []
    for rank in range(3):
        torch.manual_seed(rank)  # their random numbers differ, the order must not
        given = {"generator": torch.Generator().manual_seed(7)} if "generator" in more else more
        loader = DataLoader(TensorDataset(SAMPLES), batch_size=4, shuffle=True, drop_last=True, **given)
        # ten batches an epoch: worker 0 has four of them, the others three
        own = 4 if rank == 0 else 3
        batches = part(loader, rank, 3, number=2 * own)
        for epoch in range(2):
            for (batch,) in batches[epoch * own : (epoch + 1) * own]:
                counted[epoch].update(batch.tolist())
        firsts.append(batches[0][0].tolist())
    assert counted == [Counter(range(40))] * 2
    assert len(set(map(tuple, firsts))) == 3


def test_the_random_numbers_of_the_loop_are_left_alone():
    loader = DataLoader(TensorDataset(SAMPLES), batch_size=4, shuffle=True)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    part(loader, number=1)
    assert torch.equal(torch.rand(3), expected)


def test_another_seed_is_another_order():
    loader = DataLoader(TensorDataset(SAMPLES), batch_size=4, shuffle=True)
    first, again, other = (part(loader, number=1, seed=seed)[0][0].tolist() for seed in (1, 1, 2))
    assert first == again != other


@pytest.mark.parametrize(
    "loader", [DataLoader(Numbers(), batch_size=2), DataLoader(TensorDataset(torch.arange(6)), batch_size=None)]
)
def test_loaders_that_cannot_be_cut_are_gone_through(loader):
    every = [str(item) for item in loader]
    assert [str(item) for item in part(loader, 1, number=3)] == every[1::2]


def test_what_can_be_gone_through_once_ends():
    items = iter(range(5))
    assert list(own_items(items, 0, 2, 0)) == [0, 2, 4]
    assert list(own_items(iter(range(1)), 1, 2, 0)) == []
    once = [[1, 2], []]
    assert list(own_items(lambda: once.pop(0), 0, 1, 0)) == [1, 2]


@pytest.mark.parametrize("loader", [[], iter([]), lambda: [], DataLoader(TensorDataset(torch.zeros(0)))])
def test_an_empty_loader(loader):
    for rank in range(2):
        with pytest.raises(UsageError, match="the loader is empty"):
            part(loader, rank, number=1)


def test_too_few_items():
    with pytest.raises(UsageError, match="gives 2 batches in an epoch, too few for 3 workers"):
        part(DataLoader(TensorDataset(SAMPLES), batch_size=20), 0, 3, number=1)
    with pytest.raises(UsageError, match="gives worker 2 nothing: fewer items in an epoch than 3 workers"):
        part([1, 2], 2, 3, number=1)


def test_what_is_no_loader():
    with pytest.raises(UsageError, match=r"share\(\) takes what a loop can go through .* not a int"):
        part(5, number=1)


@pytest.mark.parametrize(
    ("item", "size"),
    [
        (torch.zeros(7, 2), 7),
        ((torch.zeros(7, 2), torch.zeros(3)), 7),
        ([["a", "b"], torch.zeros(3)], 3),
        ({"x": "a", "y": (torch.zeros(5), 1)}, 5),
        (torch.tensor(3.0), 1),
        ("text", 1),
    ],
)
def test_samples_are_counted_by_the_first_tensor(item, size):
    assert size_of(item) == size
