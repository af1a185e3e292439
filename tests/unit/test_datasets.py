"""Data sets: where they are found, how they are checked, and what is said when they are not there."""

from __future__ import annotations

import gzip
import lzma
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_set import CONTENT, TINY

from paceline import datasets
from paceline.datasets import breast_cancer, mnist, shakespeare
from paceline.datasets._published import NoSourceError, Published, Remote, cache_folder, gather, md5, write_to_cache
from paceline.datasets.fashion import FASHION
from paceline.errors import DataError, UnknownName, UsageError

REAL = os.environ.get("PACELINE_DATA")


@pytest.fixture(autouse=True)
def _nowhere(monkeypatch, tmp_path):
    """No directory, an empty cache, and a network as far as the sets' own remotes are replaced."""
    monkeypatch.delenv("PACELINE_DATA", raising=False)
    monkeypatch.delenv("PACELINE_OFFLINE", raising=False)
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def said() -> list[str]:
    return []


def put(folder: Path, change=lambda name, content: (name, content)) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in CONTENT.items():
        changed, written = change(name, content)
        (folder / changed).write_bytes(written)
    return folder


def giving(content, title="somewhere") -> Published:
    return replace(TINY, remotes=(Remote(title, lambda files: content),))


class TestDirectory:
    @pytest.mark.parametrize("below", [".", "TINY/raw"])
    @pytest.mark.parametrize("dotted", [False, True])
    @pytest.mark.parametrize("packed", [False, True])
    def test_every_usual_way_to_keep_the_files(self, tmp_path, below, dotted, packed):
        def change(name, content):
            name = name.replace("-idx", ".idx") if dotted else name
            return (f"{name}.gz", gzip.compress(content)) if packed else (name, content)

        folder = put(tmp_path / "mine" / below, change)
        found = gather(TINY, tmp_path / "mine")
        assert found.content == CONTENT
        assert found.path == folder
        assert found.source == f"directory {tmp_path / 'mine'}"
        assert not (tmp_path / "cache").exists()

    def test_the_variable_names_one_too_and_the_argument_wins(self, tmp_path, monkeypatch):
        put(tmp_path / "a"), put(tmp_path / "b")
        monkeypatch.setenv("PACELINE_DATA", str(tmp_path / "a"))
        assert gather(TINY).path == tmp_path / "a"
        assert gather(TINY, tmp_path / "b").path == tmp_path / "b"

    @pytest.mark.parametrize("argument", [True, False])
    def test_a_folder_that_is_not_there_is_an_error(self, tmp_path, monkeypatch, argument):
        monkeypatch.setenv("PACELINE_DATA", str(tmp_path / "no"))
        who = "the given data directory" if argument else "PACELINE_DATA"
        with pytest.raises(DataError, match=f"{who} is .*no, which is not a folder"):
            gather(TINY, tmp_path / "no" if argument else None)

    @pytest.mark.parametrize("extra", [b"", b"longer"])
    def test_a_wrong_sum_is_an_error_and_never_skipped(self, tmp_path, extra):
        def change(name, content):
            return name, content[:-1] + b"!" + extra

        folder = put(tmp_path / "mine", change)
        with pytest.raises(DataError) as caught:
            gather(giving(CONTENT), folder)
        wrong = CONTENT["train-images-idx3-ubyte"][:-1] + b"!" + extra[:1]
        assert str(folder / "train-images-idx3-ubyte") in str(caught.value)
        assert f"must be {TINY.files[0].md5}, but is {md5(wrong)}" in str(caught.value)
        assert ("longer" in str(caught.value)) == bool(extra)

    @pytest.mark.parametrize("damage", [lambda packed: packed[:-12], lambda packed: b"not gzip at all"])
    def test_a_damaged_archive_is_an_error(self, tmp_path, damage):
        folder = put(tmp_path, lambda name, content: (f"{name}.gz", damage(gzip.compress(content))))
        with pytest.raises(DataError, match=r"images-idx3-ubyte.gz cannot be read"):
            gather(TINY, folder)

    def test_another_sets_files_of_the_same_names_are_passed_over_and_reported(self, tmp_path):
        put(tmp_path, lambda name, content: (name, b"strange"))
        wanted = replace(TINY, namesakes={md5(b"strange"): "Strange"})
        with pytest.raises(NoSourceError, match="train-labels-idx1-ubyte: is Strange's file of that name"):
            gather(wanted, tmp_path)

    def test_what_one_source_lacks_comes_from_the_next(self, tmp_path, said):
        put(tmp_path / "mine")
        (tmp_path / "mine" / "train-labels-idx1-ubyte").unlink()
        found = gather(giving(CONTENT), tmp_path / "mine", said.append)
        assert found.content == CONTENT
        assert found.source == f"directory {tmp_path / 'mine'}; somewhere"

    def test_installed_data_are_found(self, tmp_path):
        found = gather(replace(TINY, installed=(tmp_path / "no", put(tmp_path / "share"))))
        assert found.path == tmp_path / "share"


