"""The server's log with several writers: one file, readable like any other, whichever process wrote a frame."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from memory_fixture import Company, played

from paceline.processes.memory.segment import Segment, anonymous
from paceline.runs import order_log
from paceline.runs.order_log import PIECE, RecordKind, read, trim
from paceline.runs.shared_order_log import AT, BROKEN, LIFE, SIZE, WORDS, SharedOrderLog


def words() -> memoryview:
    return Segment(anonymous("paceline-test", 4096), 4096).words[:WORDS]


def calls(path: Path) -> list[tuple[Any, ...]]:
    return [record.values for record in read(path).records if record.kind == RecordKind.CALL]


def test_processes_write_in_turns_and_the_log_grows(tmp_path: Path) -> None:
    shared = words()
    first = SharedOrderLog(shared, tmp_path)
    first.begin(generation=0)
    rounds = PIECE // 2 // len(order_log.packed(RecordKind.CALL, 0, 0, 0)) // 3  # with checksums more than one piece

    def write(rank: int) -> None:
        log = SharedOrderLog(shared, tmp_path)
        for number in range(rounds):
            log.add(RecordKind.CALL, number % 200, rank, 1)

    for rank in (1, 2, 3):
        played(lambda rank=rank: write(rank))
        first.add(RecordKind.CALL, 7, 0, 0)  # maps what others have added
    assert shared[SIZE] > PIECE
    trim(tmp_path / "server-1.log")  # leaves it alone: it is open here
    assert (tmp_path / "server-1.log").stat().st_size == shared[SIZE]
    first.close()
    told = read(tmp_path / "server-1.log")
    assert told.header == {"format": order_log.FORMAT, "role": "server", "life": 1, "generation": 0}
    expected = [
        row for rank in (1, 2, 3) for row in [*((n % 200, rank, 1, None) for n in range(rounds)), (7, 0, 0, None)]
    ]
    assert calls(tmp_path / "server-1.log") == expected
    assert (tmp_path / "server-1.log").stat().st_size == shared[AT]


def test_a_successor_continues_the_log_without_what_was_half_written(tmp_path: Path) -> None:
    shared = words()
    log = SharedOrderLog(shared, tmp_path)
    log.begin(generation=0)

    def die() -> None:
        own = SharedOrderLog(shared, tmp_path)
        own.add(RecordKind.CALL, 1, 1, 1)
        room = own._mapping()
        assert room is not None
        room[shared[AT] : shared[AT] + 5] = b"\x05\x00abc"  # the frame of a call that it did not finish
        os._exit(9)

    assert Company(die).end() == [9]
    log.repair()
    log.text(RecordKind.NOTE, {"return": 1})
    log.add(RecordKind.CALL, 2, 0, 0)
    log.close()
    told = read(tmp_path / "server-1.log")
    assert not told.cut
    assert [record.kind for record in told.records] == [RecordKind.CALL, RecordKind.NOTE, RecordKind.CALL]


def test_a_log_that_nobody_closed_ends_with_its_last_frame(tmp_path: Path) -> None:
    shared = words()

    def die() -> None:
        log = SharedOrderLog(shared, tmp_path)
        log.begin(generation=0)
        log.add(RecordKind.CALL, 1, 1, 1)
        os._exit(9)

    Company(die).end()
    path = tmp_path / "server-1.log"
    assert calls(path) == [(1, 1, 1, None)]
    trim(path)
    assert path.stat().st_size == shared[AT]


def test_a_file_of_a_process_that_died_while_creating_it_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "server-1.log").touch()
    shared = words()
    log = SharedOrderLog(shared, tmp_path)
    log.begin(generation=2)
    log.begin(generation=3)  # it is there
    log.close()
    assert shared[LIFE] == 2
    assert read(tmp_path / "server-2.log").header["generation"] == 2


def test_a_full_disk_ends_the_log_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shared = words()
    log, other = SharedOrderLog(shared, tmp_path), SharedOrderLog(shared, tmp_path)
    log.begin(generation=0)
    other.add(RecordKind.CALL, 1, 1, 1)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    while shared[LIFE] != BROKEN:
        log.add(RecordKind.CALL, 1, 0, 0)
    other.add(RecordKind.CALL, 2, 2, 2)
    other.close()
    log.close()
    assert "the order log ends here: No space left on device" in capsys.readouterr().err
    found = calls(tmp_path / "server-1.log")
    assert found[0] == (1, 1, 1, None)
    assert (2, 2, 2, None) not in found
