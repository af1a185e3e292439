"""The ledger of samples of real runs. Data: scikit-learn's digits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import Commands, paceline
from processes import Story, finished, run
from test_kills_servers import FrailAsync, shoot

from paceline import samples
from paceline.errors import DataError, UsageError
from paceline.result import Result

__all__ = ["paceline"]  # pytest finds it here

STEPS = 120


def ended(directory: Path, scheme: Any, kills: tuple[str, ...] = (), **settings: Any) -> tuple[Story, Result]:
    settings = {"workers": 2, "steps": STEPS, "checkpoint_seconds": 0.25} | settings
    story = run(directory, "digits-mlp", scheme, kills=kills, **settings)
    return story, finished(story, settings["steps"])


def test_every_gradient_of_an_asynchronous_run_is_one_update(tmp_path: Path) -> None:
    ended(tmp_path / "run", "async", workers=3)
    ledger = samples(tmp_path / "run")
    used = sorted(use.update for use in ledger.uses if use.fate == "used" and use.update is not None)
    assert used == list(range(1, STEPS + 1))
    assert ledger.fates()["dropped"] == 0
    for row in ledger.epochs():
        assert row["more"] == 0
        assert row["once"] + row["never"] == ledger.n
    drawn = {use: ledger.stream(use.rank).indices(use.batch) for use in ledger.uses}
    for sample in (0, 700, ledger.n - 1):
        assert ledger.of(sample) == [use for use in ledger.uses if sample in drawn[use]]
    with pytest.raises(UsageError, match="numbered from 0 to"):
        ledger.of(ledger.n)


def test_windows_and_deaths(tmp_path: Path) -> None:
    kills = ("worker:1", "server:0", "chief", "worker:1")
    ended(tmp_path / "run", "agn", kills, hyper={"window": 3})
    ledger = samples(tmp_path / "run")
    per_update = np.bincount([use.update or 0 for use in ledger.uses if use.fate == "used"], minlength=STEPS + 1)
    assert (per_update[1:] == 3).all()
    assert ledger.fates()["used"] == 3 * STEPS


def test_backup_workers_drop_what_comes_late(tmp_path: Path) -> None:
    _, result = ended(tmp_path / "run", "sync", workers=3, hyper={"aggregate": 2})
    fates = samples(tmp_path / "run").fates()
    assert fates["dropped"] == result.dropped > 0
    assert fates["used"] >= 2 * STEPS


@pytest.mark.parametrize("scheme", ["sync", "allreduce", "averaging"])
def test_one_common_order_holds_each_sample_of_an_epoch_once(scheme: str, tmp_path: Path) -> None:
    ended(tmp_path / "run", scheme, workers=3, feed="slice", batch=45)
    ledger = samples(tmp_path / "run")
    *whole, last = ledger.epochs()
    assert len(whole) >= 3
    assert all(row["once"] == ledger.n and row["more"] == row["never"] == 0 for row in whole)
    assert last["more"] == 0


def test_what_was_rolled_back_does_not_count(tmp_path: Path) -> None:
    story = shoot(tmp_path, FrailAsync, ["chief"])
    assert story.result is not None
    ledger = samples(story.directory.path, scheme=FrailAsync())
    used = sorted(use.update for use in ledger.uses if use.fate == "used" and use.update is not None)
    assert used == list(range(1, story.result.updates + 1))
    assert ledger.fates()["rolled back"] == story.result.rolled_back_updates


def test_a_run_that_went_on(tmp_path: Path) -> None:
    ended(tmp_path / "run", "sgd", workers=1, steps=50)
    ended(tmp_path / "run", "sgd", workers=1, steps=120, resume=True)
    ledger = samples(tmp_path / "run")
    assert [(use.batch, use.update) for use in ledger.uses] == [(k, k + 1) for k in range(120)]


def test_the_commands(tmp_path: Path, paceline: Commands) -> None:
    ended(tmp_path / "run", "async")
    told = paceline("samples", str(tmp_path / "run"))
    assert f"gradients: {STEPS} used, 0 dropped" in told.out
    assert "uses of 1,437 samples" in told.out
    one = paceline("samples", str(tmp_path / "run"), "--sample", "5")
    assert "sample 5" in one.out
    again = paceline("replay", str(tmp_path / "run"))
    assert again.out.rstrip().endswith("match")
    other = paceline("replay", str(tmp_path / "run"), "--what-if", "lr=0.01", "--since", "60")
    assert "(in the run itself" in other.out
    half = paceline("replay", str(tmp_path / "run"), "--until", "60", "--save", str(tmp_path / "x.safetensors"))
    assert "60 updates and" in half.out
    assert (tmp_path / "x.safetensors").exists()


def test_what_there_is_no_ledger_of(tmp_path: Path) -> None:
    ended(tmp_path / "quadratic", "async", record=False)
    with pytest.raises(DataError, match="has no order log"):
        samples(tmp_path / "quadratic")
