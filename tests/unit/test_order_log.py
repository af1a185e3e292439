"""The order log: what is written is what is read, and nothing else is taken for it."""

from __future__ import annotations

import errno
import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import DataError
from paceline.runs import order_log
from paceline.runs.order_log import OrderLogWriter, RecordKind, probe_of, read, trim


def written(path: Path, records: int = 20) -> Path:
    log = OrderLogWriter(path, {"role": "worker-0"})
    for number in range(records):
        log.add(RecordKind.READ, 1, number)
        log.add(RecordKind.GRAD, number / 7)
        log.add(RecordKind.STEP)
        log.flush()
    log.close()
    return path


def test_what_is_written_is_read(tmp_path: Path) -> None:
    log = OrderLogWriter(tmp_path / "a.log", {"role": "server", "life": 3})
    log.add(RecordKind.PROBED, 255, 65535, 3, 2**32 - 1)
    log.add(RecordKind.CALL, 1, 2, 3)
    log.add(RecordKind.MEMBER, -5, 7)
    log.text(RecordKind.CHANGE, {"lr": 0.1, "rule": "adam"})
    log.flush()
    log.add(RecordKind.GRAD, float("inf"))
    log.note({"return": 2})
    log.add(RecordKind.END)
    log.close()
    told = read(tmp_path / "a.log")
    assert told.header == {"format": order_log.FORMAT, "role": "server", "life": 3}
    assert told.records == [
        (RecordKind.CALL, (255, 65535, 3, 2**32 - 1)),
        (RecordKind.CALL, (1, 2, 3, None)),
        (RecordKind.MEMBER, (-5, 7)),
        (RecordKind.CHANGE, ({"lr": 0.1, "rule": "adam"},)),
        (RecordKind.GRAD, (float("inf"),)),
        (RecordKind.NOTE, ({"return": 2},)),
        (RecordKind.END, ()),
    ]
    assert not told.cut


