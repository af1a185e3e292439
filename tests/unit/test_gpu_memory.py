"""Memory of GPUs: the letterbox that holds its descriptors, and addresses in a layout. (tests/gpu has the rest.)"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from paceline.processes.memory import gpu_memory
from paceline.processes.memory.segment import LARGE, PAGE, Layout, Segment, anonymous


def same(one: int, other: int) -> bool:
    first, second = os.fstat(one), os.fstat(other)
    return (first.st_dev, first.st_ino) == (second.st_dev, second.st_ino)


def test_a_letter_outlives_its_sender_and_every_reader(tmp_path: Path) -> None:
    letters = gpu_memory.letterbox()
    with pytest.raises(BlockingIOError):
        gpu_memory.read_letter(letters, leave=True)
    files = {gpu: os.open(tmp_path / str(gpu), os.O_CREAT | os.O_RDWR) for gpu in (0, 3)}
    if not (sender := os.fork()):
        gpu_memory.send_letter(letters, files)
        os._exit(0)
    assert os.waitpid(sender, 0)[1] == 0
    for _ in range(3):
        found = gpu_memory.read_letter(letters, leave=True)
        assert all(same(found[gpu], files[gpu]) for gpu in files)
        assert not any(os.get_inheritable(one) for one in found.values())
        for one in found.values():
            os.close(one)
    for one in gpu_memory.read_letter(letters).values():
        os.close(one)
    with pytest.raises(BlockingIOError):
        gpu_memory.read_letter(letters)


def test_a_layout_places_tensors_on_the_host_and_on_gpus() -> None:
    layout = Layout()
    layout.add("small", (3,), torch.float32)
    layout.add("large", (LARGE,), torch.uint8)
    layout.add("there", (5, 7), torch.float32, gpu=1)
    layout.add("next", (2,), torch.bfloat16, gpu=1)
    assert layout.places["large"].offset % PAGE == 0
    assert layout.places["there"].offset == gpu_memory.address(1, 0)
    assert layout.places["next"].offset == gpu_memory.address(1, gpu_memory.ALIGN)
    assert layout.gpus == {1: 2 * gpu_memory.ALIGN}
    segment = Segment(anonymous("paceline-test", layout.size), layout.size)
    layout.write(segment)
    read = Layout.read(segment)
    assert (read.places, read.gpus, read.size) == (layout.places, layout.gpus, layout.size)
    assert not segment.pin(layout.places["small"].offset, 12)
    assert not segment.pin(layout.places["there"].offset, LARGE)
