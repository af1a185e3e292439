"""Calls between processes through shared memory: a worker here, servers in forks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from memory_fixture import Company, Theatre

from paceline.errors import SchemeError
from paceline.fields import Rate
from paceline.ops import Call
from paceline.processes.calls.client import CallClient
from paceline.processes.calls.mailbox import SAVE, SET
from paceline.processes.memory.board import MAILBOXES, STOP, STOPPING
from paceline.scheme import Scheme, State, Vector, on_server

LOCKED = 0  # as a number of servers
LENGTH = 7  # not a multiple of any number of servers


@dataclass(frozen=True)
class Ledgered(Scheme, name="ledgered"):
    """A call of each kind."""

    lr: Rate = 1.0

    def server(self, x0: Vector, workers: int) -> State:
        return State(x=x0, calls=0, table=torch.zeros(workers, dtype=torch.int64), twice=torch.zeros(2, len(x0)))

    @on_server
    def push(self, s: State, g: Vector) -> None:
        s.x -= self.lr * g
        s.v += 1
        s.calls += 1

    @on_server
    def mixed(self, s: State, g: Vector, flag: bool, note: str, pair: tuple[int, float]) -> Any:
        s.table[pair[0]] += 1
        s.twice[1] = g
        return s.x + g, (s.v, flag, note + "!", pair[1] / 2), s.table, None, s.twice

    @on_server(reads=True)
    def look(self, s: State) -> tuple[Vector, int]:
        return s.x, s.v

    @on_server
    def fill(self, s: State, value: float) -> int:
        s.x.fill_(value)
        s.v += 1
        return s.v

    @on_server(when=lambda self, s, v: s.v >= v)
    def reached(self, s: State, v: int) -> int:
        return s.v

    @on_server(reads=True, when=lambda self, s, v: s.v >= v)
    def look_at(self, s: State, v: int) -> tuple[Vector, int]:
        return s.x, s.v

    @on_server
    def wrong(self, s: State) -> Any:
        return [1]


@contextmanager
def world(servers: int = 1, workers: int = 2, length: int = LENGTH) -> Iterator[tuple[Theatre, Ledgered]]:
    """Servers at work; they end without a fault when the test is done. LOCKED: one whose calls the workers perform."""
    scheme, locked = Ledgered(), servers == LOCKED
    servers = 1 if locked else servers
    theatre = Theatre(scheme, torch.arange(float(length)), workers=workers, servers=servers, locked=locked)
    company = Company(*theatre.servers())
    try:
        yield theatre, scheme
        theatre.all_gone()
        assert company.end() == [0] * servers
    finally:
        company.kill()
        theatre.close()


def asked(link: CallClient, call: Any) -> Any:
    assert isinstance(call, Call)
    return link.call(call)


@pytest.mark.parametrize("servers", [LOCKED, 1, 2, 3])
class TestCalls:
    def test_values_there_and_back(self, servers: int) -> None:
        with world(servers) as (theatre, scheme):
            link, g = theatre.link(1), torch.full((LENGTH,), 0.5)
            sent = g.clone()
            for count in (1, 2):
                x, plain, table, nothing, twice = asked(link, scheme.mixed(g, True, "héllo", (1, 3.0)))
                assert torch.equal(x, torch.arange(float(LENGTH)) + 0.5)
                assert plain == (0, True, "héllo!", 1.5)
                assert (table.tolist(), nothing) == ([0, count], None)
                assert torch.equal(twice, torch.stack([torch.zeros(LENGTH), g]))
            assert torch.equal(g, sent)
            x.fill_(7.0)  # what came back is the worker's own
            assert torch.equal(asked(link, scheme.look())[0], torch.arange(float(LENGTH)))

    def test_what_is_sent_and_not_waited_for_comes_first(self, servers: int) -> None:
        with world(servers) as (theatre, scheme):
            link = theatre.link(0)
            for count in range(1, 40):
                assert asked(link, scheme.push(torch.ones(LENGTH))) is None
                x, v = asked(link, scheme.look())
                assert v == count
                assert torch.equal(x, torch.arange(float(LENGTH)) - count)

    def test_a_worker_is_told_when_to_look_for_itself(self, servers: int) -> None:
        with world(servers) as (theatre, scheme):
            link, other = theatre.link(0), theatre.link(1)
            for count in range(1, 20):
                asked(link, scheme.push(torch.ones(LENGTH)))
                x, v = asked(link, scheme.look_at(count))  # open as soon as its own push is there
                assert (x.tolist(), v) == ([k - float(count) for k in range(LENGTH)], count)
                x.fill_(9.0)
            seen = iter([False, False, True])  # twice it has closed again before the worker looked
            look = other._look

            def hasty(*args: Any) -> tuple[bool, Any]:
                return look(*args) if next(seen) else (False, None)

            other._look = hasty  # type: ignore[method-assign]
            assert asked(other, scheme.look_at(19))[1] == 19
            assert next(seen, None) is None
            done = other.post(scheme.look_at(20))  # started beside others: the server gives the result
            asked(link, scheme.push(torch.ones(LENGTH)))
            link.flush()  # as a session does before it computes or waits
            assert other.collect(done)[1] == 20

    def test_a_result_of_a_reader_is_written_to_the_cell_that_it_will_be_stored_in(self, servers: int) -> None:
        with world(servers) as (theatre, scheme):
            link, cell = theatre.link(0), torch.full((LENGTH,), 9.0)
            asked(link, scheme.push(torch.ones(LENGTH)))
            for method, args in ((scheme.look, ()), (scheme.look_at, (1,))):
                call = method(*args)
                call.into = (cell.fill_(9.0), torch.tensor(0))
                x, v = asked(link, call)
                assert x is cell
                assert (x.tolist(), v) == ([k - 1.0 for k in range(LENGTH)], 1)
            for other in (torch.zeros(LENGTH + 1), torch.zeros(LENGTH, dtype=torch.float64), None):
                call = scheme.look()
                call.into = (other, None)
                x, _ = asked(link, call)
                assert x is not other
                assert x.tolist() == cell.tolist()
            call = scheme.look()
            call.into = (cell,)  # the step would fail: the result has two values
            assert asked(link, call)[0] is not cell

    def test_arguments_are_those_of_the_moment(self, servers: int) -> None:
        with world(servers) as (theatre, scheme):
            link, g = theatre.link(0), torch.ones(LENGTH)
            for _ in range(10):
                asked(link, scheme.push(g))
                g += 1  # after the call was sent
            assert asked(link, scheme.look())[0].tolist() == [float(k) - 55 for k in range(LENGTH)]

    def test_several_under_way(self, servers: int) -> None:
        with world(servers) as (theatre, scheme):
            link = theatre.link(0)
            waiting = link.post(scheme.reached(2))
            assert not link.ready(waiting)
            assert [asked(link, scheme.fill(1.0)), asked(link, scheme.fill(2.0))] == [1, 2]
            assert link.collect(waiting) == 2
            mailboxes = [link.post(scheme.reached(9)) for _ in range(MAILBOXES)]
            with pytest.raises(SchemeError, match=f"has {MAILBOXES} calls under way"):
                link.post(scheme.reached(9))
            other = theatre.link(1)
            for number in range(7):
                asked(other, scheme.fill(float(number)))
            assert [link.collect(mailbox) for mailbox in mailboxes] == [9] * MAILBOXES

    def test_what_no_method_of_the_scheme_does(self, servers: int) -> None:
        with world(servers) as (theatre, scheme):
            link = theatre.link(0)
            asked(link, scheme.fill(3.0))
            link.special(SAVE)
            memory = theatre.memory(0)
            assert memory.tensor("keep.server.x").tolist() == [3.0] * LENGTH
            assert int(memory.tensor("keep.server.0.v")) == 1
            link.special(SET, "lr", 0.5)
            asked(link, scheme.push(torch.ones(LENGTH)))
            assert asked(link, scheme.look())[0].tolist() == [2.5] * LENGTH
            assert memory.overrides == {"lr": 0.5}
            assert int(memory.tensor("keep.server.0.v")) == 1  # as it was then

    def test_forgotten_calls_leave_their_places_alone(self, servers: int) -> None:
        """A server may still be reading them: what comes next uses others."""
        with world(servers) as (theatre, scheme):
            link = theatre.link(0)
            for count in range(1, 60):
                link.post(scheme.fill(float(count)))
                link.forget()
                link.special(SAVE)
                memory = theatre.memory(0)
                assert memory.tensor("keep.server.x").tolist() == [float(count)] * LENGTH

    def test_reads_are_never_torn(self, servers: int) -> None:
        with world(servers, length=50_000) as (theatre, scheme):

            def write() -> None:
                link = theatre.link(1)
                for value in range(1, 301):
                    asked(link, scheme.fill(float(value)))

            writer, link, versions = Company(write), theatre.link(0), []
            asked(link, scheme.fill(0.0))
            while not versions or versions[-1] < 301:
                x, v = asked(link, scheme.look())
                assert float(x.min()) == float(x.max())
                versions.append(v)
            assert versions == sorted(versions)
            assert writer.end() == [0]


class TestRefusals:
    def test_more_than_a_call_can_carry(self) -> None:
        with world() as (theatre, scheme), pytest.raises(SchemeError, match="send fewer vectors"):
            theatre.link(0).post(scheme.push(torch.ones(3_000_000)))

    def test_a_result_that_cannot_cross(self) -> None:
        theatre = Theatre(scheme := Ledgered(), torch.zeros(LENGTH))
        company = Company(*theatre.servers())
        theatre.link(0).post(scheme.wrong())
        assert company.end() == [1]
        theatre.close()

    @pytest.mark.parametrize("servers", [LOCKED, 1])
    def test_no_call_is_performed_after_the_stop_unless_it_was_gone_on_from(self, servers: int) -> None:
        with world(servers) as (theatre, scheme):
            link = theatre.link(0)
            asked(link, scheme.fill(1.0))
            theatre.board.run[STOP] = STOPPING
            link.post(scheme.fill(2.0))
            link.call(scheme.push(torch.ones(LENGTH)))
            link.special(SAVE)
            assert theatre.memory(0).tensor("keep.server.x").tolist() == [0.0] * LENGTH
            assert int(theatre.memory(0).tensor("keep.server.0.calls")) == 1
