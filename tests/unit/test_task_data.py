"""Every kind of data that a TorchTask takes: batches by number, shards, processes that read ahead."""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data_kinds import (
    BATCH,
    KINDS,
    STREAMS,
    ByIndex,
    FromStart,
    N,
    OwnLoss,
    Stateful,
    columns,
    ids,
    made,
    padded,
    sampled,
)
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, SubsetRandomSampler

from paceline import Tokens, TorchTask, simulate
from paceline.errors import DataError, UsageError
from paceline.runs.data_digest import data_of
from paceline.task import Batch

every_kind = pytest.mark.parametrize("kind", list(KINDS))


def joined(lists: Iterable[list[int]]) -> list[int]:
    return list(chain.from_iterable(lists))


def alike(a: Batch, b: Batch) -> bool:
    return (a.size, a.seed, a.weight) == (b.size, b.seed, b.weight) and repr(a.data) == repr(b.data)


@every_kind
@pytest.mark.parametrize("feed", ["shared", "shard", "slice"])
def test_a_batch_has_a_number(kind: str, feed: Any, tmp_path: Path) -> None:
    """A worker that starts at any batch gets what one that was there from the start gets."""
    task = KINDS[kind](tmp_path)
    if feed == "shared" and kind in STREAMS:
        with pytest.raises(UsageError, match="all workers would train on the same samples"):
            task.configured(feed=feed)
        return
    task = task.configured(feed=feed)
    run = list(islice(task.batches(1, 2, 3), 20))
    for first in (0, 1, 5, 13):
        later = list(islice(task.batches(1, 2, 3, first), 20 - first))
        assert all(map(alike, later, run[first:]))
        assert len(later) == 20 - first


@every_kind
def test_shards_are_disjoint_and_cover_an_epoch(kind: str, tmp_path: Path) -> None:
    task, workers = KINDS[kind](tmp_path).configured(feed="shard"), 3
    seen: list[list[int]] = []
    for rank in range(workers):
        own: list[int] = []
        for batch in task.batches(rank, workers, 0):
            own += ids(batch)
            if len(own) >= N:
                break
        seen.append(own)
    if kind in STREAMS and kind != "iterable":  # whole batches belong to a worker
        sizes = [sum(len(range(first, min(first + BATCH, N))) for first in range(r * BATCH, N, 12)) for r in range(3)]
    else:
        sizes = [len(range(rank, N, workers)) for rank in range(workers)]
    epoch = [own[:size] for own, size in zip(seen, sizes, strict=True)]
    assert sorted(joined(epoch)) == list(range(N))
    assert all(set(own[size : 2 * size]) <= set(first) for own, size, first in zip(seen, sizes, epoch, strict=True))


@every_kind
def test_slices_make_the_common_batch(kind: str, tmp_path: Path) -> None:
    task = KINDS[kind](tmp_path).configured(feed="slice")
    whole = list(islice(task.batches(0, 1, 5), 6))
    parts = [list(islice(task.batches(rank, 2, 5), 6)) for rank in range(2)]
    for number, common in enumerate(whole):
        assert joined(ids(own[number]) for own in parts) == ids(common)
        assert sum(own[number].weight for own in parts) == pytest.approx(2)


@every_kind
def test_every_kind_trains(kind: str, tmp_path: Path) -> None:
    task = KINDS[kind](tmp_path)
    length = {"steps": 10} if task.epoch_size is None else {"epochs": 3}
    first, second = (simulate(task, "sync", workers=2, seed=1, lr=0.01, **length) for _ in range(2))
    assert first.digest == second.digest
    assert first.loss < task.evaluate(task.start(1))["loss"]


