"""`paceline verify` and `paceline diff` on runs of real processes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from attached import PLAIN, launch
from command_line import Commands, steps_of
from command_line import paceline as command
from torch import nn

import paceline
from paceline import Result, TorchTask, Verification
from paceline.runs import checkpoint, data_digest, file_sums, fingerprint
from paceline.runs.run_directory import RunDirectory
from paceline.runs.verify import Check

__all__ = ["command", "launch"]  # pytest finds them here

RUNS: dict[str, dict[str, Any]] = {
    "first": {},
    "again": {"checkpoint_seconds": None, "keep": 3, "patience": 20.0},  # nothing of which matters
    "seed": {"seed": 1},
    "rate": {"lr": 0.3},
    "three": {"workers": 3},
}


def trained(directory: Path, **changed: Any) -> Result:
    settings = {"lr": 0.1, "workers": 2, "steps": 40, "checkpoint_steps": 20, "every": 20, "summaries": False}
    return paceline.train("digits-mlp", "sync", directory=directory, **(settings | changed), say=lambda _: None)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    root = tmp_path_factory.mktemp("runs")
    return {name: trained(root / name, **changed) for name, changed in RUNS.items()}


@pytest.fixture
def run(results: dict[str, Result], tmp_path: Path) -> Path:
    """A run of one's own, to be spoilt."""
    return copied(results["first"], tmp_path / "spoilt")


def copied(result: Result, to: Path) -> Path:
    assert result.directory is not None
    shutil.copytree(result.directory, to)
    return to


def place(result: Result) -> Path:
    assert result.directory is not None
    return Path(result.directory)


def common(a: Result, b: Result) -> list[int]:
    return sorted({*steps_of(place(a))} & {*steps_of(place(b))})


def between(run: Path) -> Path:
    """The checkpoint on the way, some updates after it was asked for."""
    first, path, *_ = checkpoint.folders(run / "checkpoints")
    assert first.name == "0000000000"
    return path


def wrong(found: Verification) -> dict[str, str]:
    return {check.what: check.text for check in found.checks if check.fits is False}


def check(found: Verification, what: str) -> Check:
    return next(one for one in found.checks if one.what == what)


def altered(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def test_the_same_run_twice_has_one_digest_and_one_fingerprint(results: dict[str, Result]) -> None:
    first, again = results["first"], results["again"]
    assert first.digest == again.digest
    assert first.fingerprint == again.fingerprint == fingerprint.last_of(place(first))
    assert first.as_dict()["fingerprint"] == first.fingerprint
    assert paceline.verify(place(first)).verified
    found = paceline.diff(place(first), place(again))
    assert found.same
    assert (found.config, found.data, found.versions, found.counts) == ({}, {}, {}, {})
    assert (found.model, found.history) == (None, None)
    assert list(found.common) == common(first, again)


@pytest.mark.parametrize(
    ("other", "keys", "data"),
    [
        ("seed", {"seed": (0, 1)}, {"start"}),
        ("rate", {"hyper.lr": (0.1, 0.3)}, set()),
        ("three", {"workers": (2, 3)}, set()),
    ],
)
def test_what_was_changed_is_named(
    other: str, keys: dict[str, Any], data: set[str], results: dict[str, Result]
) -> None:
    first, second = results["first"], results[other]
    assert first.fingerprint != second.fingerprint
    found = paceline.diff(place(first), place(second))
    assert not found.same
    assert found.config == keys
    assert found.data.keys() == data
    update, same_until = (0, None) if data else (common(first, second)[1], 0)  # one seed gives one first vector
    assert found.model is not None
    assert (found.model.update, found.model.same_until) == (update, same_until)
    assert found.model.parameter == "1.weight"
    a, b = (checkpoint.load(place(one) / "checkpoints" / f"{update:010d}").tensors["model"] for one in (first, second))
    assert found.model.numbers == int((a != b).sum())
    assert found.model.largest == (a.double() - b.double()).abs().max().item()
    assert found.history is not None
    losses = [{point.update: point.metrics["loss"] for point in one.history} for one in (first, second)]
    update = min(losses[0].keys() & losses[1].keys())
    assert found.history["update"] == update
    assert found.history["metrics"]["loss"] == (losses[0][update], losses[1][update])
    assert found.counts.keys() == ({"gradients", "samples"} if other == "three" else set())


def test_the_first_parameter_that_differs_is_named(run: Path, results: dict[str, Result]) -> None:
    saved = checkpoint.load(between(run))
    saved.tensors["model"][64 * 32 + 5] += 1.0  # past the first layer's weights: in its biases
    checkpoint.save(run / "checkpoints", saved.step, saved.tensors, saved.numbers)
    found = paceline.diff(place(results["first"]), run)
    assert found.same  # at the end they are
    assert found.model is not None
    assert (found.model.update, found.model.same_until, found.model.numbers) == (saved.step, 0, 1)
    assert found.model.parameter == "1.bias"
    assert found.model.largest == pytest.approx(1.0, rel=1e-6)


@pytest.mark.parametrize("name", ["state.safetensors", "manifest.json"])
def test_an_altered_byte_of_any_checkpoint_is_found(name: str, run: Path) -> None:
    path = between(run) / name
    content = bytearray(path.read_bytes())
    content[-20] ^= 1
    path.write_bytes(content)
    found = paceline.verify(run)
    assert wrong(found).keys() == {"checkpoint"}
    assert f"{path.parent.name} is damaged" in wrong(found)["checkpoint"]
    assert str(run) not in wrong(found)["checkpoint"]


def test_without_its_newest_checkpoint_the_digest_is_of_another_update(run: Path) -> None:
    path = run / "checkpoints" / "0000000040" / "state.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    found = paceline.verify(run)
    assert wrong(found).keys() == {"checkpoint", "digest"}
    assert f"of the checkpoint of update {int(between(run).name)}" in wrong(found)["digest"]
    assert "of update 40" in wrong(found)["digest"]


@pytest.mark.parametrize(
    ("key", "value", "what"),
    [
        ("digest", "0" * 64, "digest"),
        ("fingerprint", "0" * 64, "fingerprint"),
        ("seed", 5, "config"),
        ("workers", 7, "config"),
        ("error", "it broke", "result"),
    ],
)
def test_an_altered_result_is_found(key: str, value: Any, what: str, run: Path) -> None:
    altered(run / "result.json", lambda result: result.update({key: value}))
    found = wrong(paceline.verify(run))
    assert found.keys() == {what, "files"}
    assert found["files"].startswith("result.json is not what was written")


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("seed", 5, "seed is 5, was 0"),
        ("hyper", {"lr": 0.2}, "hyper.lr is 0.2, was 0.1"),
        ("steps", 41, "steps is 41, was 40"),
        ("batch", 16, "batch is 16, was 32"),
        ("task_options", {"hidden": 16}, "task_options.hidden is 16, was 32"),
    ],
)
def test_an_altered_plan_is_found(key: str, value: Any, text: str, run: Path) -> None:
    altered(run / "plan.json", lambda plan: plan.update({key: value}))
    found = wrong(paceline.verify(run))
    assert text in found["config"]
    assert found["files"].startswith("plan.json is not what was written")
    assert found.keys() - {"data"} == {"config", "files"}
    assert ("data" in found) == (key in ("seed", "task_options"))  # the first vector


