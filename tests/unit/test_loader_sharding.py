"""A script's data cut among its workers."""

from __future__ import annotations

from collections import Counter
from itertools import islice

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

from paceline.api.script.loader_sharding import Shard, work_of
from paceline.errors import UsageError
from paceline.torch_task.batch_parts import size_of

SAMPLES = torch.arange(40)


def part(loader, rank=0, workers=2, *, number, seed=0):
    return list(islice(Shard(loader, rank, workers, seed).items(), number))


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
    assert list(Shard(items, 0, 2, 0).items()) == [0, 2, 4]
    assert list(Shard(iter(range(1)), 1, 2, 0).items()) == []
    once = [[1, 2], []]
    assert list(Shard(lambda: once.pop(0), 0, 1, 0).items()) == [1, 2]


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


class TestDistributedSampler:
    """A loader that is left over from a script for torch's DistributedDataParallel."""

    @staticmethod
    def loader(replicas: int, rank: int) -> DataLoader:
        data = TensorDataset(SAMPLES)
        sampler = DistributedSampler(data, num_replicas=replicas, rank=rank, shuffle=True)
        return DataLoader(data, batch_size=4, sampler=sampler)

    @pytest.mark.parametrize("replicas", [2, 1])
    def test_samples_are_sharded_once_and_each_epoch_has_its_order(self, replicas):
        epochs: list[list[int]] = [[], []]
        for rank in range(2):
            shard = Shard(self.loader(replicas, rank if replicas > 1 else 0), rank, 2, 0)
            assert "DistributedSampler" in shard.note
            assert len(shard) == 5
            items = shard.items()
            for epoch in range(2):
                for (batch,) in islice(items, len(shard)):
                    epochs[epoch] += batch.tolist()
                assert shard.epoch == epoch
        assert [sorted(epoch) for epoch in epochs] == [SAMPLES.tolist()] * 2
        assert epochs[0] != epochs[1]

    @pytest.mark.parametrize(("replicas", "theirs"), [(4, 1), (2, 0)])
    def test_one_of_other_processes_is_refused(self, replicas, theirs):
        with pytest.raises(UsageError, match=f"process {theirs} of {replicas}, and this is worker 1 of 2"):
            Shard(self.loader(replicas, theirs), 1, 2, 0)


def test_the_length_is_that_of_a_workers_epoch():
    loader = DataLoader(TensorDataset(SAMPLES), batch_size=4)  # ten batches
    assert [len(Shard(loader, rank, 3, 0)) for rank in range(3)] == [4, 3, 3]
    with pytest.raises(TypeError):
        len(Shard(iter([1]), 0, 1, 0))


def test_the_epoch_is_that_of_the_last_item():
    shard = Shard([1, 2, 3, 4], 0, 2, 0)
    assert [shard.epoch for _ in islice(shard.items(), 5)] == [0, 0, 1, 1, 2]


def test_a_single_worker_draws_the_scripts_own_random_numbers():
    loader = DataLoader(TensorDataset(SAMPLES), batch_size=4, shuffle=True)
    torch.manual_seed(3)
    plain = [batch.tolist() for _ in range(2) for (batch,) in loader] + torch.rand(2).tolist()
    torch.manual_seed(3)
    items = Shard(loader, 0, 1, 0).items()
    assert [next(items)[0].tolist() for _ in range(20)] + torch.rand(2).tolist() == plain


def test_epochs_continue_where_the_last_call_ended():
    loader = DataLoader(TensorDataset(SAMPLES), batch_size=4, shuffle=True)
    whole = part(loader, number=15)
    shard = Shard(loader, 0, 2, 0)
    once = [item for _ in range(3) for item in shard.items(epochs=1)]
    assert shard.epoch == 2
    assert [batch.tolist() for (batch,) in once] == [batch.tolist() for (batch,) in whole]


@pytest.mark.parametrize(
    ("loader", "batch", "epoch"),
    [
        (DataLoader(TensorDataset(SAMPLES), batch_size=12), 12, 40),
        (DataLoader(TensorDataset(SAMPLES), batch_size=12, drop_last=True), 12, 36),
        (TestDistributedSampler.loader(2, 0), 4, 40),
        ([torch.zeros(8), torch.zeros(8), torch.zeros(3)], 8, 19),
    ],
)
def test_the_samples_of_a_batch_and_of_an_epoch(loader, batch, epoch):
    assert work_of(loader) == (batch, epoch)


@pytest.mark.parametrize("loader", [iter([1]), lambda: [1], [], DataLoader(Numbers(), batch_size=2)])
def test_data_that_do_not_tell_their_size(loader):
    with pytest.raises(UsageError, match="samples and epochs need a loader with a length and a batch size"):
        work_of(loader)
