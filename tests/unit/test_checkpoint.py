"""Checkpoints: what comes back, what is noticed, what is never lost."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from paceline.errors import DataError, RunError, UsageError
from paceline.runs import atomic_files, checkpoint, tensor_file

TENSORS = {
    "model": torch.tensor([1.0, -0.0, torch.nan, torch.inf]),
    "half": torch.tensor([1.5, -2.25], dtype=torch.bfloat16),
    "number": torch.tensor(2**62 + 1),
    "flags": torch.tensor([True, False]),
    "nothing": torch.empty(0, 3, dtype=torch.float64),
    "also_nothing": torch.empty(0),
}
NUMBERS = {"now": 0.1 + 0.2, "big": 2**100, "list": [[1, "a", None]], "lost": float("inf"), "ü": "ß"}


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def write(directory: Path, step: int, value: float = 0.0, **options: int) -> Path:
    return checkpoint.save(directory, step, {"model": torch.full((50,), value)}, {"value": value}, **options)


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def silent(text: str) -> None:
    raise AssertionError(text)


class TestRoundTrip:
    def test_every_kind_of_tensor_bit_for_bit(self, tmp_path):
        path = checkpoint.save(tmp_path, 400, TENSORS, NUMBERS)
        assert path == tmp_path / "0000000400"
        assert names(path) == ["manifest.json", "state.safetensors"]
        found = checkpoint.load(path)
        assert (found.path, found.step, found.numbers) == (path, 400, NUMBERS)
        assert found.tensors.keys() == TENSORS.keys()
        for name, tensor in TENSORS.items():
            back = found.tensors[name]
            assert (back.dtype, back.shape, bits(back)) == (tensor.dtype, tensor.shape, bits(tensor))

    def test_transposed_shared_and_trained_tensors(self, tmp_path):
        whole = torch.arange(6.0, requires_grad=True)
        tensors = {"a": whole, "same": whole, "part": whole[2:5], "turned": whole.view(2, 3).t()}
        found = checkpoint.load(checkpoint.save(tmp_path, 1, tensors, {}))
        assert all(torch.equal(found.tensors[name], tensor) for name, tensor in tensors.items())
        found.tensors["a"].zero_()
        assert found.tensors["same"].tolist() == [0, 1, 2, 3, 4, 5]

    def test_large_tensors_with_the_same_bits_are_in_the_file_once(self, tmp_path):
        x = torch.arange(1 << 18, dtype=torch.float32)
        other, signed = x.clone(), torch.zeros(1 << 18)
        other[-1] += 1
        given = {"worker.0.x": x.clone(), "worker.1.x": other, "model": x, "shaped": x.view(2, -1).clone()}
        given |= {"plus": signed, "minus": -signed, "whole": signed.view(torch.int32).clone()}
        path = checkpoint.save(tmp_path, 1, given, {})
        assert json.loads((path / "manifest.json").read_text())["aliases"] == {"worker.0.x": "model"}
        assert load_file(path / "state.safetensors").keys() == given.keys() - {"worker.0.x"}
        found = checkpoint.load(path).tensors
        assert {name: bits(one) for name, one in found.items()} == {name: bits(one) for name, one in given.items()}
        found["worker.0.x"].zero_()
        assert bits(found["model"]) == bits(x)

    def test_a_file_of_several_pieces(self, tmp_path):
        large = torch.arange(tensor_file.PIECE // 4 + 5, dtype=torch.float64)
        path = checkpoint.save(tmp_path, 1, {"large": large, "odd": torch.arange(3, dtype=torch.uint8)}, {})
        assert bits(checkpoint.load(path).tensors["large"]) == bits(large)

    @pytest.mark.parametrize("refusal", [None, "open", "write"])
    def test_a_large_file_bypasses_the_page_cache_where_the_system_allows(self, tmp_path, monkeypatch, refusal):
        opened, written, direct, sizes = os.open, os.write, [], []

        def to_open(path, flags, *rest):
            if flags & tensor_file.DIRECT and refusal == "open":
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            return opened(path, flags, *rest)

        def to_write(handle, data):
            flags = fcntl.fcntl(handle, fcntl.F_GETFL)
            if flags & tensor_file.DIRECT and refusal == "write":
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            direct.append(bool(flags & tensor_file.DIRECT))
            sizes.append(len(data))
            return written(handle, data)

        monkeypatch.setattr(tensor_file, "PIECE", 1 << 16)
        monkeypatch.setattr(os, "open", to_open)
        monkeypatch.setattr(os, "write", to_write)
        given = {"large": torch.arange(50_001.0), "odd": torch.arange(3, dtype=torch.uint8)}
        path = tmp_path / "state.safetensors"
        found = tensor_file.write(path, given)
        assert found.sha256 == atomic_files.sha256(path)
        assert {name: bits(one) for name, one in load_file(path).items()} == {
            name: bits(t) for name, t in given.items()
        }
        assert sizes[:3] == [1 << 16] * 3
        assert sum(sizes) == path.stat().st_size
        assert not direct[-1]  # the rest of a block
        assert all(direct[:-1]) == (refusal is None)

    def test_a_type_that_a_file_cannot_hold(self, tmp_path):
        with pytest.raises(RunError, match=r"tensor 'z' .* cannot hold torch.complex128"):
            checkpoint.save(tmp_path, 1, {"z": torch.zeros(2, dtype=torch.complex128)}, {})
        assert names(tmp_path) == []

    def test_no_tensors_at_all(self, tmp_path):
        assert checkpoint.load(checkpoint.save(tmp_path, 0, {}, {})).tensors == {}

    def test_the_manifest_says_who_wrote_it(self, tmp_path):
        manifest = json.loads((write(tmp_path, 7) / "manifest.json").read_text())
        assert (manifest["format"], manifest["step"]) == (1, 7)
        assert manifest["versions"].keys() == {"paceline", "torch", "python"}
        assert manifest["sizes"] == {"state.safetensors": (tmp_path / "0000000007/state.safetensors").stat().st_size}

    def test_the_umask_decides_who_may_read(self, tmp_path):
        path = write(tmp_path, 1)
        plain = tmp_path / "plain"
        plain.write_text("")
        assert {file.stat().st_mode for file in path.iterdir()} == {plain.stat().st_mode}

    def test_numbers_that_json_cannot_hold_leave_nothing(self, tmp_path):
        with pytest.raises(UsageError, match="plain data that JSON can hold"):
            checkpoint.save(tmp_path, 1, {}, {"x": object()})
        assert names(tmp_path) == []


class TestDamage:
    @pytest.mark.parametrize("part", ["state.safetensors", "manifest.json"])
    def test_any_flipped_bit_is_noticed(self, tmp_path, part):
        path = checkpoint.save(tmp_path, 3, {"model": torch.ones(4)}, {"t": 12, "name": "abc"})
        whole = (path / part).read_bytes()
        for place in range(len(whole)):
            flip(path / part, place)
            with pytest.raises(DataError, match="damaged"):
                checkpoint.load(path)
            (path / part).write_bytes(whole)
        assert checkpoint.load(path).numbers == {"t": 12, "name": "abc"}

    @pytest.mark.parametrize(
        ("spoil", "told"),
        [
            (lambda path: (path / "manifest.json").unlink(), "manifest.json cannot be read: No such file"),
            (lambda path: (path / "state.safetensors").unlink(), "state.safetensors cannot be read: No such file"),
            (lambda path: os.truncate(path / "state.safetensors", 100), "has 100 bytes, not"),
            (lambda path: os.truncate(path / "manifest.json", 100), "manifest.json is not what was written"),
            (lambda path: (path / "manifest.json").write_text("[]"), "it holds a list"),
            (lambda path: (path / "manifest.json").write_text("[" * 10**5), "manifest.json is not what was written"),
            (lambda path: (path / "manifest.json").write_text('{"format": 2}'), "format 2; this version .* format 1"),
            (lambda path: (path / "manifest.json").write_bytes(b"\xff\x00"), "manifest.json is not what was written"),
        ],
    )
    def test_says_what_is_wrong_and_goes_back_to_an_older_one(self, tmp_path, spoil, told):
        write(tmp_path, 100, 1.0)
        path = write(tmp_path, 200, 2.0)
        spoil(path)
        with pytest.raises(DataError, match=told):
            checkpoint.load(path)
        said = []
        found = checkpoint.newest(tmp_path, said.append)
        assert found is not None
        assert found.step == 100
        assert len(said) == 1
        assert "0000000200 is damaged" in said[0]

    def test_a_huge_manifest_is_not_read(self, tmp_path):
        path = write(tmp_path, 1)
        os.truncate(path / "manifest.json", atomic_files.LARGEST_JSON + 1)
        with pytest.raises(DataError, match=r"more than 67,108,864 bytes"):
            checkpoint.load(path)

    def test_none_there(self, tmp_path):
        assert checkpoint.newest(tmp_path / "none", silent) is None
        assert checkpoint.steps(tmp_path / "none") == []
        with pytest.raises(DataError, match="there is no checkpoint"):
            checkpoint.load(tmp_path / "0000000001")


class TestKeeping:
    def test_the_last_k(self, tmp_path):
        for step in range(0, 1000, 100):
            write(tmp_path, step, keep=3)
        assert checkpoint.steps(tmp_path) == [700, 800, 900]
        assert names(tmp_path) == ["0000000700", "0000000800", "0000000900"]

    def test_a_damaged_one_does_not_count(self, tmp_path):
        for step in (1, 2, 3):
            write(tmp_path, step)
        (tmp_path / "0000000003" / "manifest.json").unlink()
        write(tmp_path, 4, keep=2)
        assert checkpoint.steps(tmp_path) == [2, 4]

    def test_never_the_one_just_written_though_later_steps_are_there(self, tmp_path):
        for step in (100, 200, 300):
            write(tmp_path, step)
        write(tmp_path, 150, keep=1)
        assert checkpoint.steps(tmp_path) == [150, 200, 300]

    def test_at_least_one(self, tmp_path):
        with pytest.raises(UsageError, match="keep must be at least 1"):
            write(tmp_path, 1, keep=0)

    def test_the_same_step_again(self, tmp_path):
        write(tmp_path, 5, 1.0)
        write(tmp_path, 5, 2.0)
        assert names(tmp_path) == ["0000000005"]
        assert checkpoint.load(tmp_path / "0000000005").numbers == {"value": 2.0}

    @pytest.mark.parametrize("moment", range(3))
    def test_replacing_can_break_off_at_any_rename(self, tmp_path, monkeypatch, moment):
        """At every moment a whole one of that step can be found, and the next save tidies up."""
        write(tmp_path, 5, 1.0)
        rename, done = Path.rename, []

        def breaking(self, target):
            if len(done) == moment:
                raise KeyboardInterrupt
            done.append(self)
            return rename(self, target)

        with monkeypatch.context() as patched:
            patched.setattr(Path, "rename", breaking)
            with pytest.raises(KeyboardInterrupt):
                write(tmp_path, 5, 2.0)
        found = checkpoint.newest(tmp_path, silent)
        assert found is not None
        assert (found.step, found.numbers["value"]) == (5, 1.0 if moment == 0 else 2.0)
        assert checkpoint.find(tmp_path, 5) == found.path
        write(tmp_path, 6)
        assert names(tmp_path) == ["0000000005", "0000000006"]
        assert checkpoint.load(tmp_path / "0000000005").numbers == found.numbers

    def test_leftovers_of_dead_writers_go(self, tmp_path):
        left = tmp_path / ".aside-0123"
        left.mkdir()
        (left / "state.safetensors").write_bytes(b"half")
        assert checkpoint.newest(tmp_path, silent) is None
        write(tmp_path, 1)
        assert names(tmp_path) == ["0000000001"]


FULL = """
import resource, signal, sys, torch
from pathlib import Path
from paceline.runs import checkpoint
from paceline.errors import RunError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
try:
    checkpoint.save(Path(sys.argv[1]), 400, {"model": torch.ones(10**6)}, {})
