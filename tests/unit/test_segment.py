"""Shared memory: segments, and tensors laid out in them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from memory_fixture import played

from paceline.errors import RunError
from paceline.processes.memory.call_codec import DTYPES
from paceline.processes.memory.segment import ALIGN, HEAD, Layout, Segment, anonymous

SIZE = HEAD + (1 << 16)


@pytest.fixture
def segment() -> Iterator[Segment]:
    descriptor = anonymous("paceline-test", SIZE)
    yield Segment(descriptor, SIZE)
    os.close(descriptor)


class TestSegment:
    def test_is_without_a_name_and_zero(self, segment: Segment) -> None:
        assert "paceline-test (deleted)" in os.readlink(f"/proc/self/fd/{segment.descriptor}")  # noqa: PTH115
        assert not segment.bytes.any()

    def test_another_process_sees_what_is_written(self, segment: Segment) -> None:
        def write() -> None:
            other = Segment(segment.descriptor, segment.size)
            other.tensor(128, torch.float64, (2, 2)).fill_(1.5)
            other.words[0] = -7
            other.floats[1] = 2.5

        played(write)
        assert segment.tensor(128, torch.float64, (4,)).tolist() == [1.5] * 4
        assert (segment.words[0], segment.floats[1]) == (-7, 2.5)

    def test_the_same_tensor_each_time(self, segment: Segment) -> None:
        assert segment.tensor(64, torch.int32, (3,)) is segment.tensor(64, torch.int32, [3])
        for offset in range(0, 8 * 2000, 8):  # more than are remembered
            assert segment.tensor(offset, torch.int64, ()).item() == 0

    def test_where_a_tensor_lies(self, segment: Segment) -> None:
        tensor = segment.tensor(256, torch.float32, (4, 4))
        assert segment.offset(tensor) == 256
        assert segment.offset(tensor[1]) == 256 + 16
        assert segment.offset(tensor[:, 1]) is None  # not in one piece
        assert segment.offset(torch.zeros(4)) is None

    @pytest.mark.parametrize(("offset", "shape"), [(SIZE - 4, (2,)), (-8, (1,)), (0, (SIZE,))])
    def test_nothing_reaches_beyond_it(self, offset: int, shape: tuple[int, ...], segment: Segment) -> None:
        with pytest.raises(RunError, match="beyond the shared memory"):
            segment.tensor(offset, torch.float32, shape)

    def test_empty_tensors_lie_nowhere(self, segment: Segment) -> None:
        assert segment.tensor(SIZE, torch.float32, (0, 3)).shape == (0, 3)


shapes = some.lists(some.integers(0, 5), max_size=3).map(tuple)


class TestLayout:
    @given(some.lists(some.tuples(shapes, some.sampled_from(DTYPES)), max_size=20))
    def test_what_is_laid_out_is_read_back_and_does_not_overlap(
        self, wanted: list[tuple[tuple[int, ...], torch.dtype]]
    ) -> None:
        layout = Layout()
        layout.notes = {"vectors": ["x"], "length": 3}
        for number, (shape, dtype) in enumerate(wanted):
            layout.add(f"cell.{number}", shape, dtype)
        descriptor = anonymous("paceline-test", layout.size)
        try:
            segment = Segment(descriptor, layout.size)
            layout.write(segment)
            read = Layout.read(segment)
            assert (read.places, read.notes, read.size) == (layout.places, layout.notes, layout.size)
            for number, (shape, _) in enumerate(wanted):
                assert read.tensor(segment, f"cell.{number}").shape == shape
            spans = sorted((p.offset, p.offset + _bytes(p.shape, p.dtype)) for p in read.places.values())
            assert all(offset % ALIGN == 0 and offset >= HEAD for offset, _ in spans)
            assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))
        finally:
            os.close(descriptor)

    def test_tensors_by_the_beginning_of_their_names(self, segment: Segment) -> None:
        layout = Layout()
        layout.like("worker.0.x", torch.zeros(3))
        layout.like("worker.0.v", torch.zeros((), dtype=torch.int64))
        layout.like("worker.1.x", torch.zeros(3))
        assert layout.under(segment, "worker.0.").keys() == {"x", "v"}

    def test_too_many_cells_are_refused(self, segment: Segment) -> None:
        layout = Layout()
        for number in range(20_000):
            layout.places[f"a-cell-with-a-rather-long-name.{number}"] = layout.places.get("") or _place()
        with pytest.raises(RunError, match="too many to lay out"):
            layout.write(segment)


def _place() -> object:
    layout = Layout()
    layout.add("one", (1000, 1000), torch.float32)
    return layout.places["one"]


def _bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return torch.empty(shape, dtype=dtype, device="meta").numel() * dtype.itemsize
