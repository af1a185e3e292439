"""A role as a program of its own: `paceline role NAME --handle DESCRIPTOR`, for code that cannot be forked.

The program inherits all descriptors that it needs: the handle, a text that names the others, and the memory itself.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from typing import Any

from paceline.config.endpoint import Endpoint
from paceline.config.plan import Plan
from paceline.config.role_names import parsed
from paceline.errors import UsageError
from paceline.processes.memory.board import Board
from paceline.processes.memory.segment import anonymous
from paceline.processes.roles.control_channel import Control
from paceline.processes.roles.main import RoleContext, main
from paceline.processes.roles.roles import Role
from paceline.processes.supervisor import pickled_objects

LONGEST = 1 << 22  # bytes of a handle


def packed(context: RoleContext) -> int:
    """The descriptor of what a fresh interpreter gets of the caller's objects, -1 if there are none. They are packed in
    the launcher: a framework that holds some of them cannot read them after a fork."""
    named = {name: one for name, one in context.objects.items() if name != "ready"}  # it makes the task itself
    return pickled_objects.packed(named) if named else -1


def become(part: Role, context: RoleContext, control: Control, objects: int) -> int:
    """Replace this (just forked) process by a fresh interpreter that plays the role."""
    handle = {
        "plan": json.loads(context.plan.to_json()),
        "servers": context.board.servers,
        "board": context.board.descriptor,
        "wakeup": context.wakeup,
        "state": context.state,
        "control": control.fileno(),
        "objects": objects,
        "node": context.node.to_json(),
        "letters": context.letters,
    }
    data = json.dumps(handle).encode()
    descriptor = anonymous("paceline-handle", len(data))
    os.pwrite(descriptor, data, 0)
    memory = (context.board.descriptor, *context.wakeup, context.state, *(context.letters or ()))
    for one in (descriptor, *memory, control.fileno(), objects):
        if one >= 0:
            os.set_inheritable(one, True)
    os.execv(sys.executable, [sys.executable, "-m", "paceline", "role", str(part), "--handle", str(descriptor)])


def play(name: str, handle: int) -> int:
    """The program's side: open the inherited descriptors, and run the role; gives the exit code."""
    part = Role(*parsed(name))
    try:
        data: dict[str, Any] = json.loads(os.pread(handle, LONGEST, 0))
        plan = Plan.from_dict(data["plan"])
        board = Board(data["board"], plan.workers, data["servers"])
        control = Control(socket.socket(fileno=data["control"]))
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(
            f"{handle} is not the handle of a run ({error}); roles are started by a launcher: paceline train"
        ) from error
    objects = pickled_objects.unpacked(data["objects"]) if data["objects"] >= 0 else {}
    node = Endpoint.from_json(data["node"])
    letters = tuple(data["letters"]) if data["letters"] else None
    return main(part, RoleContext(plan, board, data["wakeup"], data["state"], objects, node, letters), control)
