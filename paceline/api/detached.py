"""A supervisor in a process of its own, for callers that must not fork: they may have threads.

The caller starts `python -m paceline.api` with two inherited descriptors, reads the progress of the run as JSON lines,
and forwards Ctrl-C. If the caller dies, the supervisor ends the run in order.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from paceline import signals
from paceline.api.execute import Tell, execute
from paceline.config.from_plan import scheme_of
from paceline.config.plan import Plan
from paceline.errors import PacelineError, RunError
from paceline.network.nodes import participate
from paceline.processes.parent_death import die_with_parent
from paceline.processes.roles.control_channel import Control, Listener, error_of
from paceline.processes.supervisor import pickled_objects
from paceline.processes.supervisor.status import RoleState, RoleStatus, Status
from paceline.processes.supervisor.supervisor import Supervisor


def launch(plan: Plan | None, objects: dict[str, Any], *, tell: Tell, watch: Callable[[Status], None]) -> None:
    """Run a plan under a supervisor of its own; raises the error of the run. Without a plan: take part in the run of
    another process, which the environment names."""
    descriptor = pickled_objects.packed(objects)
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", "paceline.api", str(theirs.fileno()), str(descriptor), str(os.getpid())]
    paths = os.pathsep.join(path for path in sys.path if path)  # objects of the caller may need its modules
    process = subprocess.Popen(
        command,
        pass_fds=(theirs.fileno(), descriptor),
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C reaches only the caller, which forwards it
        env=os.environ | {"PYTHONPATH": paths},
    )
    theirs.close()
    os.close(descriptor)
    ready = interrupted = False
    error: PacelineError | None = None
    with ours:
        told = (plan.to_json().replace("\n", "") if plan is not None else "null").encode() + b"\n"
        listener = Listener(ours)
        ours.setblocking(True)
        waiting: deque[dict[str, Any]] = deque()
        more = True
        while more or waiting or process.poll() is None:
            try:
                if told:
                    unsent, told = told, b""
                    with suppress(BrokenPipeError, ConnectionResetError):  # it has ended: its exit code says why
                        ours.sendall(unsent)
                while waiting:
                    message = waiting.popleft()
                    if "status" in message:
                        watch(_status(message["status"]))
                    elif "ready" in message:
                        ready = True
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
                # an interpreter that is starting would print a traceback; it has no processes yet
                process.send_signal(signal.SIGINT if ready else signal.SIGKILL)
            except BaseException:  # of the caller's `watch` or `tell`: end the run, which nobody would see
                process.send_signal(signal.SIGINT)
                process.wait()
                raise
    code = process.returncode
    if error is not None:
        raise error
    if interrupted or code == signals.EXIT_CODE:
        raise KeyboardInterrupt
    if code:
        where = f"; see {plan.directory}/logs" if plan is not None else ""
        raise PacelineError(f"the launcher ended with exit code {code}{where}")


def _status(data: dict[str, Any]) -> Status:
    roles = tuple(RoleStatus(**role | {"state": RoleState(role["state"])}) for role in data.pop("roles"))
    return Status(roles=roles, **data)


def main() -> int:
    """The body of the supervisor's process."""
    connection, descriptor, caller = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3])
    die_with_parent(signal.SIGTERM, caller)  # which ends the run in order
    control = Control(connection)
    signals.raise_while_working()
    signals.part_with("")  # the caller prints what happened
    control.send({"ready": True})
    try:
        with connection.makefile("r", encoding="utf-8") as lines:
            told = json.loads(lines.readline())
        objects = pickled_objects.unpacked(descriptor)

        def say(text: str) -> None:
            control.send({"tell": ["say", text]})

        if told is None:
            seat = participate.here(None)
            assert seat is not None
            return participate.take_part(seat, participate.Network(), None, say, objects)
        plan = Plan.from_dict(told)
        seat = participate.here(plan.directory)
        chosen = participate.hub_of(seat, participate.Network(), plan.directory, say) if seat else Supervisor

        def launched(*given: Any, **rest: Any) -> Supervisor:
            made = chosen(*given, **rest)
            signals.count_from_now_on(made.asked)
            return made

        execute(
            plan,
            scheme_of(plan, objects),
            objects,
            tell=lambda kind, text: control.send({"tell": [kind, text]}),
            watch=lambda status: control.send({"status": asdict(status)}),
            launcher=launched,
        )
    except (KeyboardInterrupt, signals.Interrupted):
        return signals.EXIT_CODE
    except PacelineError as error:
        control.send({"error": _report(error, str(error))})
        return error.exit_code
    except Exception as error:  # the caller may have no terminal that shows the traceback
        traceback.print_exc()
        control.send({"error": _report(RunError(), f"in the launcher: {type(error).__name__}: {error}")})
        return 1
    return 0


def _report(error: PacelineError, text: str) -> dict[str, Any]:
    """An error as `error_of` reads it."""
    return {"kind": type(error).__name__, "where": "", "text": text, "notes": list(getattr(error, "__notes__", ()))}
