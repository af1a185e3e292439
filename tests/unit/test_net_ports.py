"""A range of ports for listeners: how it is written, who takes which port, what is said when all are in use."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor

import pytest
from beds.ports import LOCAL, free_range

from paceline.config.endpoint import Endpoint, Ports, ports_of
from paceline.errors import UsageError
from paceline.launchers._child_process import free_port
from paceline.network.secure.admission import listener


@pytest.mark.parametrize(
    ("text", "first", "last"), [("20000-20040", 20000, 20040), (" 7 ", 7, 7), ("65535", 65535, 65535)]
)
def test_a_range_is_read(text: str, first: int, last: int) -> None:
    ports = Ports.parse(text)
    assert (ports.first, ports.last) == (first, last)
    assert list(ports) == list(range(first, last + 1))
    assert first in ports
    assert last + 1 not in ports


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "write the first and the last port"),
        ("20000-", "write the first and the last port"),
        ("a-b", "write the first and the last port"),
        ("-5", "write the first and the last port"),
        ("20000,20001", "write the first and the last port"),
        ("20040-20000", "the lower port comes first: 20000-20040"),
        ("0-5", "from 1 to 65535"),
        ("60000-70000", "from 1 to 65535"),
    ],
)
def test_what_is_wrong_with_a_range_is_said(text: str, why: str) -> None:
    with pytest.raises(UsageError, match=f"--ports {text}: .*{why}"):
        Ports.parse(text)


def test_the_variable_is_read_and_named_in_its_errors() -> None:
    assert ports_of({}) is None
    assert ports_of({"PACELINE_PORTS": ""}) is None
    assert ports_of({"PACELINE_PORTS": "7070-7079"}) == Ports(7070, 7079)
    with pytest.raises(UsageError, match="PACELINE_PORTS x"):
        ports_of({"PACELINE_PORTS": "x"})


def test_each_listener_takes_the_first_port_that_is_free() -> None:
    ports = free_range(3)
    with contextlib.ExitStack() as stack:
        taken = [stack.enter_context(listener(LOCAL, ports)).getsockname()[1] for _ in range(3)]
        assert taken == list(ports)
        with pytest.raises(
            UsageError, match=rf"{LOCAL}: all ports {ports} are in use; give a wider range with --ports"
        ):
            listener(LOCAL, ports)


def test_a_port_that_is_given_back_is_taken_again() -> None:
    ports = free_range(2)
    with listener(LOCAL, ports) as first:
        with listener(LOCAL, ports):
            pass
        with listener(LOCAL, ports) as second:
            assert [one.getsockname()[1] for one in (first, second)] == list(ports)


def test_many_at_once_take_a_port_each() -> None:
    ports = free_range(24)
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(24) as pool:
        made = [stack.enter_context(one) for one in pool.map(lambda _: listener(LOCAL, ports), range(24))]
        assert sorted(one.getsockname()[1] for one in made) == list(ports)


def test_a_clusters_own_port_is_only_a_wish() -> None:
    ports = free_range(1)
    with listener(LOCAL, ports) as first:
        assert first.getsockname()[1] == ports.first
        with pytest.raises(UsageError, match=f"port {ports} is in use"):
            listener(LOCAL, ports)
        with listener(LOCAL, Ports(ports.first, ports.last, firm=False)) as second:
            assert second.getsockname()[1] not in ports


def test_another_fault_than_a_port_in_use_is_not_passed_over() -> None:
    with pytest.raises(UsageError, match="does not have that address"):
        listener("192.0.2.1", Ports(20000, 20040))


def test_a_role_in_a_fresh_interpreter_keeps_to_the_range() -> None:
    node = Endpoint(2, "10.1.2.3", b"s" * 32, ports=Ports(20000, 20040))
    assert Endpoint.from_json(node.to_json()) == node
    assert Endpoint.from_json(Endpoint().to_json()) == Endpoint()


def test_engines_look_for_the_hubs_port_in_the_range() -> None:
    ports = free_range(2)
    with listener(LOCAL, ports):
        allowed = (ports.first, ports.last)
        assert free_port(LOCAL, allowed) == ports.last
        with listener(LOCAL, ports), pytest.raises(OSError, match="wider range with --ports"):
            free_port(LOCAL, allowed)
    assert free_port(LOCAL) > 0
