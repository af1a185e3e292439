"""What determines a run: its settings, its data, its versions, and the hash of all three."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from paceline import DataError, Hook, TorchTask
from paceline.config import build
from paceline.config.plan import Plan
from paceline.hooks.checkpoint_saver import CheckpointSaver
from paceline.runs import data_digest, fingerprint
from paceline.runs.fingerprint import Fingerprint, differing
from paceline.scheme import Scheme
from paceline.task import Task

PLAN = Plan(task="digits-mlp", scheme="sync", workers=2, steps=10)


@dataclass
class Patient(Hook):
    """Of a test's own."""

    value: int = 3
    what: object = None


class Squares:
    """A data set that makes each sample when it is asked for."""

    def __init__(self, length: int = 10, power: int = 2) -> None:
        self.length, self.power, self.asked = length, power, 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, float]:
        self.asked += 1
        return torch.rand(1), float(index**self.power) + np.random.random()


def scheme(**hyper: Any) -> Scheme:
    return build.scheme_of("sync", hyper)


def settings(plan: Plan = PLAN, task: Task | None = None, hooks: tuple[Hook, ...] = (), **hyper: Any) -> dict[str, Any]:
    return fingerprint.config_of(plan, scheme(**hyper), task, hooks)


def regression(x: Tensor, test: Any = None, **options: Any) -> TorchTask:
    return TorchTask(lambda: nn.Linear(1, 1), nn.MSELoss(), (x, x), test, **options)


def hashes(task: Task, x0: Tensor | None = None) -> dict[str, Any]:
    data, reason = data_digest.data_of(task, x0)
    assert data is not None, reason
    return data


def launch(**changed: Any) -> Fingerprint:
    return replace(Fingerprint(settings(), {"train": "a"}, {"torch": "1"}), **changed)


def test_only_what_is_computed_counts() -> None:
    other = replace(
        PLAN,
        **{"directory": "elsewhere", "title": "t", "patience": 1.0, "restarts": 9, "keep": 1, "summaries": False},
        **{"checkpoint_steps": 3, "checkpoint_seconds": None, "every": 5, "start": "exec", "hooks": ["summary-saver"]},
    )
    assert settings(other, hooks=(CheckpointSaver(every=3),)) == settings()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("workers", 3), ("servers", 2), ("seed", 1), ("steps", 11), ("seconds", 1.0), ("device", "cuda")),
        *(("threads", 2), ("quorum", "hold"), ("hooks", ["nan-guard"]), ("batch", 7), ("script", ["a.py", "-x"])),
    ],
)
def test_every_setting_that_is_computed_with_counts(name: str, value: Any) -> None:
    before = settings()
    assert differing(before, settings(replace(PLAN, **{name: value}))) == {name: (before[name], value)}


def test_hyper_parameters_count_with_the_options_of_their_rules() -> None:
    assert differing(settings(lr=0.1), settings(lr=0.2)) == {"hyper.lr": (0.1, 0.2)}
    parted = differing(settings(rule="adam"), settings(rule="adam", **{"rule.beta2": 0.99}))
    assert parted == {"hyper.rule.beta2": (0.999, 0.99)}


def test_the_tasks_options_are_written_out_in_their_own_types() -> None:
    task = build.task_of("digits-mlp", {})
    plain = settings(task=task)
    assert plain["task_options"] == {"hidden": 32, "dtype": "float32"}
    assert (plain["batch"], plain["feed"], plain["shuffle"]) == (32, "shared", True)
    for same in ({"hidden": "32"}, {"hidden": 32}):
        assert settings(replace(PLAN, task_options=same), task) == plain
    mnist = replace(PLAN, task="mnist-mlp", task_options={"data": "somewhere"})
    assert "data" not in settings(mnist, task)["task_options"]


def test_a_hook_made_in_python_is_known_by_its_class_and_its_plain_options() -> None:
    assert settings(hooks=(Patient(what=object()),))["hooks"] == ["Patient(value=3)"]
    noted = fingerprint.of(PLAN, scheme(), None, None, (Patient(),))
    assert noted.objects == ("hooks",)


def test_the_hash_is_of_the_three_parts_and_of_nothing_else() -> None:
    one = launch()
    assert one.hash == launch(launched_at=(0, 5), objects=("task",), reason="why").hash
    for changed in ({"config": {}}, {"data": None}, {"versions": {}}, {"before": {"fingerprint": "x", "update": 1}}):
        assert launch(**changed).hash != one.hash
    assert fingerprint.canonical({"b": 1, "a": (1.5, math.inf)}) == b'{"a":[1.5,"inf"],"b":1}'
    assert fingerprint.canonical({"a": math.inf}) != fingerprint.canonical({"a": math.nan})


def test_versions_name_what_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = fingerprint.versions(3, "cpu")
    assert plain["threads"] == 3
    assert plain["torch"] == torch.__version__
    assert {"paceline", "numpy", "python", "cpu", "machine"} <= plain.keys()
    assert "gpu" not in plain
    monkeypatch.setattr(fingerprint, "_graphics", lambda: ["H200"])
    assert fingerprint.versions(1, "cuda:0")["gpu"] == ["H200"]


def test_tensors_are_hashed_by_value_kind_and_shape() -> None:
    x = torch.arange(6.0).reshape(6, 1)
    same = hashes(regression(x))
    assert same["train"] == same["test"]
    assert hashes(regression(x.clone())) == same
    assert hashes(regression(torch.arange(12.0).reshape(6, 2)[:, :1] / 2)) == same  # by value, not by where it lies
    assert hashes(regression(x.double()))["train"] != same["train"]
    assert hashes(regression(x.reshape(3, 2)))["train"] != same["train"]
    assert hashes(regression(x, (x[:3], x[:3])))["test"] != same["test"]
    assert hashes(regression(x), torch.zeros(2))["start"] != hashes(regression(x), torch.ones(2))["start"]
    assert hashes(regression(x, batch=3).configured(feed="shard")) == same