def test_a_full_disk_ends_the_log_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = OrderLogWriter(tmp_path / "a.log", {})
    log.add(RecordKind.GRAD, 1.0)
    log.flush()

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    for number in range(2 * order_log.PIECE // 15):
        log.add(RecordKind.GRAD, float(number))
        log.flush()
    log.close()
    told = read(tmp_path / "a.log")
    assert [record.values[0] for record in told.records] == [1.0, *range(len(told.records) - 1)]
    assert order_log.PIECE // 2 < (tmp_path / "a.log").stat().st_size < order_log.PIECE
    assert capsys.readouterr().err == "the order log ends here: No space left on device\n"


def test_a_log_is_never_written_over(tmp_path: Path) -> None:
    written(tmp_path / "a.log")
    with pytest.raises(FileExistsError):
        OrderLogWriter(tmp_path / "a.log", {})


def test_many_records_between_two_flushes(tmp_path: Path) -> None:
    log = OrderLogWriter(tmp_path / "a.log", {})
    for number in range(10_000):
        log.add(RecordKind.GRAD, float(number))
    log.close()
    assert [record.values[0] for record in read(tmp_path / "a.log").records] == list(range(10_000))


def test_what_was_flushed_survives_kill_9(tmp_path: Path) -> None:
    child = os.fork()
    if not child:
        log = OrderLogWriter(tmp_path / "a.log", {})
        log.add(RecordKind.GRAD, 1.0)
        log.flush()
        log.add(RecordKind.GRAD, 2.0)  # and this was not
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    told = read(tmp_path / "a.log")
    assert (told.records, told.cut) == ([(RecordKind.GRAD, (1.0,))], False)


def room_behind(path: Path, content: bytes) -> None:
    """The log as a killed process leaves it: the file is as long as the room that it had asked for."""
    path.write_bytes(
        content + bytes(-(-(len(content) + order_log.LARGEST) // order_log.PIECE) * order_log.PIECE - len(content))
    )


@given(st.data())
def test_the_log_of_a_killed_process_is_read_up_to_its_last_whole_frame(tmp_path_factory, data: st.DataObject) -> None:
    path = written(tmp_path_factory.mktemp("log") / "a.log")
    whole, content = read(path).records, path.read_bytes()
    size = data.draw(st.integers(0, len(content)))
    room_behind(path, content[:size])
    header = 2 + int.from_bytes(content[:2], "little") + 4  # of the first frame
    frame = (len(content) - header) // 20  # all frames after the header are alike
    kept = max(size - header, 0) // frame
    if size < header:
        with pytest.raises(DataError, match="has no header"):
            read(path)
    else:
        told = read(path)
        assert told.records == whole[: 3 * kept]
        seen = content[header + kept * frame : size]  # of the frame that was cut through
        assert told.cut == any(seen)
    trim(path)
    assert path.read_bytes() == (content[: header + kept * frame] if size >= header else b"")


@given(st.data())
def test_a_closed_log_that_is_cut_off_inside_a_frame_is_damaged(tmp_path_factory, data: st.DataObject) -> None:
    path = written(tmp_path_factory.mktemp("log") / "a.log")
    whole, content = read(path).records, path.read_bytes()
    header = 2 + int.from_bytes(content[:2], "little") + 4
    frame = (len(content) - header) // 20
    size = data.draw(st.integers(1, len(content) - 1))
    path.write_bytes(content[:size])
    if size >= header and (size - header) % frame == 0:
        assert read(path).records == whole[: 3 * ((size - header) // frame)]
    else:
        with pytest.raises(DataError, match=r"a\.log is not what was written: it is damaged at byte"):
            read(path)


@given(st.data())
def test_one_altered_bit_is_noticed(tmp_path_factory, data: st.DataObject) -> None:
    path = written(tmp_path_factory.mktemp("log") / "a.log", records=4)
    content = bytearray(path.read_bytes())
    at, bit = data.draw(st.integers(0, len(content) - 1)), data.draw(st.integers(0, 7))
    content[at] ^= 1 << bit
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"a\.log is not what was written: it is damaged at byte"):
        read(path)


@given(st.data())
def test_a_bad_segment_in_the_middle_is_no_cut_end(tmp_path_factory, data: st.DataObject) -> None:
    """Also in the log of a killed process: behind the frame that a death cut through there is nothing."""
    path = written(tmp_path_factory.mktemp("log") / "a.log")
    content = bytearray(path.read_bytes())
    begin = data.draw(st.integers(0, len(content) - 200))
    end = begin + data.draw(st.integers(1, 60))
    content[begin:end] = data.draw(st.sampled_from([bytes(end - begin), b"\xff" * (end - begin), b"paceline" * 8]))
    if data.draw(st.booleans()):
        room_behind(path, bytes(content))
    else:
        path.write_bytes(content)
    before = path.read_bytes()
    if before[: len(content)] == written(path.with_name("b.log")).read_bytes():
        return  # what was there already
    with suppress(DataError):
        told = read(path)
        assert not told.cut
        raise AssertionError(f"bytes {begin} to {end} are not what was written, and nobody noticed")
    trim(path)
    assert path.read_bytes() == before  # what is damaged is not made to look whole


def test_a_log_that_is_being_written_is_not_trimmed(tmp_path: Path) -> None:
    log = OrderLogWriter(tmp_path / "a.log", {})
    log.add(RecordKind.GRAD, 1.0)
    log.flush()
    trim(tmp_path / "a.log")
    assert (tmp_path / "a.log").stat().st_size == order_log.PIECE
    log.add(RecordKind.GRAD, 2.0)
    log.close()
    assert [record.values[0] for record in read(tmp_path / "a.log").records] == [1.0, 2.0]


def test_frames_cannot_change_places(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    log = OrderLogWriter(path, {})
    for number in range(2):
        log.add(RecordKind.GRAD, float(number))
        log.flush()
    log.close()
    content = path.read_bytes()
    size = (len(content) - 6 - int.from_bytes(content[:2], "little")) // 2  # of a frame, behind the first
    path.write_bytes(content[: -2 * size] + content[-size:] + content[-2 * size : -size])
    with pytest.raises(DataError, match="not what was written"):
        read(path)


def test_another_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order_log, "FORMAT", 99)
    written(tmp_path / "a.log")
    monkeypatch.undo()
    with pytest.raises(DataError, match=r"a\.log is of format 99; this version of paceline reads 1"):
        read(tmp_path / "a.log")


def test_no_log(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read: No such file"):
        read(tmp_path / "a.log")
    (tmp_path / "b.log").write_bytes(b"")
    with pytest.raises(DataError, match="has no header"):
        read(tmp_path / "b.log")


def test_the_probe_sees_x_as_it_is_now() -> None:
    x = torch.arange(1000.0)
    probe = probe_of(x)
    before = probe()
    assert probe() == before
    x[0] += 1
    assert probe() != before
    assert probe_of(torch.zeros(3))() != probe_of(torch.zeros(4))()
