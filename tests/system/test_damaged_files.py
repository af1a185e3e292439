"""Every file of a finished run, damaged in every way, under every command that reads runs: a sentence that names the
file, never a traceback; and `verify` notices each change that matters.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from command_line import Commands, Shown
from command_line import paceline as command
from processes import finished, leaving_nothing, run

from paceline.runs import checkpoint, file_sums
from paceline.runs.run_directory import RunDirectory

__all__ = ["command"]  # pytest finds it here

STEPS = 60


def flipped(content: bytes) -> bytes:
    """Three bytes are not what they were."""
    changed = bytearray(content)
    for part in (1, 2, 3):
        changed[len(changed) * part // 4] ^= 0x15
    return bytes(changed)


DAMAGE: dict[str, Callable[[bytes], bytes | None]] = {
    "truncated": lambda content: content[: len(content) // 2],
    "flipped": flipped,
    "emptied": lambda content: b"",
    "deleted": lambda content: None,
    "garbage": lambda content: random.Random(len(content)).randbytes(max(len(content), 100)),
}
# that no run is resumed or judged by: nothing is read back, or by the page of `paceline watch` alone
NOT_READ = ("lock", "logs/", "progress.jsonl", "summaries/")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with all that a run can leave: a killed worker's cells, a best checkpoint, a second launch."""
    path, settings = tmp_path_factory.mktemp("whole") / "run", {"workers": 2, "evaluator": True, "best": "accuracy"}
    settings |= {"checkpoint_steps": STEPS // 2, "keep": 2, "every": 20, "summaries": False}
    finished(run(path, "digits-mlp", "async", kills=("worker:1",), steps=STEPS, **settings), STEPS)
    finished(run(path, "digits-mlp", "async", steps=STEPS + 20, resume=True, **settings), STEPS + 20)
    names = {path.name for path in path.rglob("*")}
    assert names > {"plan.json", "result.json", "history.jsonl", "fingerprint.json", "best.json", "sums.json", "start"}
    assert any(name.startswith("worker-1-2") and name.endswith("safetensors") for name in names)
    assert len(RunDirectory(path).history()) > 2
    return path


def files(run: Path) -> list[str]:
    return sorted(path.relative_to(run).as_posix() for path in run.rglob("*") if path.is_file())


def cases(run: Path, every: bool) -> Iterator[tuple[str, str]]:
    """Each file with each damage, or each with one of them in turn."""
    for number, name in enumerate(files(run)):
        for kind in DAMAGE if every else [list(DAMAGE)[number % len(DAMAGE)]]:
            content = (run / name).read_bytes()
            if content or kind in ("deleted", "garbage"):
                yield name, kind


def damage(run: Path, name: str, kind: str) -> None:
    changed = DAMAGE[kind]((run / name).read_bytes())
    (run / name).unlink()  # the copy may share it with another checkpoint by a link
    if changed is not None:
        (run / name).write_bytes(changed)


@contextmanager
def spoilt(whole: Path, place: Path, name: str, kind: str) -> Iterator[Path]:
    """A copy of the run with one file damaged."""
    run = Path(shutil.copytree(whole, place / "runs" / "spoilt"))
    damage(run, name, kind)
    try:
        yield run
    finally:
        shutil.rmtree(run)


def named(name: str, shown: Shown) -> bool:
    """Whether the file, or the folder of the checkpoint that it is part of, is spoken of."""
    path, text = Path(name), shown.out.replace("\n", " ") + shown.err.replace("\n", " ")
    of_a_checkpoint = path.name in ("state.safetensors", "manifest.json", "best.json")
    return path.name in text or (of_a_checkpoint and path.parent.name in text)


def looked_at(command: Commands, run: Path, other: Path, name: str, kind: str) -> None:
    """Each command that only reads."""
    for words in (
        ("runs", str(run.parent)),
        ("runs", str(run.parent), "--json"),
        ("show", str(run)),
        ("verify", str(run)),
        ("replay", str(run)),
        ("samples", str(run)),
        ("evaluate", str(run)),
        ("evaluate", str(run), "--which", "best"),
        ("diff", str(run), str(other)),
    ):
        shown = command(*words)
        told = f"{words[0]} with {name} {kind}: exit code {shown.code}\n{shown.out}{shown.err}"
        assert "Traceback" not in shown.out + shown.err, told
        assert shown.code in (0, 1, 3) or (shown.code == 2 and "best" in words), told
        if shown.code and words[0] != "verify":
            assert named(name, shown), told
        if words[0] == "verify":
            matters = not name.startswith(NOT_READ)
            assert shown.code == (1 if matters else 0), told
            assert named(name, shown) or not matters, told
        if words[0] in ("runs", "show"):
            assert shown.code == 0, told
            if name in ("plan.json", "result.json", file_sums.FILE) and kind != "deleted":
                assert named(name, shown), told


def resumed(command: Commands, run: Path, whole: Path, name: str, kind: str) -> None:
    shown = command("train", "--resume", str(run), "--steps", str(STEPS + 30), "--json")
    told = f"resume with {name} {kind}: exit code {shown.code}\n{shown.out}{shown.err}"
    assert "Traceback" not in shown.out + shown.err, told
    refused = name == "plan.json" or (name == file_sums.FILE and kind != "deleted")
    assert shown.code == (3 if refused else 0), told
    noted, newest = file_sums.read(whole), checkpoint.newest(whole / "checkpoints", lambda _: None)
    assert noted is not None
    assert newest is not None
    if refused or name in noted.files or (whole / name).parent == newest.path:  # what is read to resume a run
        assert named(name, shown), told


def test_every_file_damaged_in_every_way(whole: Path, tmp_path: Path, command: Commands) -> None:
    for name, kind in cases(whole, every=True):
        with spoilt(whole, tmp_path, name, kind) as run:
            looked_at(command, run, whole, name, kind)


def test_a_damaged_run_is_resumed_or_refused(whole: Path, tmp_path: Path, command: Commands) -> None:
    """With every damage of the files that a resumed run reads, with one of each other file."""
    several = [case for case in cases(whole, every=True) if "/" not in case[0]]
    with leaving_nothing():
        for name, kind in dict.fromkeys([*several, *cases(whole, every=False)]):
            with spoilt(whole, tmp_path, name, kind) as run:
                resumed(command, run, whole, name, kind)


def test_a_run_without_any_whole_checkpoint_is_not_begun_again(whole: Path, tmp_path: Path, command: Commands) -> None:
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    for path in checkpoint.folders(run / "checkpoints"):
        (path / "manifest.json").write_text("{")
    shown = command("train", "--resume", str(run), "--steps", "90")
    assert shown.code == 3
    assert "is whole: there is nothing to resume from" in shown.err


class TestPlan:
    """Settings are changed by options of `--resume`, not in plan.json."""

    @pytest.mark.parametrize(
        ("before", "after"), [('"seed": 0', '"seed": 1'), ('"patience": 30.0', '"patience": 31.0')]
    )
    def test_a_changed_one_is_refused(
        self, before: str, after: str, whole: Path, tmp_path: Path, command: Commands
    ) -> None:
        spoilt = Path(shutil.copytree(whole, tmp_path / "spoilt"))
        plan = spoilt / "plan.json"
        assert before in plan.read_text()
        plan.write_text(plan.read_text().replace(before, after))
        shown = command("train", "--resume", str(spoilt), "--steps", "90")
        assert shown.code == 3
        assert "plan.json is not what was written" in shown.err
        assert "give changes as options of --resume" in shown.err

    def test_options_of_resume_change_it(self, whole: Path, tmp_path: Path, command: Commands) -> None:
        copy = Path(shutil.copytree(whole, tmp_path / "copy"))
        for options in (("--steps", "90"), ("--steps", "95", "--patience", "20"), ("--steps", "100", "--keep", "4")):
            assert command("train", "--resume", str(copy), *options, "--json").json["updates"] == int(options[1])
        assert command("verify", str(copy)).code == 0

    def test_one_that_was_written_before_a_kill_is_the_right_one(self, whole: Path, tmp_path: Path) -> None:
        """A launcher that dies between the entry in sums.json and the plan leaves the old plan, or the new one."""
        copy = RunDirectory(Path(shutil.copytree(whole, tmp_path / "copy")))
        old, new = (copy.path / "plan.json").read_bytes(), copy.plan() | {"patience": 99.0}
        copy.begin()
        copy.write_plan(new)
        assert copy.plan()["patience"] == 99.0
        (copy.path / "plan.json").write_bytes(old)
        assert copy.plan()["patience"] == 30.0
        (copy.path / "plan.json").write_bytes(old.replace(b"30.0", b"29.0"))
        with pytest.raises(Exception, match=r"plan\.json is not what was written"):
            copy.plan()
