"""The shared secret: its text, its file, and that neither shows."""

from __future__ import annotations

import multiprocessing
import os
import stat
from pathlib import Path

import pytest
from net_ends import names

from paceline.errors import UsageError
from paceline.network.secure import secret


def test_a_secret_and_its_text() -> None:
    one, other = secret.fresh(), secret.fresh()
    assert len(one) == 32
    assert one != other
    assert secret.parse(one.hex()) == one
    assert secret.parse(f"  {one.hex().upper()}\n") == one


@pytest.mark.parametrize("text", ["", "ab" * 15, "ab" * 1025, "xy" * 16, "abc" * 11, "ab " * 16, "é" * 32])
def test_what_is_no_secret_is_refused_and_not_repeated(text: str) -> None:
    with pytest.raises(UsageError, match="openssl rand -hex 32") as refused:
        secret.parse(text)
    assert not text or text not in str(refused.value)


def test_a_file_is_private_from_the_first_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modes = []
    fsync = os.fsync

    def noted(handle: int) -> None:
        if stat.S_ISREG(os.fstat(handle).st_mode):  # not the folder, which is synced after the rename
            modes.append(stat.S_IMODE(os.fstat(handle).st_mode))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", noted)
    path = tmp_path / "secret"
    path.write_text("an older one")
    path.chmod(0o644)
    before = os.umask(0)
    try:
        secret.write(path, bytes(range(20)))
    finally:
        os.umask(before)
    assert modes == [0o600]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert secret.read(path) == bytes(range(20))
    assert names(tmp_path) == ["secret"]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o601])
def test_a_file_that_others_may_touch_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "secret"
    secret.write(path, secret.fresh())
    path.chmod(mode)
    with pytest.raises(UsageError, match=f"mode {mode:04o}.*chmod 600 {path}"):
        secret.read(path)


def test_a_file_of_somebody_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "secret"
    secret.write(path, secret.fresh())
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    with pytest.raises(UsageError, match="belongs to another user"):
        secret.read(path)


def test_a_file_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        secret.read(tmp_path / "absent")
    with pytest.raises(UsageError, match="not a plain file"):
        secret.read(tmp_path)
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(UsageError, match="not a plain file"):
        secret.read(tmp_path / "pipe")  # and does not wait for somebody to write
    with pytest.raises(UsageError, match="cannot be written"):
        secret.write(tmp_path / "absent" / "secret", secret.fresh())


def test_the_content_of_a_file_is_never_shown(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.touch(0o600)
    path.write_bytes(b"hunter2 \xff" * 1000)
    with pytest.raises(UsageError, match=str(path)) as refused:
        secret.read(path)
    assert "hunter2" not in str(refused.value)


def test_the_environment(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    secret.write(path, b"f" * 16)
    value, file = {"PACELINE_SECRET": "61" * 16}, {"PACELINE_SECRET_FILE": str(path)}
    assert secret.of_environment({}) is None
    assert secret.of_environment(value) == b"a" * 16
    assert secret.of_environment(file) == b"f" * 16
    assert secret.of_environment(file | value) == b"a" * 16
    with pytest.raises(UsageError, match="PACELINE_SECRET has 0 bytes"):
        secret.of_environment({"PACELINE_SECRET": ""})
    with pytest.raises(UsageError, match="PACELINE_SECRET_FILE is empty"):
        secret.of_environment({"PACELINE_SECRET_FILE": ""})


def test_the_secret_of_the_user_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))
    first = secret.of_user()
    folder = tmp_path / "settings" / "paceline"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert names(folder) == ["secret"]
    assert secret.of_user() == first == secret.read(folder / "secret")
    monkeypatch.setenv("XDG_CONFIG_HOME", "not/absolute")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert secret.of_user() == secret.read(tmp_path / "home" / ".config" / "paceline" / "secret") != first


def test_a_place_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "paceline").write_text("a file where the folder should be")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    with pytest.raises(UsageError, match=r"cannot be made.*PACELINE_SECRET_FILE"):
        secret.of_user()


def test_several_that_start_at_once_get_the_same_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    context = multiprocessing.get_context("fork")
    start, found = context.Event(), context.SimpleQueue()

    def ask() -> None:
        start.wait()
        try:
            found.put(secret.of_user())
        except BaseException as error:
            found.put(repr(error))

    processes = [context.Process(target=ask) for _ in range(8)]
    for process in processes:
        process.start()
    start.set()
    secrets = {found.get() for _ in processes}
    for process in processes:
        process.join()
    assert secrets == {secret.of_user()}
    assert names(tmp_path / "paceline") == ["secret"]


def test_who_finds_the_file_there_after_all_takes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The race by hand: somebody else's file appears after the look and before ours is put there."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    fresh = secret.fresh

    def slow() -> bytes:
        secret.write(tmp_path / "paceline" / "secret", b"of the faster one")
        return fresh()

    monkeypatch.setattr(secret, "fresh", slow)
    assert secret.of_user() == b"of the faster one"