@pytest.mark.parametrize("kind", ["data set", "named samples", "loader", "loader with processes"])
@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more processes than cores
def test_processes_that_read_ahead_change_no_bit(kind: str, tmp_path: Path) -> None:
    task = KINDS[kind](tmp_path)
    plain = list(islice(task.batches(1, 2, 3, 4), 8))
    for number in (1, 2):
        task.num_workers = number
        assert all(map(alike, islice(task.prefetched(1, 2, 3, 4), 8), plain))


def test_reading_ahead_leaves_the_random_numbers_alone() -> None:
    task = made(ByIndex(), batch=BATCH, num_workers=1)
    torch.manual_seed(1)
    list(islice(task.prefetched(0, 1, 0), 3))
    after = torch.rand(())
    torch.manual_seed(1)
    assert torch.rand(()) == after


class TestLoader:
    def test_its_settings_are_used(self) -> None:
        task = made(DataLoader(ByIndex(), 7, drop_last=True, num_workers=1, collate_fn=padded, timeout=9))
        assert (task.batch, task.shuffle, task.drop_last, task.num_workers) == (7, False, True, 1)
        assert task._processes["timeout"] == 9
        shown = [ids(batch) for batch in islice(task.batches(0, 1, 0), 4)]
        assert shown == [list(range(7)), list(range(7, 14)), list(range(14, 21)), list(range(7))]

    def test_drop_last_omits_other_samples_in_each_epoch(self) -> None:
        task = made(DataLoader(ByIndex(), BATCH, shuffle=True, drop_last=True))
        seen = [ids(batch) for batch in islice(task.batches(0, 1, 0), 12)]
        first, second = joined(seen[:6]), joined(seen[6:])
        assert len(set(first)) == len(set(second)) == 24
        assert set(first) != set(second)

    def test_a_sampler_gives_the_order_of_every_epoch(self) -> None:
        task = sampled()
        seen = joined(ids(batch) for batch in islice(task.batches(0, 1, 0), 130))
        assert sum(one >= N // 2 for one in seen) / len(seen) == pytest.approx(0.9, abs=0.05)
        later = list(islice(task.batches(0, 1, 0, 100), 9))
        assert joined(map(ids, later)) == seen[400:436]
        other = joined(ids(batch) for batch in islice(task.batches(1, 2, 0), 9))
        assert other != seen[:36]

    def test_a_sampler_of_some_samples(self) -> None:
        task = made(DataLoader(ByIndex(), 2, sampler=SubsetRandomSampler([3, 5, 8, 13])))
        assert task.epoch_size == 4
        for workers in (1, 2):
            shards = task.configured(feed="shard")
            seen = [joined(ids(b) for b in islice(shards.batches(r, workers, 0), 2 // workers)) for r in range(workers)]
            assert sorted(joined(seen)) == [3, 5, 8, 13]

    def test_batches_of_a_sampler_of_its_own(self) -> None:
        batches = BatchSampler(RandomSampler(range(N)), 5, drop_last=False)

        class Own:
            def __iter__(self):
                return iter(batches)

            def __len__(self):
                return len(batches)

        task = made(DataLoader(ByIndex(), batch_sampler=Own()))
        seen = [joined(ids(b) for b in islice(task.batches(r, 2, 0), 3)) for r in range(2)]
        assert sorted(joined(seen)) == list(range(N))

    @pytest.mark.parametrize(
        ("loader", "more", "says"),
        [
            (lambda: DataLoader(ByIndex(), 4), {"batch": 5}, "batch=5 contradicts the DataLoader's 4"),
            (lambda: DataLoader(ByIndex(), 4), {"shuffle": True}, "shuffle=True contradicts the DataLoader's False"),
            (lambda: DataLoader(ByIndex(), 4, collate_fn=padded), {"collate": padded}, "collate function of its own"),
            (
                lambda: DataLoader(ByIndex(), 4, sampler=DistributedSampler(ByIndex(), 2, 0)),
                {},
                "DistributedSampler, .* sharded by feed=shard",
            ),
            (lambda: DataLoader(FromStart(), 4), {"batch": 5}, "train gives whole batches"),
            (lambda: FromStart(), {"shuffle": True}, "shuffle inside the data"),
            (lambda: FromStart(), {"num_workers": 2}, "give num_workers to a DataLoader"),
            (lambda: iter([columns()]), {}, "an iterator, which can be read only once"),
            (lambda: columns(), {"collate": padded}, "which need no collate function"),
            (lambda: Stateful(), {"collate": padded}, "give it the collate function"),
        ],
    )
    def test_what_contradicts_is_refused(self, loader: Any, more: dict[str, Any], says: str) -> None:
        with pytest.raises(UsageError, match=says):
            made(loader(), **more)

    def test_a_generator_is_not_used_and_that_is_said(self) -> None:
        task = made(DataLoader(ByIndex(), 4, shuffle=True, generator=torch.Generator()))
        assert task.notice is not None
        assert "generator is not used" in task.notice


class TestStreams:
    def test_data_that_run_out_end_the_batches(self) -> None:
        calls = []

        def once() -> Any:
            calls.append(1)
            return [columns()] if len(calls) == 1 else []

        task = made(once)
        assert len(list(task.batches(0, 1, 0))) == 1

    def test_a_state_saves_the_reading(self, tmp_path: Path) -> None:
        task, reads = made(Stateful(tmp_path / "reads")), tmp_path / "reads"
        run = list(islice(task.prefetched(0, 2, 0, 0, tmp_path), 70))
        assert [one.name for one in sorted((tmp_path / "data").iterdir())] == ["worker-0-32.json", "worker-0-64.json"]
        reads.unlink()
        later = list(islice(task.prefetched(0, 2, 0, 66, tmp_path), 4))
        assert all(map(alike, later, run[66:]))
        assert len(reads.read_text().split()) <= 12
        reads.unlink()
        assert alike(next(task.prefetched(0, 2, 0, 31, tmp_path)), run[31])  # before every state: from the start
        assert len(reads.read_text().split()) > 50

    def test_a_damaged_state_is_not_needed(self, tmp_path: Path) -> None:
        task = made(Stateful())
        run = list(islice(task.prefetched(0, 1, 0, 0, tmp_path), 70))
        (tmp_path / "data" / "worker-0-64.json").write_text("{")
        assert alike(next(task.prefetched(0, 1, 0, 66, tmp_path)), run[66])

    def test_a_state_that_json_cannot_hold_is_not_kept(self, tmp_path: Path) -> None:
        class Odd(Stateful):
            def state_dict(self) -> dict[str, Any]:
                return {"next": torch.tensor(self._next)}

        task = made(Odd())
        assert len(list(islice(task.prefetched(0, 1, 0, 0, tmp_path), 40))) == 40
        assert not list(tmp_path.glob("data/*"))

    def test_evaluated_to_the_end_or_on_the_first_samples(self) -> None:
        by_index = made(columns(), batch=BATCH)
        task = TorchTask(by_index.flat.module, nn.functional.mse_loss, columns(), Stateful())
        x = task.start(0)
        assert task.evaluate(x)["loss"] == pytest.approx(by_index.evaluate(x)["loss"])
        assert task.limited(6).evaluate(x)["loss"] == pytest.approx(by_index.limited(6).evaluate(x)["loss"])

    @pytest.mark.filterwarnings("ignore")  # its own
    def test_stateful_data_loader_of_torchdata(self, tmp_path: Path) -> None:
        torchdata = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")
        task = made(torchdata.StatefulDataLoader(FromStart(), BATCH))
        run = list(islice(task.prefetched(1, 2, 0, 0, tmp_path), 70))
        assert list((tmp_path / "data").iterdir())
        assert all(map(alike, islice(task.prefetched(1, 2, 0, 65, tmp_path), 5), run[65:]))

    def test_samples_need_the_size_of_a_batch(self) -> None:
        def source() -> Any:
            return DataLoader(ByIndex(), BATCH)

        with pytest.raises(UsageError, match="the size of a batch is not known here"):
            simulate(made(source), "async", workers=2, samples=10)
        assert simulate(made(source, batch=BATCH), "async", workers=2, samples=10, lr=0.0).updates == 3


class TestDictionaries:
    def test_the_loss_of_the_model_or_of_a_function(self) -> None:
        named = dict(zip(("a", "labels"), columns(), strict=True))
        own = TorchTask(OwnLoss, None, named, batch=BATCH)
        given = TorchTask(
            OwnLoss, lambda output, batch: nn.functional.mse_loss(output["logits"], batch["labels"]), named, batch=BATCH
        )
        x, batch = own.start(0), next(own.batches(0, 1, 0))
        assert own.grad(x, batch)[0] == given.grad(x, batch)[0]
        assert own.evaluate(x) == given.evaluate(x)

    def test_metrics_get_the_dictionary(self) -> None:
        def worst(output: Any, batch: Any) -> float:
            return float((output["logits"] - batch["labels"]).abs().max())

        named = dict(zip(("a", "labels"), columns(), strict=True))
        task = TorchTask(OwnLoss, None, named, batch=BATCH, metrics={"worst": worst})
        assert task.evaluate(task.start(0))["worst"] > 0

    def test_prepare_and_dtype_reach_inside(self) -> None:
        def halved(batch: dict[str, Any]) -> dict[str, Any]:
            return batch | {"a": batch["a"] / 2}

        task = TorchTask(OwnLoss, None, ByIndex(named=True), batch=BATCH, prepare=halved, dtype=torch.float64)
        batch = next(task.batches(0, 1, 0))
        assert batch.data[0]["a"].dtype == torch.float64
        assert batch.data[0]["a"].max() <= N / 2

    def test_texts_are_refused_by_their_name(self) -> None:
        class Texts(ByIndex):
            def __getitem__(self, index: int) -> Any:
                return {"a": torch.tensor([1.0]), "text": "words"}

        with pytest.raises(UsageError, match="the batch's 'text' is a list, which no model takes"):
            next(TorchTask(OwnLoss, None, Texts()).batches(0, 1, 0))

    def test_a_model_without_a_loss_is_refused(self) -> None:
        class Silent(nn.Linear):
            def forward(self, a: Any, b: Any) -> Any:
                return {"logits": super().forward(a)}

        task = TorchTask(lambda: Silent(1, 1), None, columns(), batch=BATCH)
        with pytest.raises(UsageError, match="the model gives a dict without a loss"):
            task.grad(task.start(0), next(task.batches(0, 1, 0)))

    def test_logits_and_loss_in_a_tuple(self) -> None:
        class Both(OwnLoss):
            def forward(self, a: Any, labels: Any) -> Any:  # type: ignore[override]
                made = super().forward(a, labels)
                return made["logits"], made["loss"]

        a, b = TorchTask(Both, None, columns(), batch=BATCH), TorchTask(OwnLoss, None, columns(), batch=BATCH)
        x, batch = a.start(0), next(a.batches(0, 1, 0))
        assert a.grad(x, batch)[0] == b.grad(x, batch)[0]


class TestArrays:
    def test_unsigned_numbers_become_tensors_of_64_bits(self) -> None:
        data = np.arange(6, dtype=np.uint16)[:, None], np.arange(6, dtype=np.uint32)
        task = TorchTask(nn.Linear(1, 1), None, data, batch=2, shuffle=False)
        assert [part.dtype for part in next(task.batches(0, 1, 0)).data] == [torch.int64, torch.int64]

    def test_read_only_arrays_are_copied(self) -> None:
        array = np.zeros((6, 1))
        array.flags.writeable = False
        assert made((array, array), dtype=torch.float64).train.length == 6

    def test_arrays_of_texts_are_refused(self) -> None:
        with pytest.raises(UsageError, match="holds no numbers"):
            made((np.array(["a", "b"]), np.zeros(2)))

    def test_mapped_files_stay_files(self, tmp_path: Path) -> None:
        task = KINDS["mapped files"](tmp_path)
        assert task.train.tensors is None
        expected = KINDS["tensors"](tmp_path)
        assert repr(next(task.batches(0, 1, 0)).data) == repr(next(expected.batches(0, 1, 0)).data)


class TestTokens:
    def test_sequences_and_their_targets(self) -> None:
        data = Tokens(np.arange(11, dtype=np.uint16), 3)
        assert len(data) == 3
        assert [x.tolist() for x, _ in (data[i] for i in range(3))] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
        assert data[2][1].tolist() == [7, 8, 9]
        every = Tokens(torch.arange(11), 3, stride=1)
        assert len(every) == 8
        assert every[7][1].tolist() == [8, 9, 10]

    def test_another_process_maps_the_file_itself(self, tmp_path: Path) -> None:
        np.arange(10_000, dtype=np.uint16).tofile(tmp_path / "t.bin")
        for given in (tmp_path / "t.bin", np.memmap(tmp_path / "t.bin", np.uint16, "r")):
            data = Tokens(given, 8)
            sent = pickle.dumps(data)
            assert len(sent) < 1000
            assert pickle.loads(sent)[3][0].tolist() == list(range(24, 32))

    @pytest.mark.parametrize(
        ("tokens", "context", "says"),
        [
            (np.arange(4), 4, "4 tokens are too few for a sequence of 4"),
            (np.arange(4), 0, "context must be at least 1"),
            (np.zeros((2, 2)), 1, "one row of whole numbers"),
        ],
    )
    def test_what_cannot_be_is_refused(self, tokens: Any, context: int, says: str) -> None:
        with pytest.raises(UsageError, match=says):
            Tokens(tokens, context)

    def test_a_file_that_is_missing_or_of_another_kind(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match="there is no file of tokens"):
            Tokens(tmp_path / "none.bin", 3)
        (tmp_path / "odd.bin").write_bytes(b"123")
        with pytest.raises(DataError, match="no multiple of 2"):
            Tokens(tmp_path / "odd.bin", 3)


class TestLargeBatches:
    def test_a_batch_larger_than_the_data_is_said(self) -> None:
        task = made(columns(), batch=N + 1)
        with pytest.warns(UserWarning, match="batch 27 is larger than the 26 training samples"):
            simulate(task, "sgd", steps=1)
        assert not list(made(columns(), batch=N).warnings(4))

    def test_larger_than_a_shard(self) -> None:
        task = made(columns(), batch=10, feed="shard")
        assert not list(task.warnings(2))
        assert list(task.warnings(3)) == [
            "batch 10 is larger than the 8 samples of a worker's shard (3 workers): a batch has samples more than once"
        ]

    def test_drop_last_would_omit_everything(self) -> None:
        task = made(DataLoader(ByIndex(), N + 1, drop_last=True))
        with pytest.raises(UsageError, match="drop_last omits all 26 samples: they make no batch of 27"):
            task.batches(0, 1, 0)


def test_data_in_memory_are_hashed_as_a_whole() -> None:
    """Also those of a dictionary: a change of one number is another fingerprint."""
    named = dict(zip(("a", "labels"), columns(), strict=True))
    first, _ = data_of(TorchTask(OwnLoss, None, named), None)
    named["labels"][17] += 1
    second, _ = data_of(TorchTask(OwnLoss, None, named), None)
    assert first is not None
    assert second is not None
    assert first["train"] != second["train"]
    assert "train_covers" not in first


def test_streams_are_not_hashed_and_that_is_said() -> None:
    found, reason = data_of(made(FromStart()), None)
    assert found is None
    assert reason == "the data of task 'task' cannot be hashed: they are read from their start, by the workers only"
