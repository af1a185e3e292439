"""Joining a run on several nodes: how an agent asks the hub to take part, and how long the hub waits for all roles."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from enum import Enum, auto
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
PATIENT = 3.0  # seconds before the user is told that it is not there yet
POLICIES = ("fail", "go-on", "wait")  # what to do when a role has not joined in time
FIRST, EVERY, LATER = 5.0, 5.0, 30.0  # seconds to the first line about missing roles, between lines, after a minute


@dataclass(frozen=True)
class JoinRequest:
    """The address of the hub, and the roles and the endpoint of this agent."""

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
    """The hub's answer, which may take a while: the hub must know first that the role's last process is dead."""
    while time.monotonic() < until:
        channel.wait(1.0)
        for kind, payload in channel.receive():
            match kind, plain(payload):
                case NodeMessage.WELCOME, told:
                    return dict(told)
                case NodeMessage.REFUSE, {"idle": True, "why": why}:
                    raise NothingToDo(str(why))
                case NodeMessage.REFUSE, {"again": True, "why": why}:
                    raise TimeoutError(str(why))
                case NodeMessage.REFUSE, told:
                    raise UsageError(f"the hub does not take this process: {told.get('why', '')}")
    raise TimeoutError("it did not answer")


def channel_of(way: JoinRequest) -> Channel:
    """An authenticated connection to the hub."""
    assert way.node.secret is not None
    connection = enter(way.host, way.port, way.node.secret, timeout=5.0, tls=tls.client_side(way.node))
    return Channel(connection, limits=protocol.LIMITS)


class Verdict(Enum):
    """What is decided about the missing roles."""

    WAIT = auto()
    COMPLETE = auto()  # every role has joined
    WITHOUT = auto()  # the time has passed: continue without the missing roles
    FAIL = auto()  # the time has passed: the run fails


class JoinWait:
    """The roles that other processes bring. No step begins before they have joined, except the evaluator, which follows
    checkpoints whenever it comes."""

    def __init__(self, roles: Iterable[str], here: Collection[str], *, join: float, policy: str, began: float) -> None:
        self.join, self.policy, self._began = join, policy, began
        self._roles = [name for name in roles if name != "evaluator"]
        self.came = {name for name in self._roles if name in here}  # at any time, perhaps gone since
        self._next = began + FIRST

    def look(self, away: Collection[str], now: float, say: Callable[[str], None]) -> Verdict:
        """Decide, and report the missing roles every few seconds. `away`: roles without a process."""
        missing = [name for name in self._roles if name in away]
        if not missing:
            if not self.never_came():
                say(f"all {len(self._roles)} roles have joined")
            return Verdict.COMPLETE
        if now - self._began > self.join and self.policy != "wait":
            return Verdict.WITHOUT if self.policy == "go-on" else Verdict.FAIL
        if now >= self._next:
            waited = now - self._began
            self._next = now + (EVERY if waited < 60 else LATER)
            limit = f" of {self.join:g} s" if self.policy != "wait" else " s, without limit"
            there = f"{len(self._roles) - len(missing)} of {len(self._roles)} roles have joined"
            say(f"waiting for {', '.join(missing)}: {there} ({waited:.0f}{limit})")
        return Verdict.WAIT

    def never_came(self) -> list[str]:
        return [name for name in self._roles if name not in self.came]


def rejoin_time(patience: float, join: float) -> float:
    """Seconds that an agent looks for a hub that it has lost: a restarted chief has to load its program, its data and a
    checkpoint, perhaps on another machine."""
    return min(join, max(5 * patience, 60.0))
