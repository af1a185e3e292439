"""Every hook passes the checks of paceline/testing/hooks.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.config import discovery
from paceline.testing.hooks import CHECKS, check_end_after_failure_in_the_simulator, check_order_in_the_simulator

OPTIONS = {  # those that a hook needs, or without which it would do nothing in a few steps
    "checkpoint-saver": "every=4",
    "early-stop": "every=2",
    "feed-function": f"function={Path(__file__).resolve()}:fed",
    "global-step-waiter": "step=2",
    "learning-rate": "base=0.001,kind=cosine,over=10",
    "log": "every=2",
    "mlflow": "every=2,evaluate=3",
    "profiler": "every=5,steps=1",
    "stop-at-step": "last_step=6",
    "summary-saver": "every=2",
    "target": "metric=loss,value=0,every=2",
    "validation": "every=2",
    "wandb": "every=2,mode=offline",
}


def fed(batch: object, session: object) -> None:
    """A function for the hook feed-function that leaves the mini-batch as it is."""


@pytest.mark.parametrize("hook", list(discovery.hooks()))
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_it_keeps_the_contract(check: Callable[[str, Path], None], hook: str, tmp_path: Path) -> None:
    check(f"{hook}:{OPTIONS[hook]}" if hook in OPTIONS else hook, tmp_path)


OPEN = '''
from dataclasses import dataclass

from paceline import Hook


@dataclass
class Careless(Hook, name="careless"):
    """Raises an error of its own before the chief's others have ended."""

    every: int = 1

    def end(self, session):
        raise OSError("the disk is full")


@dataclass
class Impatient(Hook, name="impatient"):
    """Refuses to begin."""

    def begin(self, session):
        raise ValueError("no")
'''


@pytest.mark.parametrize(("own", "error"), [("Careless", OSError), ("Impatient", ValueError)])
def test_a_hook_of_ones_own_that_breaks_a_promise_is_found(own: str, error: type[Exception], tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OPEN)
    with pytest.raises(error):
        check_order_in_the_simulator(f"{tmp_path / 'own.py'}:{own}", tmp_path)
    with pytest.raises(error):
        check_end_after_failure_in_the_simulator(f"{tmp_path / 'own.py'}:{own}", tmp_path)
