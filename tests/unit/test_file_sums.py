"""The sums of a run's files: what is noted when, and what counts as changed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.errors import DataError
from paceline.runs import file_sums
from paceline.runs.order_log import OrderLogWriter, RecordKind


@pytest.fixture
def ended(tmp_path: Path) -> Path:
    """A run directory whose first launch has ended."""
    file_sums.begin(tmp_path)
    file_sums.write_json(tmp_path, "plan.json", {"seed": 1})
    (tmp_path / "history.jsonl").write_text("{}\n")
    (tmp_path / "order" / "001").mkdir(parents=True)
    (tmp_path / "order" / "001" / "server-1.log").write_bytes(b"frames")
    file_sums.write_json(tmp_path, "result.json", {"updates": 3})
    file_sums.end(tmp_path)
    return tmp_path


def test_nothing_has_changed(ended: Path) -> None:
    sums = file_sums.read(ended)
    assert sums is not None
    assert sums.ended
    assert set(sums.files) == {"plan.json", "result.json", "history.jsonl", "order/001/server-1.log"}
    assert file_sums.changed(ended) == []


@pytest.mark.parametrize("name", ["plan.json", "result.json", "history.jsonl", "order/001/server-1.log"])
def test_what_is_altered_or_missing_is_named(name: str, ended: Path) -> None:
    (ended / name).write_bytes((ended / name).read_bytes() + b" ")
    assert file_sums.changed(ended) == [f"{name} is not what was written (its SHA-256 is not that of sums.json)"]
    with pytest.raises(DataError, match=f"{name} is not what was written"):
        file_sums.check(ended, name)
    (ended / name).unlink()
    assert file_sums.changed(ended) == [f"{name} is missing"]
    assert file_sums.changed(ended, "best/") == []


def test_a_file_too_many_is_named(ended: Path) -> None:
    (ended / "order" / "001" / "worker-9-1.log").write_bytes(b"")
    assert file_sums.changed(ended) == ["order/001/worker-9-1.log was not there when the run ended"]


def test_a_launch_that_begins_makes_what_it_adds_to_open_and_approves_no_change(ended: Path) -> None:
    (ended / "order" / "001" / "server-1.log").write_bytes(b"others")
    (ended / "result.json").unlink()
    file_sums.begin(ended)
    (ended / "history.jsonl").write_text("{}\n{}\n")
    (ended / "order" / "002").mkdir()
    (ended / "order" / "002" / "server-1.log").write_bytes(b"frames")
    file_sums.end(ended)
    assert [text.partition(" is")[0] for text in file_sums.changed(ended)] == ["order/001/server-1.log"]


def test_until_the_end_the_former_content_is_right_too(ended: Path) -> None:
    before = (ended / "plan.json").read_bytes()
    file_sums.write_json(ended, "plan.json", {"seed": 2})
    file_sums.check(ended, "plan.json")
    (ended / "plan.json").write_bytes(before)
    file_sums.check(ended, "plan.json")
    file_sums.end(ended)
    with pytest.raises(DataError, match=r"plan\.json is not what was written"):
        file_sums.check(ended, "plan.json")


def test_a_log_that_is_still_being_written_has_no_sum_yet(ended: Path) -> None:
    log = OrderLogWriter(ended / "order" / "001" / "worker-1-1.log", {})
    file_sums.end(ended)
    log.add(RecordKind.GRAD, 1.0)
    log.close()
    assert file_sums.changed(ended) == []


def test_damaged_sums_are_refused_and_say_what_to_do(ended: Path) -> None:
    content = json.loads((ended / "sums.json").read_text())
    content["files"]["plan.json"] = ["0" * 64]
    (ended / "sums.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"sums\.json is not what was written; delete it"):
        file_sums.check(ended, "plan.json")
    (ended / "sums.json").unlink()
    assert file_sums.read(ended) is None
    file_sums.check(ended, "plan.json")