class TestCache:
    def test_what_was_fetched_is_kept_uncompressed_and_used(self, tmp_path, said):
        assert gather(giving(CONTENT), say=said.append).source == "somewhere"
        kept = tmp_path / "cache" / "tiny"
        assert {path.name: path.read_bytes() for path in kept.iterdir()} == CONTENT
        found = gather(giving({}), say=said.append)
        assert (found.content, found.source, found.path) == (CONTENT, f"cache {kept}", kept)
        assert said == ["fetching Tiny from somewhere …"]

    def test_a_damaged_file_is_reported_kept_aside_and_fetched_again(self, tmp_path, said):
        gather(giving(CONTENT), say=said.append)
        place = tmp_path / "cache" / "tiny" / "train-labels-idx1-ubyte"
        for number in ("", "1"):
            place.write_bytes(b"damaged" + number.encode())
            said.clear()
            assert gather(giving(CONTENT), say=said.append).content == CONTENT
            assert place.read_bytes() == CONTENT[place.name]
            aside = place.with_name(f"{place.name}.damaged{number}")
            assert aside.read_bytes() == b"damaged" + number.encode()
            assert said[0].startswith("warning: ")
            assert str(place) in said[0]
            assert f"must be {TINY.files[1].md5}" in said[0]
            assert aside.name in said[0]

    def test_a_write_that_fails_leaves_nothing(self, tmp_path, monkeypatch):
        def fail(*_):
            raise OSError("disk full")

        monkeypatch.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="disk full"):
            write_to_cache(tmp_path / "set" / "file", b"content")
        assert list((tmp_path / "set").iterdir()) == []

    def test_a_cache_that_cannot_be_written_does_no_harm(self, tmp_path, monkeypatch, said):
        (tmp_path / "file").write_text("in the way")
        monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "file"))
        assert gather(giving(CONTENT), say=said.append).content == CONTENT
        assert any("could not be kept" in line for line in said)

    def test_where_it_lies(self, monkeypatch):
        monkeypatch.delenv("PACELINE_CACHE")
        monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
        assert cache_folder("a") == Path("/xdg/paceline/a")
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setenv("HOME", "/home/me")
        assert cache_folder("a") == Path("/home/me/.cache/paceline/a")


