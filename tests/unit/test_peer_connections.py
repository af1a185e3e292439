"""Connections between the workers of a group: who is met, who is not, and what is said when somebody cannot be."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import Any

import pytest
import torch
from beds.commands import certificates
from net_ends import PATIENCE, SECRET
from tcp_ends import LOCAL, PLAIN, company, until

from paceline.config.endpoint import Endpoint, Ports
from paceline.errors import RunError, UsageError
from paceline.network.means import peer_connections
from paceline.network.means.group import Broken, Header
from paceline.network.means.peer_connections import NAME, PeerListener, listener_of, name_of
from paceline.network.secure.admission import enter, listener
from paceline.network.secure.tls import contexts


def test_names_tell_groups_and_directions_apart() -> None:
    names = {
        name_of(group, to, by) for group in ("0/all/1", "0/all/2", "1/all/1") for to in (0, 1, 11) for by in (0, 1)
    }
    assert len(names) == 18
    assert {len(name) for name in names} == {NAME}


def test_of_two_connections_of_one_name_the_later_counts_and_those_that_go_are_forgotten() -> None:
    own = PeerListener(LOCAL, SECRET, None, lambda _: None)
    with contextlib.closing(own):
        name = name_of("g", 0, 1)
        first = enter(LOCAL, own.port, SECRET, timeout=PATIENCE)
        first.sendall(name)
        until(lambda: name in own._named, "it has been heard")
        second = enter(LOCAL, own.port, SECRET, timeout=PATIENCE)
        second.sendall(name)
        first.settimeout(PATIENCE)
        assert first.recv(1) == b""  # closed
        second.sendall(b"x")  # what it goes on to say is for the process that takes it
        taken = own.take(name, lambda: True, 0.0)
        taken.settimeout(PATIENCE)
        assert taken.recv(10) == b"x"
        taken.close()
        third = enter(LOCAL, own.port, SECRET, timeout=PATIENCE)
        third.sendall(name)
        until(lambda: name in own._named, "it has been heard")
        for one in (first, second, third):
            one.close()
        until(lambda: not own._named, "who has gone is forgotten")


def test_connections_that_nobody_asks_for_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_connections, "UNCLAIMED", 3)
    own = PeerListener(LOCAL, SECRET, None, lambda _: None)
    with contextlib.closing(own), contextlib.ExitStack() as opened:
        for number in range(10):
            one = opened.enter_context(enter(LOCAL, own.port, SECRET, timeout=PATIENCE))
            one.sendall(name_of("g", 0, number))
            until(lambda number=number: name_of("g", 0, number) in own._named, "it has been heard")  # type: ignore[misc]
        assert len(own._named) == 3


def test_a_group_that_is_not_wanted_any_more_is_given_up() -> None:
    with company(2) as there:
        building = there.building("0/all/1", 0, PATIENCE)  # the other one does not come
        assert not building.over
        building.give_up()
        until(lambda: building.over, "it is given up")
        with pytest.raises(Broken):
            building.group()


def test_a_peer_that_cannot_be_reached_is_named_with_its_address() -> None:
    with company(2) as there:
        closed = listener(LOCAL)
        there.listeners[0].port = closed.getsockname()[1]
        closed.close()  # nobody listens there
        tasks = [there.pool.submit(there.join, "0/all/1", place, 0.5) for place in range(2)]
        with pytest.raises(RunError, match=r"worker:1 did not connect to worker:0 at 127\.0\.0\.1"):
            tasks[0].result(PATIENCE)
        with pytest.raises(RunError, match=r"worker:1 cannot reach worker:0 at 127.0.0.1:\d+ for a mean.*--ports"):
            tasks[1].result(PATIENCE)


def test_who_has_another_secret_or_no_tls_is_refused_with_the_reason(tmp_path: Any) -> None:
    for tls, reason in ((PLAIN, "has another secret"), (contexts(certificates(tmp_path)), "does not use TLS")):
        with company(2, tls) as there:
            other = PeerListener(LOCAL, bytes(32), None, lambda _: None)  # not of this run
            with contextlib.closing(other):
                there.listeners[0].port = other.port
                with there.pool as pool:
                    tasks = [pool.submit(there.join, "0/all/1", place, 0.5) for place in range(2)]
                    with pytest.raises(RunError, match=reason):
                        tasks[1].result(PATIENCE)
                    with pytest.raises(RunError, match="did not connect"):
                        tasks[0].result(PATIENCE)


def test_one_who_comes_late_is_waited_for_and_tried_again() -> None:
    """The first listens only after the second has tried."""
    with company(2) as there:
        late = there.listeners[0]
        place = socket.create_server((LOCAL, 0))
        closed, port = place.getsockname()[1], late.port
        place.close()
        late.port = closed
        task = there.pool.submit(there.join, "0/all/1", 1, PATIENCE)
        first = there.pool.submit(there.join, "0/all/1", 0, PATIENCE)
        # somebody of this run is there at last: it passes connections on
        server = socket.create_server((LOCAL, closed))
        over = threading.Event()

        def pass_on() -> None:
            near, _ = server.accept()
            far = socket.create_connection((LOCAL, port))

            def one_way(a: socket.socket, b: socket.socket) -> None:
                with contextlib.suppress(OSError):
                    while piece := a.recv(65536):
                        b.sendall(piece)
                for end in (a, b):
                    with contextlib.suppress(OSError):
                        end.shutdown(socket.SHUT_RDWR)

            back = threading.Thread(target=one_way, args=(far, near))
            back.start()
            one_way(near, far)
            back.join()
            near.close()
            far.close()
            over.set()

        passing = threading.Thread(target=pass_on)
        passing.start()
        groups = [first.result(PATIENCE), task.result(PATIENCE)]
        v = torch.ones(10)
        for mean in there.each(lambda rank: there.mean(groups[rank], v, Header(1, 1, 1.0))):
            assert torch.equal(mean, v)
        for group in groups:
            group.bury()
        assert over.wait(PATIENCE)
        passing.join()
        server.close()


def test_the_ports_of_a_node_are_kept_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_connections, "_listeners", {})
    taken = socket.create_server((LOCAL, 0))
    port = int(taken.getsockname()[1])
    node = Endpoint(store=(LOCAL, 1, SECRET), ports=Ports(port, port))
    with pytest.raises(UsageError, match="--ports"):
        listener_of(node)
    taken.close()
    made = listener_of(node)
    with contextlib.closing(made):
        assert made.port == port
        assert listener_of(node) is made  # one for all workers of the process


def test_a_listener_whose_thread_ends_before_it_is_woken_is_closed_without_an_error() -> None:
    listening = PeerListener(LOCAL, SECRET, None, print)
    listening._closed = True  # as `close` sets it, just before a look that was due anyway
    listening._thread.join()
    listening.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((LOCAL, listening.port), timeout=5)
