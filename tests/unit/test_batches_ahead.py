"""Mini-batches whose samples a thread gathers ahead: the same bits, and no code of the user in that thread."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from data_kinds import KINDS, STREAMS
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, SubsetRandomSampler, TensorDataset

from paceline import Tokens, TorchTask
from paceline.config.plan import Plan
from paceline.processes.roles import spare_cores
from paceline.processes.roles.train_loop import BatchSupply
from paceline.sampling import sample_seed, sample_seeds
from paceline.task import Batch
from paceline.torch_task.ahead_thread import made_ahead
from paceline.torch_task.random_numbers import draws_nothing
from paceline.torch_task.row_blocks import BYTES, MOST, row_blocks
from paceline.torch_task.samples import Samples

NAME = "batches ahead"


def reading() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == NAME]


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert not reading()


def same(a: Batch, b: Batch) -> bool:
    return (a.size, a.seed, a.weight) == (b.size, b.seed, b.weight) and repr(a.data) == repr(b.data)


def task_of(train: Any, **options: Any) -> TorchTask:
    return TorchTask(nn.Linear(5, 1), nn.functional.mse_loss, train, **options)


def floats(n: int = 37) -> tuple[Tensor, Tensor]:
    return torch.arange(5.0 * n).view(n, 5), torch.arange(float(n)).view(n, 1)


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("feed", ["shared", "shard", "slice"])
def test_every_kind_of_data_gives_the_same_batches(kind: str, feed: Any, tmp_path: Path) -> None:
    if feed == "shared" and kind in STREAMS:
        return
    task = KINDS[kind](tmp_path).configured(feed=feed)
    plain = list(islice(task.batches(1, 2, 3), 24))
    for first in (0, 5):
        given = task.threaded(1, 2, 3, first, tmp_path)
        assert all(map(same, islice(given, 24 - first), plain[first:]))
        given.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("batch", [1, 4, 8, 37, 50])
def test_many_blocks_over_the_ends_of_epochs(batch: int, shuffle: bool) -> None:
    task = task_of(floats(), batch=batch, shuffle=shuffle)
    given = task.threaded(0, 1, 7)
    assert all(map(same, islice(given, 3 * MOST), task.batches(0, 1, 7)))
    given.close()  # type: ignore[attr-defined]


def test_a_batch_of_floats_begins_where_torch_would_put_it() -> None:
    """Results of vectorised code may depend on where a tensor begins."""
    for columns, batch in ((floats(), 4), (floats(), 16), ((torch.rand(64, 3, dtype=torch.float64),), 7)):
        train = Samples(columns, "train")
        for parts in train.take_many([np.arange(k, k + batch) for k in range(9)]):
            assert all(part.data_ptr() % 64 == 0 and part.is_contiguous() for part in parts)


def test_prepare_runs_in_the_training_thread_with_the_seed_of_its_batch() -> None:
    threads: set[str] = set()

    def noisy(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        threads.add(threading.current_thread().name)
        return x + torch.rand(x.shape), y

    task = task_of(floats(), batch=4, prepare=noisy)
    torch.manual_seed(5)
    given = task.threaded(0, 1, 7)
    assert all(map(same, islice(given, 40), task.batches(0, 1, 7)))
    given.close()  # type: ignore[attr-defined]
    assert threads == {threading.current_thread().name}
    after = torch.rand(())
    torch.manual_seed(5)
    assert torch.rand(()) == after  # those of the process continue as if no batch had been made


def test_a_prepare_that_draws_nothing_runs_in_the_thread() -> None:
    threads: set[str] = set()

    @draws_nothing
    def doubled(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        threads.add(threading.current_thread().name)
        if len(threads) > 1:
            raise ValueError("from prepare")
        return 2 * x, y

    task = task_of(floats(), batch=4, prepare=doubled, dtype=torch.float64)
    expected = list(islice(task.batches(0, 1, 7), 20))
    threads.clear()
    given = task.threaded(0, 1, 7)
    assert all(map(same, islice(given, 20), expected))
    assert threads == {NAME}
    threads.add("another")
    with pytest.raises(ValueError, match="from prepare"):  # raised in the training thread
        list(islice(given, 2 * MOST))


def test_code_of_the_user_makes_no_samples_in_the_thread() -> None:
    threads: set[str] = set()

    class Own(Dataset[tuple[Tensor, Tensor]]):
        def __len__(self) -> int:
            return 20

        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            threads.add(threading.current_thread().name)
            return torch.rand(5), torch.rand(1)

    class Ordered(SubsetRandomSampler):
        def __iter__(self) -> Iterator[int]:
            threads.add(threading.current_thread().name)
            return super().__iter__()

    sampled = DataLoader(TensorDataset(*floats()), batch_size=4, sampler=Ordered(range(20)))
    for data in (Own(), sampled):
        task = task_of(data, **({} if data is sampled else {"batch": 4}))
        assert all(map(same, islice(task.threaded(0, 1, 7), 12), task.batches(0, 1, 7)))
    assert threads == {threading.current_thread().name}


def test_tokens_are_gathered_together() -> None:
    for tokens, stride in ((np.arange(100, dtype=np.uint16), None), (torch.arange(50), 1)):
        data = Tokens(tokens, 6, stride=stride)
        index = np.array([3, 0, len(data) - 1, 3])
        together = Samples(data, "train").take(index)
        one_by_one = [torch.stack(column) for column in zip(*(data[i] for i in index.tolist()), strict=True)]
        for found, expected in zip(together, one_by_one, strict=True):
            assert found.dtype == expected.dtype
            assert torch.equal(found, expected)
            assert found.is_contiguous()
        with pytest.raises(IndexError):
            data.gathered(np.array([len(data)]))

    class Reversed(Tokens):
        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            x, y = super().__getitem__(index)
            return y, x

    assert Samples(Reversed(torch.arange(9), 2), "train").draws  # a subclass is code of the user


def test_a_block_is_at_most_a_part_of_the_cache() -> None:
    for row, batch in ((1, 2), (100, 100), (784, 100), (1 << 20, 2)):
        train = Samples((torch.zeros((64, row), dtype=torch.uint8),), "train")
        stream = task_of(floats(), batch=batch).stream(0, 1, 0)
        blocks = [len(block) for block in islice(row_blocks(train, stream, 0, 0, 0, tuple), 5)]
        assert blocks[0] == 1  # the first batch comes soon
        assert max(blocks) <= MOST
        assert max(blocks) == 1 or max(blocks) * row * batch <= BYTES


def test_seeds_are_those_of_their_numbers() -> None:
    for seed, rank, first in ((0, 0, 0), (2**63, 11, 999), (-3, 2, 10**12)):
        assert list(islice(sample_seeds(seed, rank, first), 3)) == [
            sample_seed(seed, rank, first + k) for k in range(3)
        ]


class TestTheThread:
    def test_it_makes_one_item_ahead(self) -> None:
        made: list[int] = []
        asked = threading.Semaphore(0)

        def items() -> Iterator[int]:
            for number in range(4):
                made.append(number)
                asked.release()
                yield number

        given = made_ahead(items())
        assert next(given) == 0
        asked.acquire()
        asked.acquire()  # the second one is made without being asked for
        assert made == [0, 1]
        assert list(given) == [1, 2, 3]

    def test_an_error_has_the_traceback_of_the_thread(self) -> None:
        def broken_source() -> Iterator[int]:
            yield 1
            raise OSError("the disk is gone")

        given = made_ahead(broken_source())
        assert next(given) == 1
        with pytest.raises(OSError, match="the disk is gone") as raised:
            next(given)
        assert "broken_source" in "".join(traceback.format_exception(raised.value))
        assert not reading()

    def test_it_ends_when_it_is_closed_and_when_nobody_holds_it(self) -> None:
        given = made_ahead(iter(range(10**9)))
        assert next(given) == 0
        assert len(reading()) == 1
        given.close()
        assert not reading()
        other = made_ahead(iter(range(10**9)))
        assert next(other) == 0
        del other
        assert not reading()

    def test_it_uses_one_core_and_leaves_the_number_of_others_alone(self) -> None:
        torch.set_num_threads(3)
        given = made_ahead(iter(torch.get_num_threads, 0))
        assert next(given) == 1
        assert torch.get_num_threads() == 3
        given.close()


def test_what_was_read_for_another_position_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that returns to a checkpoint continues with the batch of that position."""
    monkeypatch.setattr(spare_cores, "for_batches", lambda memory: True)
    task = task_of(floats(), batch=4)
    plan = SimpleNamespace(workers=2, seed=7, directory="nowhere")
    session: Any = SimpleNamespace(
        memory=SimpleNamespace(plan=plan),
        membership=SimpleNamespace(returns=0),
        board=SimpleNamespace(gradients=[0, 0]),
        waiting=SimpleNamespace(meanwhile=None),
        rank=1,
    )
    supply, plain = BatchSupply(session, task), list(islice(task.batches(1, 2, 7), 40))
    for number in range(30):
        found = supply.next()
        assert found is not None
        assert same(found, plain[number])
    first = reading()
    session.membership.returns, session.board.gradients[1] = 1, 11
    for number in range(11, 20):
        found = supply.next()
        assert found is not None
        assert same(found, plain[number])
    assert len(reading()) == 1
    assert reading() != first
    supply.close()