class TestSets:
    def test_names(self):
        known = {"mnist", "fashion", "cifar", "shakespeare", "digits", "breast-cancer"}
        assert set(datasets.names()) == known
        with pytest.raises(UnknownName, match="no data set 'mnits'; did you mean 'mnist'"):
            datasets.load("mnits")

    def test_mnist_without_a_source_says_aloud_what_stands_in(self, monkeypatch):
        monkeypatch.setenv("PACELINE_OFFLINE", "1")
        got = datasets.load("mnist")
        assert got.notice is not None
        assert got.notice.startswith("THIS IS NOT MNIST")
        assert "To get it: put the four idx files" in got.notice
        assert [part.shape for part in got.train] == [(1437, 28, 28), (1437,)]
        assert [part.shape for part in got.test] == [(360, 28, 28), (360,)]
        small = datasets.load("digits").train[0]
        assert torch.equal(got.train[0][:, 3:-2:3, 3:-2:3].float(), (small.float() * 255 / 16).round())
        assert (got.train[0][:, :2] == 0).all()

    def test_others_without_a_source_are_errors(self, monkeypatch, tmp_path):
        monkeypatch.setenv("PACELINE_OFFLINE", "1")
        with pytest.raises(DataError, match="dataset-fashion-mnist"):
            gather(replace(FASHION, installed=()))
        (tmp_path / "cifar-10-batches-py").mkdir()
        with pytest.raises(DataError, match="'python version' is pickled and is not read"):
            datasets.load("cifar", tmp_path)

    @pytest.mark.skipif(not REAL, reason="PACELINE_DATA names no folder with the real MNIST")
    def test_real_mnist(self, monkeypatch):
        monkeypatch.setenv("PACELINE_OFFLINE", "1")
        got = datasets.load("mnist", REAL)
        if got.notice:
            pytest.skip("PACELINE_DATA has no MNIST")
        images, labels = got.train
        assert images.shape == (60_000, 28, 28)
        assert labels.bincount().tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
        assert images.float().mean().item() / 255 == pytest.approx(0.13066, abs=1e-5)
        assert got.test[0].shape == (10_000, 28, 28)
        assert got.source == f"directory {REAL}"

    @pytest.mark.skipif(not REAL, reason="PACELINE_DATA names no folder with the real MNIST")
    def test_mnist_beside_is_not_taken_for_fashion(self, monkeypatch):
        monkeypatch.setenv("PACELINE_OFFLINE", "1")
        if not (Path(REAL) / "train-images-idx3-ubyte.gz").exists():
            pytest.skip("PACELINE_DATA has no MNIST")
        with pytest.raises(NoSourceError, match="is MNIST's file of that name"):
            gather(replace(FASHION, installed=()), REAL)

    @pytest.mark.skipif(
        not any(folder.is_dir() for folder in FASHION.installed),
        reason="Debian's dataset-fashion-mnist is not installed",
    )
    def test_real_fashion_as_debian_installs_it(self, monkeypatch):
        monkeypatch.setenv("PACELINE_OFFLINE", "1")
        got = datasets.load("fashion")
        assert got.train[0].shape == (60_000, 28, 28)
        assert got.test[1].bincount().tolist() == [1000] * 10
        assert got.notice is None

    def test_cifar_in_parts(self, tmp_path, monkeypatch):
        packed = {name: Path(REAL or "") / f"cifar10_{name}.xz" for name in ("data_batch_1", "test_batch")}
        if not REAL or not all(path.is_file() for path in packed.values()):
            pytest.skip("PACELINE_DATA has no repacked CIFAR-10 batches")
        monkeypatch.setenv("PACELINE_OFFLINE", "1")
        folder = tmp_path / "cifar-10-batches-bin"
        folder.mkdir()
        for name, path in packed.items():
            (folder / f"{name}.bin").write_bytes(_unpacked(path))
        got = datasets.load("cifar", tmp_path, parts=1)
        assert [part.shape for part in got.train] == [(10_000, 3, 32, 32), (10_000,)]
        assert got.path == folder
        assert got.test[1].bincount().tolist() == [1000] * 10
        with pytest.raises(DataError, match=r"not complete \(data_batch_2.bin\)"):
            datasets.load("cifar", tmp_path, parts=2)

    @pytest.mark.parametrize("parts", [0, 6])
    def test_cifar_has_five_parts(self, parts):
        with pytest.raises(UsageError, match=f"from 1 to 5, not {parts}"):
            datasets.load("cifar", parts=parts)

    def test_shakespeare_is_always_there(self):
        got = datasets.load("shakespeare")
        (train,), (test,) = got.train, got.test
        assert (len(train), len(test), len(got.characters)) == (1_003_854, 111_540, 65)
        assert train.dtype == torch.uint8
        assert "".join(got.characters[i] for i in train[:14]) == "First Citizen:"
        assert torch.cat((train, test)).max() == 64

    def test_a_changed_text_is_an_error(self, monkeypatch, tmp_path):
        monkeypatch.setattr(shakespeare, "TEXT", tmp_path / "text.xz")
        with pytest.raises(DataError, match=r"text.xz cannot be read"):
            datasets.load("shakespeare")
        (tmp_path / "text.xz").write_bytes(lzma.compress(b"To be"))
        with pytest.raises(DataError, match="SHA-256 of the text must be 86c4"):
            datasets.load("shakespeare")

    def test_scikit_learns_own(self):
        cancer, digits = datasets.load("breast-cancer"), datasets.load("digits")
        measures, labels = cancer.train
        assert (measures.shape, len(cancer.test[0])) == ((455, 30), breast_cancer.TEST)
        assert measures.mean(0).abs().max() < 1e-12
        assert labels.unique().tolist() == [0, 1]
        assert digits.train[0].max() == 16
        assert (digits.test[1].bincount() > 20).all()

    def test_idx_goes_round_and_refuses_other_content(self):
        array = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
        assert mnist.read_idx(mnist.write_idx(array)).tolist() == array.tolist()
        with pytest.raises(DataError, match="not idx content"):
            mnist.read_idx(mnist.write_idx(array)[:-1])


def _unpacked(path: Path) -> bytes:
    """An official binary batch out of the repacked one: labels, then differences of colours and of pixels."""
    packed = np.frombuffer(lzma.decompress(path.read_bytes()), np.uint8)
    planes = packed[10_000:].reshape(3, 10_000, 32, 32).cumsum(2, dtype=np.uint8).cumsum(3, dtype=np.uint8)
    planes[0] += planes[1]
    planes[2] += planes[1]
    pixels = planes.transpose(1, 0, 2, 3).reshape(10_000, 3072)
    return np.concatenate((packed[:10_000, None], pixels), 1).tobytes()
