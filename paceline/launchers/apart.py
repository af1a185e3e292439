"""A launcher in a process of its own, for callers that cannot be one: a notebook has threads, a script has computed.

The caller starts `python -m paceline.launchers` with two inherited descriptors, hears of the run in JSON lines,
and hands Ctrl-C on. If the caller dies, the launcher ends the run in order.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from paceline import carry, interrupts
from paceline.control import Control, Listener
from paceline.errors import PacelineError
from paceline.launchers.local import Launcher
from paceline.plan import Plan
from paceline.report.live import RoleState, RoleStatus, Status
from paceline.role import error_of, scheme_of

Tell = Callable[[str, str], None]


def launch(plan: Plan | None, objects: dict[str, Any], *, tell: Tell, watch: Callable[[Status], None]) -> None:
    """Run a plan through a launcher of its own; raises what the run raised. Without a plan: take part in the run of
    another process, as the environment says."""
    descriptor = carry.packed(objects)
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", "paceline.launchers", str(theirs.fileno()), str(descriptor), str(os.getpid())]
    paths = os.pathsep.join(path for path in sys.path if path)  # what the caller can import, its objects may need
    process = subprocess.Popen(
        command,
        pass_fds=(theirs.fileno(), descriptor),
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C reaches the caller alone, which hands it on
        env=os.environ | {"PYTHONPATH": paths},
    )
    theirs.close()
    os.close(descriptor)
    interrupted, error = False, None
    with ours:
        ours.sendall((plan.to_json().replace("\n", "") if plan is not None else "null").encode() + b"\n")
        listener = Listener(ours)
        ours.setblocking(True)
        waiting: deque[dict[str, Any]] = deque()
        more = True
        while more or waiting or process.poll() is None:
            try:
                while waiting:
                    message = waiting.popleft()
                    if "status" in message:
                        watch(_status(message["status"]))
                    elif "tell" in message:
                        tell(*message["tell"])
                    elif "error" in message:
                        error = error_of(message["error"])
                if more:
                    messages, more = listener.wait()
                    waiting.extend(messages)
                else:
                    process.wait()
            except KeyboardInterrupt:
                interrupted = True
                process.send_signal(signal.SIGINT)
            except BaseException:  # of the caller's own `watch` or `tell`: the run must not go on unseen
                process.send_signal(signal.SIGINT)
                process.wait()
                raise
    code = process.returncode
    if error is not None:
        raise error
    if interrupted or code == interrupts.EXIT_CODE:
        raise KeyboardInterrupt
    if code:
        where = f"; see {plan.directory}/logs" if plan is not None else ""
        raise PacelineError(f"the launcher ended with exit code {code}{where}")


def _status(data: dict[str, Any]) -> Status:
    roles = tuple(RoleStatus(**role | {"state": RoleState(role["state"])}) for role in data.pop("roles"))
    return Status(roles=roles, **data)


def main() -> int:
    """The launcher's side."""
    from paceline import partaking  # what only this side needs
    from paceline.run import execute

    connection, descriptor, caller = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3])
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # if the caller dies, end in order
    if os.getppid() != caller:
        return 1
    control = Control(connection)
    interrupts.raise_while_working()
    interrupts.part_with("")  # the process that started it says what happened
    try:
        with connection.makefile("r", encoding="utf-8") as lines:
            told = json.loads(lines.readline())
        objects = carry.unpacked(descriptor)

        def say(text: str) -> None:
            control.send({"tell": ["say", text]})

        if told is None:
            seat = partaking.here(None)
            assert seat is not None
            return partaking.take_part(seat, partaking.Network(), None, say, objects)
        plan = Plan.from_dict(told)
        seat = partaking.here(plan.directory)
        chosen = partaking.hub_of(seat, partaking.Network(), plan.directory, say) if seat is not None else Launcher

        def launched(*given: Any, **rest: Any) -> Launcher:
            made = chosen(*given, **rest)
            interrupts.count_from_now_on(made.asked)
            return made

        execute(
            plan,
            scheme_of(plan, objects),
            objects,
            tell=lambda kind, text: control.send({"tell": [kind, text]}),
            watch=lambda status: control.send({"status": asdict(status)}),
            launcher=launched,
        )
    except (KeyboardInterrupt, interrupts.Interrupted):
        return interrupts.EXIT_CODE
    except PacelineError as error:
        notes = list(getattr(error, "__notes__", ()))
        failed = {"kind": type(error).__name__, "where": "", "text": str(error), "notes": notes}
        control.send({"error": failed})
        return error.exit_code
    except Exception as error:  # the caller may have no terminal on which a traceback would be seen
        traceback.print_exc()
        told = {
            "kind": "RunError",
            "where": "",
            "text": f"in the launcher: {type(error).__name__}: {error}",
            "notes": [],
        }
        control.send({"error": told})
        return 1
    return 0
