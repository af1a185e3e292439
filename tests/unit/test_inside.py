"""A worker of several processes: slices of a batch, their sum, and the same bits from real processes."""

from __future__ import annotations

import dataclasses
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from small_models import DATA, first_batch, net, normed, task
from torch import nn
from torch.nn.functional import cross_entropy

import paceline
from paceline.config.from_plan import task_of
from paceline.config.plan import Plan
from paceline.config.validate import planned
from paceline.errors import RunError, UsageError
from paceline.inside.batch_slices import slices
from paceline.inside.kind import Inside
from paceline.inside.sharded_model import blocks
from paceline.inside.sliced_task import SlicedTask, sliced
from paceline.processes.inside import slice_messages
from paceline.processes.inside.inner_group import InnerGroup, LedTask
from paceline.task import Batch, Task
from paceline.torch_task import TorchTask


def dropping() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.Dropout(0.5), nn.Linear(7, 3))


def double(model=net, **options) -> TorchTask:
    return task(model, dtype=torch.float64, **options)


@contextmanager
def led(plain: TorchTask, inside: str) -> Iterator[LedTask]:
    torch.set_num_threads(1)
    made = sliced(plain, inside)
    assert isinstance(made, SlicedTask)
    group = InnerGroup(made.inside, "worker:0", lambda: made, print, lambda: None)
    try:
        yield LedTask(made, group)
    finally:
        group.close()


class TestTheSetting:
    @pytest.mark.parametrize("text", ["ddp", "ddp:0", "ddp:1", "ddp:65", "ddp:2:3", "dp:2", "fsdp:x", "ddp:-2"])
    def test_another_text_is_refused(self, text: str) -> None:
        with pytest.raises(UsageError, match="inside"):
            Inside.read(text)
        with pytest.raises(UsageError, match="inside"):
            planned("digits-mlp", "sync", inside=text)
        with pytest.raises(UsageError, match="inside"):
            paceline.simulate("digits-mlp", "sync", inside=text, steps=1)

    def test_an_exact_run_and_a_gpu_are_refused_with_the_reason(self) -> None:
        with pytest.raises(UsageError, match="micro-batches computed whole"):
            planned("digits-mlp", "sync", inside="ddp:2", exact=True)
        with pytest.raises(UsageError, match="never tried on GPUs"):
            planned("digits-mlp", "sync", inside="ddp:2", device="cuda")

    def test_a_task_whose_samples_are_not_known_is_refused(self) -> None:
        with pytest.raises(UsageError, match="not a TorchTask"):
            task_of(Plan(task="quadratic", inside="ddp:2"), {})

    def test_a_batch_without_a_sample_for_each_is_refused(self) -> None:
        with pytest.raises(UsageError, match="a batch of 2 has no sample for each of 3"):
            task_of(Plan(task="digits-mlp", inside="ddp:3", batch=2), {})

    def test_batched_gradients_are_refused(self) -> None:
        with pytest.raises(UsageError, match="one by one"):
            paceline.simulate("digits-mlp", "sync", inside="ddp:2", batched=True, steps=1)

    def test_it_is_part_of_the_plan_and_counts_threads(self) -> None:
        plan, *_ = planned("digits-mlp", "averaging", inside="ddp:3", threads=2)
        assert Plan.from_dict(vars(plan)).inside == "ddp:3"
        assert plan.worker_threads == 6


class TestSlices:
    @pytest.mark.parametrize(("size", "count", "sizes"), [(8, 2, [4, 4]), (7, 3, [3, 2, 2]), (5, 4, [2, 1, 1, 1])])
    def test_they_are_the_batch_in_order(self, size: int, count: int, sizes: list[int]) -> None:
        rows = torch.arange(size)
        parts = slices(Batch((rows, {"twice": 2 * rows}), size, seed=3, weight=0.5), count)
        assert [part.size for part in parts] == sizes
        assert torch.equal(torch.cat([part.data[0] for part in parts]), rows)
        assert torch.equal(torch.cat([part.data[1]["twice"] for part in parts]), 2 * rows)
        assert sum(part.weight for part in parts) == pytest.approx(0.5)
        assert len({part.seed for part in parts} | {3}) == count + 1

    def test_fewer_samples_than_slices_leave_some_without_weight(self) -> None:
        parts = slices(Batch((torch.arange(2), torch.arange(2)), 2), 3)
        assert [part.weight for part in parts] == [0.5, 0.5, 0.0]
        assert torch.equal(parts[2].data[0], parts[0].data[0])

    @pytest.mark.parametrize(
        ("data", "reason"),
        [
            ((torch.zeros(4), torch.zeros(3)), "3, 4 rows"),
            ((torch.tensor(1.0),), "no tensor"),
            ((torch.zeros(4), object()), "holds a object"),
            ((torch.eye(4).to_sparse(), torch.zeros(4)), "sparse"),
        ],
    )
    def test_what_has_no_row_per_sample_is_refused(self, data: tuple, reason: str) -> None:
        with pytest.raises(UsageError, match=reason):
            slices(Batch(data, 4), 2)


