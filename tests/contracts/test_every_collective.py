"""Every collective passes the conformance suite, in real runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from paceline.config import discovery
from paceline.testing import collectives

ABSENT = {"gloo": not dist.is_gloo_available(), "nccl": not (torch.cuda.is_available() and dist.is_nccl_available())}


@pytest.mark.parametrize("check", collectives.CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("collective", list(discovery.readable("collectives")))
def test_every_collective(collective: str, check: collectives.Check, tmp_path: Path) -> None:
    if ABSENT.get(collective, False):
        pytest.skip(f"{collective} is not available here")
    check(collective, tmp_path)
