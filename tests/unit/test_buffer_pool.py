"""Memory that is used again: never while anything lies in it."""

from __future__ import annotations

import pytest
import torch

from paceline.processes.calls.zero_copy import BLOCKS, SMALLEST, BufferPool

LARGE = SMALLEST // 4


def test_a_block_is_used_again_when_its_tensor_is_gone() -> None:
    results = BufferPool()
    places = {results.copy(torch.full((LARGE,), float(k))).data_ptr() for k in range(10)}
    assert len(places) == 1


def test_a_result_and_the_next_one_take_turns() -> None:
    results, places = BufferPool(), set()
    for k in range(10):
        x = results.copy(torch.full((LARGE,), float(k)))  # the last one is held while this is made
        places.add(x.data_ptr())
        assert x.eq(k).all()
    assert len(places) == 2


def test_a_result_that_is_still_held_is_kept() -> None:
    results, source = BufferPool(), torch.zeros(LARGE)
    held = [results.copy(source.fill_(k)) for k in range(3 * BLOCKS)]
    assert all(x.eq(k).all() for k, x in enumerate(held))
    assert len({x.data_ptr() for x in held}) == len(held)


@pytest.mark.parametrize("how", ["view", "numpy", "autograd", "storage"])
def test_what_is_left_of_a_result_keeps_it_too(how: str) -> None:
    results, source = BufferPool(), torch.ones(LARGE)
    x = results.copy(source)
    weight = torch.ones(LARGE, requires_grad=True)
    kept = {
        "view": lambda x: x[5:].view(1, -1),
        "numpy": lambda x: x.numpy(),
        "autograd": lambda x: (x * weight).sum(),
        "storage": lambda x: x.untyped_storage(),
    }[how](x)
    place = x.data_ptr()
    del x
    for _ in range(2 * BLOCKS):
        assert results.copy(source.fill_(7)).data_ptr() != place
    if how == "autograd":
        kept.backward()
        assert weight.grad is not None
        assert weight.grad.eq(1).all()  # what it had saved


def test_shapes_and_kinds_are_kept() -> None:
    results = BufferPool()
    for tensor in (torch.rand(2, LARGE), torch.arange(LARGE), torch.rand(3), torch.tensor(1.5), torch.zeros(0, 4)):
        copy = results.copy(tensor)
        assert torch.equal(copy, tensor)
        assert (copy.dtype, copy.shape) == (tensor.dtype, tensor.shape)
        assert not tensor.numel() or copy.data_ptr() != tensor.data_ptr()