class TestTheSum:
    @pytest.mark.parametrize("inside", ["ddp:2", "ddp:3", "fsdp:4", "ddp:8"])
    @pytest.mark.parametrize("batch", [8, 9])
    def test_it_is_the_gradient_of_the_whole_batch(self, inside: str, batch: int) -> None:
        plain = double(batch=batch)
        x, one = plain.start(0), first_batch(plain)
        loss, g = plain.grad(x, one)
        expected = g.clone()
        found, ours = sliced(plain, inside).grad(x, one)
        assert found == pytest.approx(loss, abs=1e-10)
        assert torch.allclose(ours, expected, rtol=0, atol=1e-10)

    def test_a_batch_shorter_than_the_slices(self) -> None:
        plain = double()
        x, one = plain.start(0), first_batch(plain)
        short = dataclasses.replace(one, data=tuple(part[:2] for part in one.data), size=2)
        expected = plain.grad(x, short)[1].clone()
        assert torch.allclose(sliced(plain, "ddp:3").grad(x, short)[1], expected, rtol=0, atol=1e-10)

    def test_the_sum_is_clipped_as_the_whole_gradient_is(self) -> None:
        plain = double(clip=0.05)
        x, one = plain.start(0), first_batch(plain)
        expected = plain.grad(x, one)[1].clone()
        assert expected.norm() == pytest.approx(0.05, rel=1e-3)
        assert torch.allclose(sliced(plain, "ddp:2").grad(x, one)[1], expected, rtol=0, atol=1e-10)

    def test_slices_draw_random_numbers_of_their_own(self) -> None:
        plain = double(lambda: nn.Sequential(nn.Dropout(0.5), nn.Linear(5, 3)))
        one = first_batch(plain)
        same = dataclasses.replace(one, data=(one.data[0][:1].repeat(8, 1), one.data[1][:1].repeat(8)))
        halves = [plain.grad(plain.start(0), part)[1].clone() for part in slices(same, 2)]
        assert not torch.allclose(*halves)

    def test_buffers_are_those_of_the_first_slice(self) -> None:
        plain = double(normed)
        x, one = plain.start(0), first_batch(plain)
        ours, first = plain.buffers(), plain.buffers()
        sliced(plain, "ddp:2").grad(x, one, buffers=ours)
        plain.grad(x, slices(one, 2)[0], buffers=first)
        assert all(torch.equal(ours[name], first[name]) for name in first)


class TestProcesses:
    @pytest.mark.parametrize("inside", ["ddp:2", "ddp:3"])
    @pytest.mark.parametrize("model", [dropping, normed])
    def test_they_have_the_bits_of_slices_one_after_the_other(self, inside: str, model) -> None:
        plain = task(model, batch=9, clip=0.5)
        alone = sliced(plain, inside)
        x, batches = plain.start(0), plain.batches(0, 1, 0)
        ours, theirs = plain.buffers(), plain.buffers()
        with led(task(model, batch=9, clip=0.5), inside) as together:
            for _ in range(3):
                batch = next(batches)
                loss, g = alone.grad(x, batch, torch.empty_like(x), ours or None)
                found, other = together.grad(x, batch, torch.empty_like(x), theirs or None)
                assert (loss, g.tolist()) == (found, other.tolist())
                x = x - 0.1 * g
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)

    def test_an_error_of_one_is_told_by_the_first(self) -> None:
        def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            if os.getpid() != first:
                raise ValueError("a bad loss")
            return cross_entropy(output, target)

        first = os.getpid()
        plain = TorchTask(net, loss, DATA, batch=8)
        with led(plain, "ddp:2") as together, pytest.raises(RunError, match=r"process 1 .*ValueError: a bad loss"):
            together.grad(plain.start(0), first_batch(plain))

    def test_they_end_with_the_group(self) -> None:
        with led(task(), "ddp:3") as together:
            pids = together._group.pids
            assert len(pids) == 2
        for pid in pids:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)


def test_a_message_carries_a_batch_of_any_form() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        tensors = {
            "ids": torch.arange(6).view(2, 3).t(),
            "mask": torch.tensor([True, False]),
            "none": torch.empty(0, 2),
        }
        data = (tensors, [torch.randn(2).bfloat16(), (torch.tensor(1.5), "word", None, 2)])
        batch = Batch(data, 2, seed=2**62, weight=0.1)
        slice_messages.send(ours, {"memory": 5}, batch)
        message, found = slice_messages.receive(theirs)
        ours.close()
        assert slice_messages.receive(theirs) is None
    assert message == {"memory": 5}
    assert (found.size, found.seed, found.weight) == (2, 2**62, 0.1)
    assert all(torch.equal(found.data[0][name], one) for name, one in tensors.items())
    assert torch.equal(found.data[1][0], data[1][0])
    assert found.data[1][1] == (torch.tensor(1.5), "word", None, 2)
    assert isinstance(found.data[1], list)


class TestBlocks:
    def test_members_of_lists_and_sequences_are_gathered_one_by_one(self) -> None:
        layer = nn.ModuleDict({"mlp": nn.Sequential(nn.Linear(2, 2), nn.ReLU())})
        model = nn.ModuleDict(
            {"head": nn.Linear(2, 2), "layers": nn.ModuleList([layer, nn.Sequential(nn.Linear(2, 2))])}
        )
        assert list(blocks(model)) == [layer, model["layers"][1][0]]

    def test_a_tied_parameter_stays_with_the_rest(self) -> None:
        model = nn.Sequential(nn.Embedding(4, 4), nn.Linear(4, 4), nn.Linear(4, 4, bias=False))
        model[2].weight = model[0].weight
        assert list(blocks(model)) == [model[1]]


def test_the_simulator_computes_the_slices() -> None:
    def ran(inside: str) -> paceline.Result:
        return paceline.simulate("digits-mlp", "averaging", workers=2, steps=5, window=2, inside=inside)

    plain, two, again = ran(""), ran("ddp:2"), ran("fsdp:2")
    assert two.digest == again.digest != plain.digest
    assert two.metrics["loss"] == pytest.approx(plain.metrics["loss"], rel=1e-4)


def test_a_sliced_task_keeps_its_form_when_it_is_configured() -> None:
    made: Task = sliced(task(), "ddp:2").configured(batch=4)
    assert isinstance(made, SlicedTask)
    assert made.batch == 4
