"""Batches that a thread reads ahead for a GPU: in pinned memory, and the same as on the CPU."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
from itertools import islice

import torch

from paceline.config import build
from paceline.torch_task import TorchTask

task = build.task_of("mnist-cnn", {}).configured(batch=64)
there = task.on(torch.device("cuda:0"))
pinned = []
placed = TorchTask._placed
TorchTask._placed = lambda self, parts: (pinned.extend(one.is_pinned() for one in parts), placed(self, parts))[1]
plain = islice(task.batches(0, 2, 7), 40)
ahead = there.threaded(0, 2, 7)
for one, other in zip(plain, ahead):
    for part, moved in zip(one.data, other.data):
        assert moved.is_cuda
        assert torch.equal(part, moved.cpu())
ahead.close()
assert len(pinned) >= 80
assert sum(pinned) == 80, pinned  # those of the GPU's task
"""


@pytest.mark.parametrize("threads", [1, 2])
def test_they_are_those_of_the_cpu(threads: int) -> None:
    script = f"import torch; torch.set_num_threads({threads})\n{SCRIPT}"
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stdout + told.stderr
