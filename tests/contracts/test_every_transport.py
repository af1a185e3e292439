"""Every transport passes the conformance suite, between real processes."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from paceline.config import discovery
from paceline.config.endpoint import Endpoint
from paceline.testing import transports


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("check", transports.CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("transport", list(discovery.readable("transports")))
def test_every_transport(transport: str, check: transports.Check, servers: int) -> None:
    check(lambda: discovery.transport(transport), servers)


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("check", transports.CHECKS, ids=lambda check: check.__name__)
def test_the_example(check: transports.Check, servers: int) -> None:
    example = runpy.run_path(str(Path(__file__).resolve().parents[2] / "examples/message_transport.py"))
    check(example["MessageTransport"], servers)


def test_a_variable_names_the_transport_between_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (Endpoint().transport, Endpoint(secret=b"s").transport) == ("shared-memory", "tcp")
    monkeypatch.setenv("PACELINE_TRANSPORT", "message")
    assert (Endpoint().transport, Endpoint(secret=b"s").transport) == ("shared-memory", "message")
