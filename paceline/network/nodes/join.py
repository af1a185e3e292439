"""How an agent comes to its hub: where that is, and how it is asked to take part."""

from __future__ import annotations

import platform
import selectors
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from paceline.config.endpoint import Endpoint
from paceline.errors import RunError, UsageError
from paceline.network.nodes import protocol
from paceline.network.nodes.memory_handover import identity
from paceline.network.nodes.protocol import NodeMessage
from paceline.network.secure import tls
from paceline.network.secure.admission import Refused, enter
from paceline.network.secure.channel import Channel, Closed, plain

TRY_AGAIN = 0.25  # seconds between two tries to reach the hub
PATIENT = 3.0  # before people are told that it is not there yet


@dataclass(frozen=True)
class JoinRequest:
    """How the hub is reached, and what this agent brings."""

    host: str
    port: int
    parts: tuple[str, ...]
    node: Endpoint  # its number is not known yet

    def __str__(self) -> str:
        return ", ".join(self.parts)


class NothingToDo(Exception):
    """The run has no work for this role, and that is in order."""


def welcomed(
    find: Callable[[], JoinRequest | None], limit: float, nonce: str, first: bool, log: Callable[[str], None]
) -> tuple[JoinRequest, Channel, dict[str, Any]]:
    """Ask until the hub takes this agent; gives its answer too. `first`: it was never reached before."""
    until = time.monotonic() + limit
    where, why, told = "", "nobody has said where it is", time.monotonic() + PATIENT
    while time.monotonic() < until:
        if time.monotonic() > told:
            told = until
            log(f"waiting for the hub{where}: {why}")
        channel = None
        try:
            way = find()
            if way is None:
                time.sleep(TRY_AGAIN)
                continue
            where = f" at {way.host}:{way.port}"
            channel = channel_of(way)
            about = {
                "protocol": protocol.PROTOCOL,
                "parts": way.parts,
                "host": platform.node(),
                "address": way.node.address,
                "nonce": nonce,
                "machine": identity() if way.node.share else "",
            }
            channel.send_json(NodeMessage.JOIN, about)
            return way, channel, _answer(channel, until)
        except Refused as error:
            raise UsageError(f"the hub{where} refused {way}: {error}") from error
        except (OSError, Closed) as error:
            if channel is not None:
                channel.close()
            why = str(error)
            time.sleep(TRY_AGAIN)
    kept = "did not answer" if first else "is gone, and did not come back"
    raise RunError(f"the hub{where} {kept} within {limit:g} s ({why})")


def _answer(channel: Channel, until: float) -> dict[str, Any]:
    """What the hub says to a newcomer; it may have to wait for its predecessor to be known dead."""
    with selectors.DefaultSelector() as selector:
        selector.register(channel, selectors.EVENT_READ)
        while time.monotonic() < until:
            selector.select(1.0)
            for kind, payload in channel.receive():
                told = plain(payload) if kind in (NodeMessage.WELCOME, NodeMessage.REFUSE) else {}
                if kind == NodeMessage.REFUSE and told.get("idle"):
                    raise NothingToDo(str(told.get("why", "")))
                if kind == NodeMessage.REFUSE and told.get("again"):
                    raise TimeoutError(str(told.get("why", "")))
                if kind == NodeMessage.REFUSE:
                    raise protocol.Unwelcome(f"the hub does not take this process: {told.get('why', '')}")
                if kind == NodeMessage.WELCOME:
                    return dict(told)
    raise TimeoutError("it did not answer")


def channel_of(way: JoinRequest) -> Channel:
    """A connection to the hub, which has proved itself."""
    assert way.node.secret is not None
    connection = enter(way.host, way.port, way.node.secret, timeout=5.0, tls=tls.client_side(way.node))
    return Channel(connection, limits=protocol.LIMITS)
