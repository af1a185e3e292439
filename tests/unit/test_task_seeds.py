"""A task file that builds its model without a seed of its own has one start in every process."""

from __future__ import annotations

from pathlib import Path

import torch

from paceline.config.build import task_of

FILE = """
import random

import torch

import paceline

random.random()  # reading the file draws, too


def make():
    x = torch.ones(8, 3)
    return paceline.TorchTask(torch.nn.Linear(3, 1), torch.nn.functional.mse_loss, (x, torch.ones(8, 1)))
"""


def test_a_model_that_the_function_builds_is_the_same_each_time(tmp_path: Path) -> None:
    file = tmp_path / "built_task.py"
    file.write_text(FILE)
    torch.manual_seed(1)
    first = task_of(f"{file}:make", {}).start(0)
    torch.manual_seed(2)
    assert torch.equal(task_of(f"{file}:make", {}).start(0), first)
    torch.manual_seed(2)
    expected = torch.rand(1)
    torch.manual_seed(2)
    task_of(f"{file}:make", {})
    assert torch.equal(torch.rand(1), expected)  # the caller's random numbers go on as before