def test_data_are_hashed_once_until_they_change(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(4, 1)
    task = regression(x)
    before = hashes(task)
    with monkeypatch.context() as patch:
        patch.setattr(data_digest, "_of_tensors", lambda _: pytest.fail("hashed again"))
        assert hashes(task.configured(batch=2)) == before
    x[2] = 1.0
    assert hashes(task)["train"] != before["train"]


def test_a_large_tensor_is_hashed_in_part_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_digest, "WHOLE", 8)
    monkeypatch.setattr(data_digest, "ROWS", 3)
    x = torch.arange(9.0).reshape(9, 1)
    found = hashes(regression(x))
    assert found["train_covers"] == "3 of 9 samples"
    x[4] = -1.0  # the middle is among those that are taken
    assert hashes(regression(x))["train"] != found["train"]


def test_samples_that_are_made_on_demand_are_taken_from_a_copy() -> None:
    state, drawn = torch.get_rng_state(), np.random.get_state()[1].tolist()  # type: ignore[index]
    data = Squares(100)
    task = TorchTask(lambda: nn.Linear(1, 1), nn.MSELoss(), data)
    found = hashes(task)
    assert found["train_covers"] == f"{data_digest.TAKEN} of 100 samples"
    assert data.asked == 0
    assert torch.equal(torch.get_rng_state(), state)
    assert np.random.get_state()[1].tolist() == drawn  # type: ignore[index]


def test_data_that_cannot_be_read_are_no_obstacle() -> None:
    class Broken(Squares):
        def __getitem__(self, index: int) -> Any:
            raise OSError("the disk is gone")

    data, reason = data_digest.data_of(TorchTask(lambda: nn.Linear(1, 1), nn.MSELoss(), Broken()), None)
    assert data is None
    assert reason is not None
    assert "the disk is gone" in reason


def test_what_prepare_looks_up_belongs_to_the_data() -> None:
    def task(text: Tensor) -> TorchTask:
        places = torch.arange(3)

        def looked_up(place: Tensor) -> tuple[Tensor, Tensor]:
            return text[place], text[place + 1]

        return TorchTask(lambda: nn.Linear(1, 1), nn.MSELoss(), (places,), prepare=looked_up)

    one, other = hashes(task(torch.zeros(5, 1))), hashes(task(torch.ones(5, 1)))
    assert one["train"] == other["train"]
    assert one["prepare"] != other["prepare"]


@pytest.mark.parametrize(
    ("name", "options"),
    [("toy", {"dtype": "float64"}), ("quadratic", {"noise": 0.5}), ("logistic", {"l2": 0.5})],
)
def test_a_task_of_plain_numbers_is_hashed_by_them(name: str, options: dict[str, Any]) -> None:
    first, again, other = (build.task_of(name, given) for given in ({}, {}, options))
    x = first.start(0)
    first.evaluate(x)
    first.grad(x, next(first.batches(0, 1, 0)))
    assert hashes(first) == hashes(again)
    assert hashes(first) != hashes(other)


def test_a_task_that_holds_something_else_says_what() -> None:
    task = build.task_of("toy", {})
    task.engine = object()  # type: ignore[attr-defined]
    data, reason = data_digest.data_of(task, None)
    assert data is None
    assert reason is not None
    assert "'engine' is a object" in reason


def test_each_launch_is_noted(tmp_path: Path) -> None:
    first = fingerprint.write(tmp_path, launch(), 0)
    longer = launch(config=settings(replace(PLAN, steps=20)))
    again = fingerprint.write(tmp_path, longer, 10)
    assert again.before is None  # the way there is the same as in one go
    assert again.hash == longer.hash
    fingerprint.write(tmp_path, longer, 15)
    other = fingerprint.write(tmp_path, launch(config=settings(lr=0.5)), 20)
    assert other.before == {"fingerprint": longer.hash, "update": 20}
    noted = fingerprint.read(tmp_path)
    assert [one.hash for one in noted] == [first.hash, longer.hash, other.hash]
    assert [one.fingerprint.launched_at for one in noted] == [(0,), (10, 15), (20,)]
    assert all(one.fingerprint.hash == one.hash for one in noted)
    assert fingerprint.last_of(tmp_path) == other.hash != launch(config=settings(lr=0.5)).hash


def test_a_run_from_the_beginning_starts_a_new_list(tmp_path: Path) -> None:
    fingerprint.write(tmp_path, launch(), 0)
    fingerprint.write(tmp_path, launch(versions={"torch": "2"}), 0)
    assert [one.fingerprint.versions for one in fingerprint.read(tmp_path)] == [{"torch": "2"}]


@pytest.mark.parametrize("text", ["", "{}", '{"launches": []}', '{"launches": [{"config": 3}]}', '{"launches": 7}'])
def test_a_damaged_file_is_told_and_stops_no_training(text: str, tmp_path: Path) -> None:
    (tmp_path / fingerprint.FILE).write_text(text)
    with pytest.raises(DataError, match=r"fingerprint\.json is not what was written"):
        fingerprint.read(tmp_path)
    assert fingerprint.last_of(tmp_path) is None
    went_on = fingerprint.write(tmp_path, launch(), 10)
    assert went_on.hash != launch().hash  # what came before is unknown: this is no run in one go
    assert json.loads((tmp_path / fingerprint.FILE).read_text())["launches"][0]["fingerprint"] == went_on.hash


def test_a_run_without_the_file_has_no_fingerprint(tmp_path: Path) -> None:
    assert fingerprint.read(tmp_path) == []
    assert fingerprint.last_of(tmp_path) is None