except RunError as error:
    print(error)
"""

KILLED = """
import os, sys, torch
from pathlib import Path
from paceline.runs import atomic_files, checkpoint, tensor_file
atomic_files.put = lambda *_: os._exit(9)
checkpoint.save(Path(sys.argv[1]), 2, {"model": torch.ones(10)}, {})
"""


class TestFailing:
    def test_a_file_that_may_not_grow(self, tmp_path):
        write(tmp_path, 300)
        ran = subprocess.run([sys.executable, "-c", FULL, tmp_path], capture_output=True, text=True, check=True)
        assert ran.stdout == f"checkpoint of step 400 could not be written to {tmp_path}: File too large\n"
        assert names(tmp_path) == ["0000000300"]

    @pytest.mark.parametrize("call", range(3))
    def test_a_full_disk(self, tmp_path, monkeypatch, call):
        write(tmp_path, 300)
        fsync, done = os.fsync, []

        def full(handle):
            if len(done) == call:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            done.append(handle)
            fsync(handle)

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(RunError, match=r"step 400 could not be written to .*: No space left on device$"):
            write(tmp_path, 400, keep=1)
        assert names(tmp_path) == ["0000000300"]

    @pytest.mark.parametrize("make", [lambda tmp: Path("/proc/none"), lambda tmp: Path(__file__)])
    def test_where_nothing_can_be_written(self, tmp_path, make):
        with pytest.raises(RunError, match="checkpoint of step 1 could not be written to"):
            write(make(tmp_path), 1)

    def test_a_writer_that_was_killed(self, tmp_path):
        write(tmp_path, 1)
        ran = subprocess.run([sys.executable, "-c", KILLED, tmp_path], check=False)
        assert ran.returncode == 9
        assert len(names(tmp_path)) == 2
        assert checkpoint.steps(tmp_path) == [1]
        write(tmp_path, 3)
        assert names(tmp_path) == ["0000000001", "0000000003"]


class TestBest:
    def keep(self, run: Path, step: int, value: float, *, metric: str = "loss", smaller: bool = True) -> bool:
        saved = checkpoint.load(write(run / "checkpoints", step, value))
        return checkpoint.keep_best(run, saved, {"loss": value, "accuracy": value}, metric, smaller_is_better=smaller)

    def test_only_what_is_better(self, tmp_path):
        assert checkpoint.best(tmp_path) is None
        values = [3.0, 2.0, float("nan"), 2.0, 2.5, 1.0, 4.0]
        assert [self.keep(tmp_path, step, value) for step, value in enumerate(values)] == [
            *(True, True, False, False, False, True, False)
        ]
        best = checkpoint.best(tmp_path)
        assert best is not None
        assert (best.step, best.metric, best.value, best.metrics["accuracy"]) == (5, "loss", 1.0, 1.0)
        assert names(tmp_path / "best") == ["0000000005"]
        assert checkpoint.load(best.path).numbers == {"value": 1.0}

    def test_larger_may_be_better(self, tmp_path):
        assert [self.keep(tmp_path, n, n, metric="accuracy", smaller=False) for n in (1, 3, 2)] == [True, True, False]

    def test_outlives_the_pruning(self, tmp_path):
        self.keep(tmp_path, 1, 0.5)
        write(tmp_path / "checkpoints", 2, keep=1)
        assert checkpoint.steps(tmp_path / "checkpoints") == [2]
        assert checkpoint.load(tmp_path / "best" / "0000000001").step == 1

    def test_what_was_pruned_while_it_was_evaluated(self, tmp_path):
        saved = checkpoint.load(write(tmp_path / "checkpoints", 1, 0.5))
        write(tmp_path / "checkpoints", 2, keep=1)
        assert not saved.path.exists()
        assert checkpoint.keep_best(tmp_path, saved, {"loss": 0.5}, "loss", smaller_is_better=True)
        best = checkpoint.load(tmp_path / "best" / "0000000001")
        assert (best.step, best.numbers) == (1, saved.numbers)
        assert best.tensors.keys() == saved.tensors.keys()
        assert all(torch.equal(tensor, saved.tensors[name]) for name, tensor in best.tensors.items())

    def test_another_metric_begins_anew(self, tmp_path):
        assert self.keep(tmp_path, 1, 0.5)
        assert self.keep(tmp_path, 2, 0.4, metric="accuracy", smaller=False)

    def test_a_damaged_one_is_replaced(self, tmp_path):
        self.keep(tmp_path, 1, 0.5)
        (tmp_path / "best/0000000001/best.json").write_text("{}")
        assert checkpoint.best(tmp_path) is None
        assert self.keep(tmp_path, 2, 0.9)
        assert names(tmp_path / "best") == ["0000000002"]

    def test_a_damaged_checkpoint_does_not_become_the_best(self, tmp_path):
        self.keep(tmp_path, 1, 0.5)
        path = write(tmp_path / "checkpoints", 2)
        flip(path / "state.safetensors", -1)
        with pytest.raises(DataError, match=f"{path} is damaged"):
            checkpoint.keep_best(tmp_path, checkpoint.load(path), {"loss": 0.1}, "loss", smaller_is_better=True)
        assert names(tmp_path / "best") == ["0000000001"]

    def test_a_crash_may_leave_two(self, tmp_path, monkeypatch):
        self.keep(tmp_path, 1, 0.5)
        with monkeypatch.context() as patched:
            patched.setattr(atomic_files, "discard", lambda path: None)
            self.keep(tmp_path, 2, 0.25)
        assert len(names(tmp_path / "best")) == 2
        best = checkpoint.best(tmp_path)
        assert best is not None
        assert best.step == 2

    def test_a_metric_that_is_not_there(self, tmp_path):
        saved = checkpoint.load(write(tmp_path, 1))
        with pytest.raises(UsageError, match="no metric 'los'; did you mean 'loss'"):
            checkpoint.keep_best(tmp_path, saved, {"loss": 1.0}, "los", smaller_is_better=True)
