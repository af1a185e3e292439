"""What the launcher tells of workers that wait: read from the board and the mailboxes of a run's memory."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from memory_fixture import Theatre

from paceline.ops import Call
from paceline.processes.calls.client import CallClient, Stopped
from paceline.processes.memory.board import TRAINING, WAITING
from paceline.processes.memory.packed_words import mean_key
from paceline.processes.supervisor.waits import FEWEST, LONG, MOST, SPAN, Waits
from paceline.scheme import Scheme
from paceline.schemes.allreduce import AllReduce
from paceline.schemes.elastic import AEASGD
from paceline.schemes.sync import SyncSGD
from paceline.schemes.sync_repeat import SyncRepeat

Made = Callable[..., Theatre]


@pytest.fixture
def made() -> Iterator[Made]:
    known: list[Theatre] = []

    def make(scheme: Scheme, **settings: int) -> Theatre:
        known.append(Theatre(scheme, torch.zeros(8), **settings))
        return known[-1]

    yield make
    for theatre in known:
        theatre.close()


def arrive(theatre: Theatre, rank: int, among: tuple[int, ...] | None = None) -> None:
    """A worker comes to a mean."""
    theatre.board.at_key[rank] = mean_key(among, 0)
    theatre.board.at_seq[rank] += 1


def let_wait(theatre: Theatre, *ranks: int) -> None:
    for rank in ranks:
        theatre.board.state[rank] = WAITING


def test_a_wait_is_told_when_it_has_lasted(made: Made) -> None:
    theatre, waits = made(AllReduce(), workers=3), Waits()
    memory = theatre.memory(3)
    arrive(theatre, 0)
    arrive(theatre, 2)
    let_wait(theatre, 0, 2)
    assert waits.at(0.0, memory) == {}
    assert waits.at(LONG / 2, memory) == {}
    assert waits.at(LONG, memory) == {0: "worker 1 at a mean", 2: "worker 1 at a mean"}
    theatre.board.state[0] = TRAINING
    assert waits.at(1.5 * LONG, memory) == {2: "worker 1 at a mean"}


def test_a_wait_begins_with_the_step_that_it_is_in(made: Made) -> None:
    theatre, waits = made(AllReduce(), workers=2), Waits()
    memory = theatre.memory(3)
    let_wait(theatre, 1)
    arrive(theatre, 1)
    waits.at(0.0, memory)
    theatre.board.gradients[1] += 1
    assert waits.at(LONG, memory) == {}
    assert waits.at(2 * LONG, memory) == {1: "the chief at a mean"}


def test_short_waits_are_told_if_nearly_all_are_for_the_same(made: Made) -> None:
    theatre, waits = made(AllReduce(), workers=2), Waits()
    memory, told = theatre.memory(3), []
    arrive(theatre, 0)
    for sample in range(FEWEST + 2):
        theatre.board.state[0] = TRAINING if sample == 1 else WAITING
        theatre.board.gradients[0] += 1
        told.append(waits.at(0.125 * sample, memory))
    assert told[FEWEST - 2] == {}
    assert told[-1] == {0: "worker 1 at a mean"}


def test_those_who_have_left_are_not_missed_and_long_lists_are_cut(made: Made) -> None:
    theatre, waits = made(AllReduce(), workers=MOST + 4), Waits()
    memory = theatre.memory(3)
    arrive(theatre, 0)
    let_wait(theatre, 0)
    theatre.board.alive[1] = 0
    theatre.board.parted[2] = 1
    waits.at(0.0, memory)
    assert waits.at(LONG, memory) == {0: "worker 3, worker 4, worker 5, 1 more at a mean"}


def test_one_that_has_not_left_the_mean_before_is_missing(made: Made) -> None:
    theatre, waits = made(AllReduce(), workers=2), Waits()
    memory = theatre.memory(3)
    arrive(theatre, 0)
    arrive(theatre, 1)
    theatre.board.t[0] = 1
    let_wait(theatre, 0, 1)
    waits.at(0.0, memory)
    assert waits.at(LONG, memory)[0] == "worker 1 at a mean"


def test_who_is_in_a_group_is_not_known(made: Made) -> None:
    theatre, waits = made(AllReduce(), workers=4), Waits()
    memory = theatre.memory(3)
    arrive(theatre, 0, among=(0, 1))
    let_wait(theatre, 0)
    waits.at(0.0, memory)
    assert waits.at(LONG, memory) == {0: "others of its group at a mean"}


def test_of_an_exact_run_processes_are_named(made: Made) -> None:
    theatre, waits = made(AllReduce(), workers=4, processes=2), Waits()
    memory = theatre.memory(3)
    arrive(theatre, 0)
    arrive(theatre, 2)
    let_wait(theatre, 0, 2)
    waits.at(0.0, memory)
    assert waits.at(LONG, memory)[0] == "worker 1 at a mean"


def stand_still(ready: Callable[[], bool], what: str) -> None:
    """A wait that has no end: the test looks at the board meanwhile."""
    raise Stopped


@pytest.mark.parametrize(
    ("scheme", "call", "told"),
    [
        (SyncSGD(), SyncSGD().pull(3), "pull(r=3): guard s.v >= r"),
        (SyncRepeat(), SyncRepeat().pull(1), "pull(rank=1): guard s.tokens > 0 or s.holds[rank] > 0"),
        (AEASGD(), AEASGD().exchange(torch.ones(8), 0), "the server to perform exchange"),
        (AEASGD(), None, "other processes"),
    ],
)
def test_a_call_is_told_with_its_arguments_and_its_guard(
    made: Made, scheme: Scheme, call: Call[Any] | None, told: str
) -> None:
    theatre, waits = made(scheme, workers=2), Waits()
    memory = theatre.memory(3)
    if call is not None:
        with pytest.raises(Stopped):
            CallClient(theatre.memory(1), 1, stand_still).call(call)
    let_wait(theatre, 1)
    waits.at(0.0, memory)
    assert waits.at(LONG, memory) == {1: re.sub(r"\(.*?\)", "", told)}
    assert waits.at(SPAN, memory) == {1: told}