@pytest.mark.parametrize("change", [{"scheme": "snyc"}, {"later": 1}, {"hyper": {"speed": 1}}, {"workers": None}])
def test_a_plan_that_makes_no_sense_is_told(change: dict[str, Any], run: Path) -> None:
    altered(run / "plan.json", lambda plan: plan.update(change))
    assert "config" in wrong(paceline.verify(run))


def test_an_altered_fingerprint_is_found(run: Path) -> None:
    altered(run / fingerprint.FILE, lambda noted: noted["launches"][0]["versions"].update(torch="9.9"))
    assert "was changed" in wrong(paceline.verify(run))["fingerprint"]
    (run / fingerprint.FILE).write_text("[")
    assert "is not what was written" in wrong(paceline.verify(run))["fingerprint"]


def test_other_data_are_found(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of_samples = data_digest._of_samples
    monkeypatch.setattr(data_digest, "_of_samples", lambda samples: ("0" * 64, of_samples(samples)[1]))
    assert wrong(paceline.verify(run)) == {"data": "other data than then: train, test"}


def test_data_that_are_missing_are_told(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere(*_: Any, **__: Any) -> Any:
        raise paceline.DataError("digits is nowhere to be found")

    monkeypatch.setattr("paceline.runs.verify.task_of", nowhere)
    found = wrong(paceline.verify(run))
    assert found == {"data": "the task cannot be made again: digits is nowhere to be found"}


def test_other_versions_are_told_and_are_no_fault(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    then = fingerprint.versions(1, "cpu")["numpy"]
    monkeypatch.setattr("numpy.__version__", "99.0")
    found = paceline.verify(run)
    assert found.verified
    assert found.versions == {"numpy": (then, "99.0")}


def test_a_run_that_was_broken_off_is_told(run: Path, command: Commands) -> None:
    (run / "result.json").unlink()
    shown = command("verify", str(run))
    assert shown.code == 1
    assert "no result.json: the run was broken off" in wrong(paceline.verify(run))["result"]  # a table may wrap it
    assert shown.out.splitlines()[-1] == "not verified: result, files"  # an end that was noted, and is gone
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints").mkdir()
    assert wrong(paceline.verify(run)).keys() == {"result", "files", "checkpoints"}
    with pytest.raises(paceline.DataError, match="no whole checkpoint"):
        paceline.diff(run, run)


def test_a_run_that_goes_on_is_told(run: Path) -> None:
    with RunDirectory(run).lock():
        assert "still running" in wrong(paceline.verify(run))["result"]


def test_a_run_of_an_earlier_version_has_no_fingerprint(run: Path, results: dict[str, Result]) -> None:
    (run / fingerprint.FILE).unlink()
    (run / file_sums.FILE).unlink()
    altered(run / "result.json", lambda result: result.pop("fingerprint"))
    told = json.loads((run / "result.json").read_text())
    assert Result.from_dict(told, results["first"].vector).fingerprint is None
    found = paceline.verify(run)
    assert found.verified
    assert check(found, "fingerprint").fits is None
    assert check(found, "files").fits is None
    parted = paceline.diff(run, place(results["first"]))
    assert parted.same
    assert parted.fingerprints == (None, results["first"].fingerprint)
    assert any("has no fingerprint.json" in note for note in parted.notes)


def test_a_run_that_was_gone_on_with_has_the_fingerprint_of_one_in_one_go(
    run: Path, results: dict[str, Result], tmp_path: Path
) -> None:
    went_on = trained(run, steps=60, resume=True)
    straight = trained(tmp_path / "straight", steps=60)
    assert went_on.digest == straight.digest
    assert went_on.fingerprint == straight.fingerprint != results["first"].fingerprint
    assert [one.fingerprint.launched_at for one in fingerprint.read(run)] == [(0,), (40,)]
    assert paceline.verify(run).verified
    turned = trained(run, steps=80, lr=0.3, resume=True)
    assert turned.fingerprint != trained(tmp_path / "rate", steps=80, lr=0.3).fingerprint
    assert paceline.verify(run).verified


def test_a_task_made_in_python_is_taken_as_noted_unless_it_is_given(tmp_path: Path) -> None:
    x = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
    task, other = (
        TorchTask(lambda: nn.Linear(3, 1), nn.MSELoss(), (one, one.sum(1, keepdim=True)), batch=8, name="sums")
        for one in (x, x + 1)
    )
    paceline.train(task, "sync", steps=5, lr=0.1, directory=tmp_path / "own", summaries=False)
    found = paceline.verify(tmp_path / "own")
    assert found.verified
    assert check(found, "data").fits is None
    assert "task" in check(found, "config").text
    assert check(paceline.verify(tmp_path / "own", task=task), "data").fits is True
    assert wrong(paceline.verify(tmp_path / "own", task=other)) == {"data": "other data than then: train, test"}


def test_an_exact_run_has_one_fingerprint_with_any_number_of_processes(tmp_path: Path) -> None:
    one, two = (trained(tmp_path / str(number), workers=number, exact=True) for number in (1, 2))
    assert one.digest == two.digest
    assert one.fingerprint == two.fingerprint
    assert paceline.verify(tmp_path / "2").verified
    assert paceline.diff(tmp_path / "1", tmp_path / "2").config == {}


def test_the_data_of_a_script_are_its_own(launch: Callable[..., Result], tmp_path: Path) -> None:
    run = place(launch(PLAIN))
    noted = json.loads((run / fingerprint.FILE).read_text())["launches"][0]
    assert noted["data"] is None
    assert "script's own" in noted["reason"]
    found = paceline.verify(run)
    assert found.verified
    assert check(found, "data") == Check("data", None, noted["reason"])
    with (tmp_path / "script.py").open("a") as script:
        script.write("# another one now")
    assert "script_sha256 is" in wrong(paceline.verify(run))["config"]
    (tmp_path / "script.py").unlink()
    gone = paceline.verify(run)
    assert gone.verified
    assert "not checked: script_sha256" in check(gone, "config").text


def test_the_commands_say_the_same_and_have_the_exit_codes_of_diff(
    results: dict[str, Result],
    command: Commands,
) -> None:
    first, again, rate = (str(place(results[name])) for name in ("first", "again", "rate"))
    shown = command("verify", first)
    assert shown.code == 0, shown.err
    assert shown.out.splitlines()[-1] == "verified"
    assert command("verify", first, "--json").json["verified"] is True
    same = command("diff", first, again)
    assert (same.code, same.out.splitlines()[-1]) == (0, "same bits")
    other = command("diff", first, rate)
    assert other.code == 1
    assert "config hyper.lr" in other.out
    assert "(at update 0 they are the same)" in other.out
    assert other.out.splitlines()[-1] == "other bits; what determined them differs in config"
    plain = json.loads(command("diff", first, rate, "--json").out)
    assert plain["config"] == {"hyper.lr": [0.1, 0.3]}
    assert plain["same"] is False
    assert command("verify", "nowhere").code == 2
    assert command("diff", first, "nowhere").code == 2
