"""Runs on several nodes, all of them on loopback: the hub is the test's own process, every other role has an agent.

Agents are forks of the test, so that they begin at once; nothing but loopback connects them with the hub.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from paceline.config.endpoint import Certificates, Endpoint
from paceline.config.plan import Plan
from paceline.network.nodes import agent, node_memory
from paceline.network.nodes.coordinator import Coordinator
from paceline.network.nodes.join import JoinRequest
from paceline.network.secure import secret as secrets
from paceline.processes.roles.roles import roles_of
from paceline.processes.supervisor.supervisor import Supervisor
from paceline.scheme import Scheme

LOCAL = "127.0.0.1"
LATE = 0.7  # seconds after the others


class Nodes:
    """The agents of one run, by role. `here`: roles that the hub's own node has."""

    def __init__(
        self,
        here: set[str],
        certificates: Certificates | None,
        extra: tuple[str, ...],
        together: tuple[str, ...],
        share: bool,
        late: tuple[str, ...],
        one_disk: bool,
    ) -> None:
        self.secret, self.certificates, self._here, self._extra = secrets.fresh(), certificates, here, extra
        self._together, self._share, self._late, self._one_disk = together, share, late, one_disk
        self.agents: dict[str, int] = {}
        self.codes: dict[str, int] = {}
        self.port = 0
        self.join, self.join_policy, self.late = 30.0, "fail", LATE
        self._objects: dict[str, Any] = {}

    def launcher(self, plan: Plan, scheme: Scheme, objects: dict[str, Any], **rest: Any) -> Supervisor:
        self._objects = {name: one for name, one in objects.items() if name != "ready"}
        node = Endpoint(address=LOCAL, secret=self.secret, certificates=self.certificates, share=self._share)

        def listening(_: str, port: int) -> None:
            self.port = port

        hub = Coordinator(
            plan,
            scheme,
            objects,
            node=node,
            port=0,
            here=set(self._here),
            join=self.join,
            join_policy=self.join_policy,
            listening=listening,
            **rest,
        )
        self._hub = weakref.ref(hub.supervisor)
        grouped = {part for group in self._together for part in group.split("+")}
        single = [part for part in map(str, roles_of(plan, scheme)) if part not in grouped and part not in self._here]
        for part in (*single, *self._together, *self._extra):
            self.start(part, delay=self.late if part in self._late else 0.0)
        return hub.supervisor

    def start(self, part: str, *, secret: bytes | None = None, delay: float = 0.0) -> int:
        """An agent for a role, in a process of its own."""
        sys.stdout.flush()
        pid = os.fork()
        if pid:
            self.agents[part] = pid
            return pid
        code = 99
        try:
            signal.set_wakeup_fd(-1)
            if not self._one_disk:
                node_memory.SHARED = ".elsewhere"  # looks for the hub's mark where it is not
            sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
            gc.freeze()  # or a socket of the hub, collected here, would close a descriptor of this node
            os.closerange(3, 4096)  # what the hub has opened is not this node's
            signal.signal(signal.SIGINT, signal.default_int_handler)
            node = Endpoint(
                address=LOCAL, secret=secret or self.secret, certificates=self.certificates, share=self._share
            )
            threading.Event().wait(delay)
            way = JoinRequest(LOCAL, self.port, tuple(part.split("+")), node)
            code = agent.serve(lambda: way, 20.0, partial(print, f"agent of {part}:", flush=True), self._objects)
        except BaseException as error:
            traceback.print_exc()
            code = getattr(error, "exit_code", 98)
        finally:
            os._exit(code)

    def cut(self, part: str) -> None:
        """The whole node of a role is gone, at once."""
        os.kill(self.agents[part], signal.SIGKILL)
        self.wait(part)

    def homes(self) -> set[int]:
        """The nodes on whose memory anybody works."""
        hub = self._hub()
        return {*hub.board.node.tolist(), *hub.board.server_node.tolist()} if hub is not None else set()

    def ended(self, part: str) -> bool:
        """Whether an agent has ended, without waiting for it."""
        pid, status = os.waitpid(self.agents[part], os.WNOHANG)
        if pid:
            del self.agents[part]
            self.codes[part] = os.waitstatus_to_exitcode(status)
        return bool(pid)

    def wait(self, part: str) -> int:
        """How an agent ended."""
        _, status = os.waitpid(self.agents.pop(part), 0)
        self.codes[part] = os.waitstatus_to_exitcode(status)
        return self.codes[part]


@contextmanager
def nodes(
    *here: str,
    certificates: Certificates | None = None,
    extra: tuple[str, ...] = (),
    together: tuple[str, ...] = (),
    share: bool = False,
    late: tuple[str, ...] = (),
    one_disk: bool = True,
) -> Iterator[Nodes]:
    """Afterwards no agent is left; each must have ended by itself, with 0 unless the test has looked at its code.
    `share`: as they are on one host, they may share their memory; else all goes over connections. `late`: agents that
    are in no hurry. `one_disk`: agents see the hub's run directory; else they have to be sent what they need."""
    made = Nodes({"chief", *here}, certificates, extra, together, share, late, one_disk)
    try:
        yield made
        codes = {part: made.wait(part) for part in list(made.agents)}
        assert not any(codes.values()), codes
    finally:
        for pid in made.agents.values():
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


Make = Callable[..., Supervisor]
