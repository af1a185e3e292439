"""Tests that need a GPU: skipped where there is none. Runs are forks of this process, which must not start CUDA."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "system"))  # processes.py

os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="torch finds no GPU here"))


@pytest.fixture
def gpu_memory() -> object:
    """How much memory of the first GPU is in use, in MiB, as the driver counts it."""

    def used() -> int:
        query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
        return int(subprocess.run(query, check=True, capture_output=True, text=True).stdout)

    return used
