"""The launcher of one machine: starts every role, brings back those that die, and ends with nothing left behind."""

from __future__ import annotations

import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from paceline import signals
from paceline.config import discovery
from paceline.config.plan import Plan
from paceline.errors import RunError
from paceline.processes.memory.board import DONE, FAILED, RUNNING, STOP, STOPPING, Board
from paceline.processes.memory.segment import anonymous
from paceline.processes.memory.wakeup import Wakeup
from paceline.processes.roles.control_channel import Listener
from paceline.processes.roles.main import RoleContext, error_of, main, ranks, roles_of, servers_of
from paceline.processes.supervisor.cpu_activity import is_stopped
from paceline.processes.supervisor.exec_role import become
from paceline.processes.supervisor.fork import forked
from paceline.processes.supervisor.patience import Patience
from paceline.processes.supervisor.recovery import Child, Outcome, Recovery
from paceline.processes.transport import Collective, Store
from paceline.runs.run_directory import RunDirectory
from paceline.scheme import Scheme

LOOK = 0.125  # seconds between two looks at the board
FIRST_PAUSE, LONGEST_PAUSE = 0.25, 60.0  # seconds before an evaluator that has died is started again


class Supervisor(Recovery):
    """Runs a plan. `watch` is called a few times a second; `tell` with each message that is for people."""

    def __init__(
        self,
        plan: Plan,
        scheme: Scheme,
        objects: dict[str, Any],
        *,
        tell: Callable[[str, str], None],
        watch: Callable[[Supervisor], None],
    ) -> None:
        self.plan, self.scheme, self.tell, self.watch = plan, scheme, tell, watch
        self.children = [Child(part) for part in roles_of(plan, scheme)]
        self.board = Board.create(plan.workers, servers_of(plan, scheme))
        self.board.put("began", time.monotonic_ns())
        self.board.put("goal", -1)
        self.board.put("checkpoint", -1)
        self.board.put("joined", 1)
        for rank in range(plan.workers):
            self.board.alive[rank] = self.board.known[rank] = 1
        self._wakeup = Wakeup.create(self.board.roles)
        self.wakeup = Wakeup(self.board, self._wakeup, self.board.launcher)
        self._state = anonymous("paceline-state")
        self._context = RoleContext(plan, self.board, self._wakeup, self._state, objects)
        self.outcome = Outcome()
        self.directory = RunDirectory.open(plan.directory)
        self._selector = selectors.DefaultSelector()
        self.asked = signals.Counter()  # by signals, to end
        self._asked_at = self._failed_at = 0.0
        self._patience = Patience(plan, self.board)
        self._over = self._halted = False
        self._store: Store | None = None
        self.metrics: dict[str, float] = {}  # of the last evaluation

    def run(self) -> Outcome:
        woken, wake = socket.socketpair()
        woken.setblocking(False)
        wake.setblocking(False)
        self._selector.register(woken, selectors.EVENT_READ)
        handler = signal.signal(signal.SIGCHLD, lambda *_: None)
        before = signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        try:
            self._open_store()
            for child in self.children:
                self._start(child)
            while not all(child.done for child in self.children):
                self._selector.select(LOOK)
                drain(woken)
                self._heed()
                self._attend()
                if self._store is not None:
                    self._store.pump()
                self._listen()
                self._reap()
                self._start_postponed()
                self._limits()
                self.watch(self)
        finally:
            self._end_all()
            self._farewell()
            self._note()
            signal.set_wakeup_fd(before)
            signal.signal(signal.SIGCHLD, handler)
            self._selector.close()
            if self._store is not None:
                self._store.close()
            woken.close()
            wake.close()
            for descriptor in (*self._wakeup, self._state, self.board.descriptor):
                os.close(descriptor)
        return self.outcome

    def _open_store(self) -> None:
        """Where workers whose means go over connections find each other."""
        node = self._context.node
        chosen: Collective = discovery.collective(self.plan.collective)
        self._store = chosen.store(node, lambda text: self.tell("warn", text))
        if self._store is not None:
            self._selector.register(self._store, selectors.EVENT_READ)
            self._context.node = replace(node, store=self._store.place)

    def _attend(self) -> None:
        """Look after roles of other nodes, where there are any."""

    def _leave_behind(self) -> None:
        """In a new role's process: close what is the launcher's alone."""

    def _end_others(self) -> None:
        """End them."""

    def _farewell(self) -> None:
        """Let their launchers go."""

    def _note(self) -> None:
        """What the board says at the end, before its memory goes."""
        board, words = self.board, self.outcome.words
        self.opened()
        for name in ("began", "first_step", "stopped", "rolled_back", "restarts"):
            words[name] = board.get(name)
        words["samples"], words["reached"] = sum(board.samples), self.updates()
        if not words["stopped"]:
            words["stopped"] = time.monotonic_ns()

    def stop(self, reason: str, how: int = STOPPING) -> None:
        """Let everybody end in order."""
        if self.board.run[STOP] == RUNNING:
            self.outcome.stopped = self.outcome.stopped or reason
            if how == STOPPING and self.opened() and (self.plan.exact or not self.scheme.methods):
                # all end at one step, which the chief names, or the first that lives
                if not self._halted:
                    self._halted = True
                    self.board.put("halt", 1)
                return
            self.board.put("stopped", time.monotonic_ns())
        if self.board.run[STOP] < how:
            self.board.put("stop", how)
        self.wakeup.ring_all()

    def _heed(self) -> None:
        """Do what signals have asked for: an end in order, then an end at once."""
        if not self.asked.count:
            return
        if self.asked.hung_up:
            signals.leave_terminal()
        if not self._asked_at:
            self._first_signal()
        if self.asked.count > 1 and not self._over:
            if self.outcome.result is None:
                self._interrupted()
            self._end_all()

    def _first_signal(self) -> None:
        self._asked_at = time.monotonic()
        self.board.put("interrupted", 1)
        if self.board.run[STOP] != RUNNING:
            self.tell("say", "interrupted: the run is ending already (again to end it at once)")
        elif self.board.get("ready"):
            self._interrupted()
            self.stop("interrupted")
            self.tell("say", "interrupted: ending in order, with a last checkpoint (again to end at once)")
        else:  # nothing has been trained: there is nothing to put in order
            self._interrupted()
            self._end_all()

    def _interrupted(self) -> None:
        """The run ends short of its goal."""
        self.outcome.interrupted = True
        self.outcome.stopped = self.outcome.stopped or "interrupted"

    def _start(self, child: Child) -> None:
        part = child.part
        log = self.directory.logs / f"{part.file}.log"
        keep = {*self._wakeup, self._state, self.board.descriptor}

        def play(control: Any) -> int:
            for other in self.children:
                if other.listener is not None and other.listener.connection.fileno() not in keep:
                    other.listener.connection.close()
            self._selector.close()
            self._leave_behind()
            if self._store is not None:
                self._store.close()
            return (become if self.plan.start == "exec" else main)(part, self._context, control)

        child.progress_at_start = self._progress(part)
        child.pid, connection = forked(str(part), log, play)
        child.listener = Listener(connection)
        self._selector.register(connection, selectors.EVENT_READ, child)
        board = self.board
        if part.kind == "server":
            board.server_pid[part.index] = child.pid
        elif part.kind == "evaluator":
            board.evaluator_words[2] = child.pid
        for rank in ranks(part, self.plan):
            board.pid[rank] = child.pid

    def _listen(self) -> None:
        for child in self.children:
            if child.listener is not None:
                for message in child.listener.messages():
                    self._heard(child, message)

    def _heard(self, child: Child, message: dict[str, Any]) -> None:
        outcome = self.outcome
        for kind, content in message.items():
            match kind:
                case "say" | "warn":
                    if kind == "warn":
                        outcome.warnings.append(content)
                    self.tell(kind, content)
                case "notice":
                    outcome.notice = content
                    self.tell("notice", content)
                case "record":
                    if "loss" in content:
                        self.metrics = {k: v for k, v in content.items() if k not in ("update", "seconds")}
                    outcome.history.append(content)
                    self.directory.append_history(content)
                case "result":
                    outcome.result = content
                case "stopped":
                    outcome.stopped = outcome.stopped or content
                case "batch":
                    outcome.batch = content
                case "task":
                    outcome.task = content
                case "failure":
                    child.failure = content
                case "error" if outcome.error is None:
                    outcome.error = error_of(content)
                    self.stop("", FAILED)

    def _reap(self) -> None:
        for child in self.children:
            if child.done or not child.pid:
                continue
            pid, status, usage = os.wait4(child.pid, os.WNOHANG)
            if not pid:
                continue
            self.outcome.peak_rss = max(self.outcome.peak_rss, usage.ru_maxrss)
            assert child.listener is not None
            for message in child.listener.messages():
                self._heard(child, message)
            self._selector.unregister(child.listener.connection)
            child.listener.connection.close()
            child.listener, child.pid = None, 0
            code = os.waitstatus_to_exitcode(status)
            if code == 0 or self._over:
                self._finished(child)
            else:
                self._died(child, code)

    def _finished(self, child: Child) -> None:
        child.done = True
        for rank in ranks(child.part, self.plan):
            self.board.alive[rank] = 0
            self.board.gone[rank] = 1
            self.board.state[rank] = DONE
        self.wakeup.ring_all()

    def _died(self, child: Child, code: int, lost: str = "", *, excused: bool = False) -> None:
        """Somebody went without a goodbye: the others hear of it at once, and it is brought back. `lost`: why the
        memory that it worked on is gone with it. `excused`: it was asked to go, which `--restarts` does not count."""
        if self.asked.count > 1:  # the second signal may have ended it too; all are ended at the next look
            self._finished(child)
            return
        board, part = self.board, child.part
        cause = lost or (f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}")
        had_finished = self._had_finished(part)
        afresh = self._takes_no_part_yet(part, lost)
        together = not had_finished and not afresh and self._all_go_back(part)
        self._unmask(child, awaited=together or afresh)
        board.put("alarm", board.get("alarm") + 1)
        if had_finished:
            self._finished(child)
            return
        if part.kind == "evaluator" and not lost and self.outcome.error is None:
            self._postpone(child, child.failure or cause)
            return
        hopeless = code > 0 or board.run[STOP] == FAILED
        if code > 0 and self.outcome.error is None:
            self.outcome.error = RunError(f"{part} ended with {cause}; see logs/{part.file}.log")
        torn = together or (part.kind == "server" and (bool(lost) or self._torn(part.index)))
        if not hopeless and not excused:
            progress = board.get("checkpoint") if torn else self._progress(part)  # all since then is lost with it
            child.in_a_row = 1 if progress > child.progress.get(torn, 0) else child.in_a_row + 1
            child.progress[torn] = progress
            if child.in_a_row > self.plan.restarts:
                hopeless, number = True, child.in_a_row
                how = f"{number} times in a row without any progress between" if number > 1 else "once"
                self.outcome.error = RunError(
                    f"{part} died by {cause} {how}; --restarts allows {self.plan.restarts}; see logs/{part.file}.log"
                )
        if hopeless:
            self._finished(child)
            self.stop("", FAILED)
            return
        self._count_restart(child)
        if torn and not self._went_back(part, lost):
            self._finished(child)
            return
        if not afresh:
            self._restore_absent(part)
        self.tell("warn", f"{part}: {cause}" if lost else f"{part} died ({cause}); restarting it")
        self.wakeup.ring_all()
        self._start(child)

    def _count_restart(self, child: Child) -> None:
        child.restarts += 1
        self.board.put("restarts", self.board.get("restarts") + 1)

    def _postpone(self, child: Child, cause: str) -> None:
        """An evaluator has died. Training does without it: it is started again after a pause, which grows as long as it
        gets nothing done. After the stop there are as many more tries as `--restarts` allows."""
        progress = self._progress(child.part)
        ending = self.board.run[STOP] != RUNNING
        child.in_a_row = 1 if progress > child.progress.get(ending, 0) else child.in_a_row + 1
        if ending and ending not in child.progress:
            child.in_a_row = 1
        child.progress[ending], child.failure = progress, ""
        if ending and child.in_a_row > self.plan.restarts:
            self.tell("warn", f"evaluator died ({cause}); the last checkpoint is not evaluated")
            self.outcome.warnings.append(f"the last checkpoint is not evaluated: the evaluator died ({cause})")
            self._finished(child)
            return
        self._count_restart(child)
        pause = min(FIRST_PAUSE * 2 ** min(child.in_a_row - 1, 20), LONGEST_PAUSE)
        child.starts_at = time.monotonic() + pause
        self.tell("warn", f"evaluator died ({cause}); restarting it in {pause:g} s; training continues")

    def _start_postponed(self) -> None:
        for child in self.children:
            soon = self.board.run[STOP] != RUNNING
            if child.starts_at and not child.done and (soon or time.monotonic() >= child.starts_at):
                child.starts_at = 0.0  # here: a role of another node is started by its agent
                self._start(child)

    def _limits(self) -> None:
        """The end by the clock, and the end of patience with processes that hang."""
        board, now, patience = self.board, time.monotonic(), self.plan.patience
        if self.plan.seconds is not None and board.get("first_step"):
            trained = now - board.get("first_step") / 1e9
            if trained >= self.plan.seconds:
                self.stop(f"{self.plan.seconds:g} seconds have passed")
        if board.run[STOP] != RUNNING or self._halted:
            late = self._late(now)
            hanging = self._patience.hanging(late) if board.run[STOP] != FAILED and not self.outcome.interrupted else []
            self._kill_hanging(hanging, "at the end of the run")  # a successor can still end it in order
            if late and not hanging:
                self._end_all(late)
        elif not self.plan.script:  # what a script does before its training may take any time
            self._kill_hanging(self._patience.stuck_at_start(self.children, now, patience), "before its first step")
        for child in self.children:
            if not child.done and child.pid and is_stopped(child.pid):
                child.frozen = child.frozen or now
                board.put("alarm", board.get("alarm") + 1)  # others wait for it: their patience begins when it is back
                if now - child.frozen > patience:
                    self.tell("warn", f"{child.part} has stood still for {patience:g} s; killing it")
                    os.kill(child.pid, signal.SIGKILL)
                    child.frozen = 0.0
            else:
                child.frozen = 0.0

    def _kill_hanging(self, hanging: Iterable[Child], when: str) -> None:
        for child in hanging:
            self.tell("warn", f"{child.part} hangs: no progress for {self.plan.patience:g} s {when}; killing it")
            os.kill(child.pid, signal.SIGKILL)

    def _late(self, now: float) -> list[Child]:
        """Processes that do not end. After an error all have `patience` to end; otherwise they may work as long as they
        like, as long as they work. After an interrupt the last evaluation is not worth more than `patience`."""
        patience, left = max(self.plan.patience, 1.0), [child for child in self.children if not child.done]
        if self.board.run[STOP] == FAILED:
            self._failed_at = self._failed_at or now
            return left if now - self._failed_at > patience else []
        if self.outcome.interrupted and self.outcome.result is not None:
            return left if now - self._asked_at > patience else []
        exempt = [child for child in left if self._takes_its_time(child)]
        return self._patience.stuck_at_end(self.children, now, patience, exempt)

    def _takes_its_time(self, child: Child) -> bool:
        """The last looks of evaluator and chief, and what a script does after its training, have no limit."""
        board, kind = self.board, child.part.kind
        trained = kind in ("chief", "worker") and bool(self.plan.script and board.gone[child.part.index])
        closing = bool(board.get("closing")) and not self.outcome.interrupted
        return kind == "evaluator" or trained or (closing and kind in ("chief", "server"))

    def _end_all(self, late: Iterable[Child] = ()) -> None:
        """End every process that is still there now. `late`: those that the run has waited for in vain."""
        self._over = True
        names = ", ".join(str(child.part) for child in late)
        if names and self.outcome.error is None:
            text = f"{names} did not end: no progress for {self.plan.patience:g} s after the stop; killed"
            if self.outcome.interrupted:
                self.tell("warn", text)
            else:
                self.outcome.error = RunError(text)
        self._end_others()
        for child in self.children:
            if not child.done and child.pid:
                os.kill(child.pid, signal.SIGKILL)
                _, _, usage = os.wait4(child.pid, 0)
                self.outcome.peak_rss = max(self.outcome.peak_rss, usage.ru_maxrss)
                if child.listener is not None:
                    for message in child.listener.messages():
                        self._heard(child, message)
                    child.listener.connection.close()
                    child.listener = None
            child.done = True


def drain(connection: socket.socket) -> None:
    """Read what is there and forget it."""
    try:
        while connection.recv(4096):
            pass
    except BlockingIOError:
        pass