@pytest.mark.parametrize(
    ("workers", "hosts", "threads", "locked", "servers", "cores", "expected"),
    [
        (2, 2, 1, True, 1, 16, True),
        (8, 8, 1, True, 1, 16, True),
        (12, 12, 1, False, 1, 16, True),
        (13, 13, 1, True, 1, 16, False),  # three cores for thirteen workers
        (2, 2, 1, True, 1, 2, False),  # no core is free
        (1, 1, 1, False, 1, 2, False),  # the server has it
        (1, 1, 1, False, 0, 2, True),
        (1, 1, 1, False, 0, 1.5, False),  # a quota
        (1, 1, 4, False, 0, 4, False),  # the gradient uses all
        (8, 1, 1, False, 0, 16, False),  # workers that are threads of one process
    ],
)
def test_there_is_a_thread_where_a_core_is_free(
    workers: int, hosts: int, threads: int, locked: bool, servers: int, cores: float, expected: bool
) -> None:
    memory: Any = SimpleNamespace(
        plan=Plan(workers=workers, processes=hosts, threads=threads),
        board=SimpleNamespace(node=[0] * workers, server_node=[0] * servers, servers=servers),
        node=SimpleNamespace(number=0),
        locked_calls=lambda: locked,
        direct=lambda: False,
    )
    assert spare_cores.for_batches(memory, cores) is expected


def test_nothing_is_seeded_for_a_prepare_that_draws_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(seed: int) -> Any:
        raise AssertionError("seeded")

    def halved(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x / 2, y

    expected = next(task_of(floats(), prepare=halved).batches(0, 1, 0))
    monkeypatch.setattr("paceline.torch_task.random_numbers.seeded", refuse)
    with pytest.raises(AssertionError, match="seeded"):
        next(task_of(floats(), prepare=halved).batches(0, 1, 0))
    assert same(next(task_of(floats(), prepare=draws_nothing(halved)).batches(0, 1, 0)), expected)
    next(task_of(floats()).batches(0, 1, 0))
