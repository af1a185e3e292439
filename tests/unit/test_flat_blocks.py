"""A flat vector as blocks: parameters are cut out and joined without a change."""

from __future__ import annotations

import torch

from paceline.framework_tasks.beginning import places
from paceline.framework_tasks.flat_blocks import LARGE, FlatBlocks

SHAPES = [[3, 4], [5], [LARGE], [2], [7, 1], [LARGE, 2], [LARGE + 1], []]


def blocks() -> FlatBlocks:
    return FlatBlocks(places([(str(number), shape) for number, shape in enumerate(SHAPES)]))


def test_large_parameters_are_alone_and_small_neighbours_together() -> None:
    assert [[list(shape) for _, _, shape in block] for block in blocks().members] == [
        [[3, 4], [5]],
        [[LARGE]],
        [[2], [7, 1]],
        [[LARGE, 2]],
        [[LARGE + 1]],
        [[]],
    ]


def test_cut_and_joined_it_is_the_vector_again() -> None:
    one = blocks()
    x = torch.randn(one.members[-1][-1][1], generator=torch.Generator().manual_seed(0))
    weights = one.weights(one.cut(x), torch.reshape)
    assert [list(weight.shape) for weight in weights] == SHAPES
    assert torch.equal(torch.cat([weight.reshape(-1) for weight in weights]), x)
    assert all(
        cut.data_ptr() == x.data_ptr() + 4 * block[0][0] for cut, block in zip(one.cut(x), one.members, strict=True)
    )
    out = torch.zeros_like(x)
    one.write(out, one.joined([weight.reshape(-1) for weight in weights], torch.cat), lambda block: block)
    assert torch.equal(out, x)
