"""The supervisor of a run: starts every role, restarts those that die, and leaves nothing behind at the end."""

from __future__ import annotations

import selectors
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from paceline import signals
from paceline.config import discovery
from paceline.config.endpoint import ALONE, Endpoint
from paceline.config.plan import Plan
from paceline.errors import PacelineError, RunError
from paceline.processes.memory.board import DONE, FAILED, RUNNING, STOP, STOPPING
from paceline.processes.roles.control_channel import error_of
from paceline.processes.roles.roles import Role, ranks, roles_of
from paceline.processes.supervisor import profile_summary
from paceline.processes.supervisor.children import Child, Children, Message, progress_of
from paceline.processes.supervisor.launch_memory import LaunchMemory
from paceline.processes.supervisor.outcome import Outcome
from paceline.processes.supervisor.patience import Patience
from paceline.processes.supervisor.recovery import Recovery
from paceline.processes.transport import Collective, Store
from paceline.runs.run_directory import RunDirectory
from paceline.scheme import Scheme

LOOK = 0.125  # seconds between two looks at the board
FIRST_PAUSE, LONGEST_PAUSE = 0.25, 60.0  # seconds before an evaluator that has died is restarted


class Elsewhere:
    """The roles on other nodes, as the supervisor sees them: none, unless a coordinator says otherwise."""

    def start(self, child: Child) -> bool:
        """Have another node start a role. False: this node has it, and the supervisor starts it."""
        return False

    def attend(self) -> None:
        """Hear what other nodes say, decide, and send them what they need."""

    def kill_all(self) -> None:
        """Have every process on other nodes killed."""

    def release(self) -> None:
        """The run is over: let the other nodes go."""

    def close(self) -> None:
        """Close all descriptors; also called in the process of each new role."""


class Supervisor:
    """Runs a plan. `watch` is called a few times a second; `tell` with each message for the user."""

    def __init__(
        self,
        plan: Plan,
        scheme: Scheme,
        objects: dict[str, Any],
        *,
        tell: Callable[[str, str], None],
        watch: Callable[[Supervisor], None],
        node: Endpoint = ALONE,
    ) -> None:
        self.tell, self.watch = tell, watch
        self.elsewhere = Elsewhere()
        self.children = [Child(part) for part in roles_of(plan, scheme)]
        self.processes = Children()
        self.launched = LaunchMemory(plan, scheme, objects, node)
        self.board, self.wakeup = self.launched.board, self.launched.wakeup
        self.outcome = Outcome()
        self.directory = RunDirectory.open(plan.directory)
        self.recovery = Recovery(self.launched, self.directory, tell)
        self.asked = signals.Counter()  # signals that ask the run to end
        self._asked_at = self._failed_at = 0.0
        self._patience = Patience(plan, self.board)
        self.over = False  # all processes have been killed
        self._halted = False
        self._lost_last: Role | None = None  # whose loss sent the run back to a checkpoint while it ended
        self._store: Store | None = None
        self.metrics: dict[str, float] = {}  # of the last evaluation

    @property
    def plan(self) -> Plan:
        return self.launched.plan

    def run(self) -> Outcome:
        with self.processes.awake():
            try:
                self._open_store()
                for child in self.children:
                    self.start(child)
                while not all(child.done for child in self.children):
                    self.processes.select(LOOK)
                    self._heed()
                    self.elsewhere.attend()
                    if self._store is not None:
                        self._store.pump()
                    for child, code, peak_rss in self.processes.attend(self.heard):
                        self.ended(child, code, peak_rss)
                    self._start_postponed()
                    self._limits()
                    self.watch(self)
            finally:
                self.end_all()
                self.elsewhere.release()
                self._note()
                if self._store is not None:
                    self._store.close()
                self.launched.close()
        return self.outcome

    def _open_store(self) -> None:
        """The store by which workers whose means go over connections find each other."""
        context = self.launched.context
        chosen: Collective = discovery.collective(self.plan.collective)
        self._store = chosen.store(context.node, lambda text: self.tell("warn", text))
        if self._store is not None:
            self.processes.selector.register(self._store, selectors.EVENT_READ)
            context.node = replace(context.node, store=self._store.place)

    def _note(self) -> None:
        """Keep what the board says at the end, before its memory is released."""
        board, words = self.board, self.outcome.words
        words["reached"] = self.launched.updates()
        for name in ("began", "first_step", "stopped", "rolled_back", "restarts"):
            words[name] = board.get(name)
        words["samples"] = sum(board.samples)
        self.outcome.traffic = {name: getattr(board, name).tolist() for name in ("sent", "received", "uncompressed")}
        words["stopped"] = words["stopped"] or time.monotonic_ns()
        self._check_goal()
        self.outcome.profile = profile_summary.collected(self.plan, board)

    def _check_goal(self) -> None:
        """A run that was sent back to a checkpoint while it ended has not reached its goal: that is an error."""
        outcome, reached, goal = self.outcome, self.outcome.words["reached"], self.board.get("goal")
        meant = outcome.interrupted or outcome.stopped or outcome.error
        if self._lost_last is not None and not meant and reached < goal:
            outcome.error = RunError(
                f"{self._lost_last} was lost while the run ended: the run is back at update {reached:,} of {goal:,}; "
                "resume it to train the rest"
            )

    def stop(self, reason: str, how: int = STOPPING) -> None:
        """Have every process end in order."""
        if self.board.run[STOP] == RUNNING:
            self.outcome.stopped = self.outcome.stopped or reason
            if how == STOPPING and self.launched.opened() and (self.plan.exact or not self.launched.scheme.methods):
                # all end at one step, which the chief chooses, or the first worker that is alive
                if not self._halted:
                    self._halted = True
                    self.board.put("halt", 1)
                return
        self.board.stop(how)
        self.wakeup.ring_all()

    def _heed(self) -> None:
        """Obey the signals: the first asks for an end in order, the second for an end at once."""
        if not self.asked.count:
            return
        if self.asked.hung_up:
            signals.leave_terminal()
        if not self._asked_at:
            self._first_signal()
        if self.asked.count > 1 and not self.over:
            if self.outcome.result is None:
                self._interrupted()
            self.end_all()

    def _first_signal(self) -> None:
        self._asked_at = time.monotonic()
        self.board.put("interrupted", 1)
        if self.board.run[STOP] != RUNNING:
            self.tell("say", "interrupted: the run is ending already (again to end it at once)")
        elif self.board.get("ready"):
            self._interrupted()
            self.stop("interrupted")
            self.tell("say", "interrupted: ending in order, with a last checkpoint (again to end at once)")
        else:  # nothing has been trained, so there is nothing to save
            self._interrupted()
            self.end_all()

    def _interrupted(self) -> None:
        """The run ends short of its goal."""
        self.outcome.interrupted = True
        self.outcome.stopped = self.outcome.stopped or "interrupted"

    def start(self, child: Child) -> None:
        """Start the process of a role, here or on the node that has it."""
        if not self.elsewhere.start(child):
            self.processes.start(child, self.launched.context, self._leave)

    def _leave(self) -> None:
        """In the process of a new role: close what belongs to the supervisor alone."""
        self.elsewhere.close()
        if self._store is not None:
            self._store.close()

    def heard(self, child: Child, message: Message) -> None:
        """Take a message of a role."""
        outcome = self.outcome
        for kind, content in message.items():
            outcome.note(kind, content)
            match kind:
                case "say" | "notice":
                    self.tell(kind, content)
                case "print":
                    self._printed(child, *content)
                case "warn":
                    self.warn(content)
                case "record":
                    if "loss" in content:
                        self.metrics = {k: v for k, v in content.items() if k not in ("update", "seconds")}
                    self.directory.append_history(content)
                case "failure":
                    child.failure = content
                case "error" if outcome.error is None:
                    outcome.error = error_of(content)
                    self.stop("", FAILED)

    def _printed(self, child: Child, stream: str, text: str) -> None:
        """A script has printed a line to `out` or `err`, or drawn its progress `bar`."""
        chief = child.part.kind == "chief"
        if chief or stream != "bar":
            self.tell(stream, text if chief else f"{child.part}: {text}")

    def warn(self, text: str) -> None:
        """A warning that is kept in the result too."""
        self.outcome.warnings.append(text)
        self.tell("warn", text)

    def fail(self, error: PacelineError) -> None:
        """End the run with an error."""
        self.outcome.error = error
        self.stop("", FAILED)

    def ended(self, child: Child, code: int, peak_rss: int, *, excused: bool = False) -> None:
        """A process has ended with an exit code, here or on another node."""
        self.outcome.peak_rss = max(self.outcome.peak_rss, peak_rss)
        if code == 0 or self.over:
            self.finished(child)
        else:
            self.died(child, code, excused=excused)

    def finished(self, child: Child) -> None:
        """A role has ended for good."""
        child.done = True
        for rank in ranks(child.part, self.plan):
            self.board.alive[rank] = 0
            self.board.gone[rank] = 1
            self.board.state[rank] = DONE
        self.wakeup.ring_all()

    def died(self, child: Child, code: int, lost: str = "", *, excused: bool = False) -> None:
        """A process has died: the others are told at once, and it is restarted. `lost`: why the memory that it worked
        on is gone with it. `excused`: it was asked to end, which `--restarts` does not count."""
        if self.asked.count > 1:  # the second signal may have killed it too; all are killed at the next look
            self.finished(child)
            return
        part, recovery = child.part, self.recovery
        cause = lost or (f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}")
        had_finished = recovery.had_finished(part)
        afresh = recovery.died_before_joining(part, away=excused or bool(lost))
        together = not had_finished and not afresh and recovery.sets_all_back(part)
        recovery.take_back_words(part, awaited=together or afresh)
        self.launched.raise_alarm()
        if had_finished:
            self.finished(child)
            return
        if part.kind == "evaluator" and not lost and self.outcome.error is None:
            self._postpone(child, child.failure or cause)
            return
        torn = together or (bool(lost) and recovery.lost_with(part)) or recovery.torn(part)
        if not self._may_restart(child, code, cause, torn, excused):
            self.finished(child)
            self.stop("", FAILED)
            return
        self._count_restart(child)
        if torn:
            if self.board.run[STOP] == STOPPING:
                self._lost_last = part
            try:
                recovery.go_back(part, lost, self.children)
            except RunError as error:
                self.fail(error)
                self.finished(child)
                return
        if not afresh:
            recovery.restore_absent(part)
        self.tell("warn", f"{part}: {cause}" if lost else f"{part} died ({cause}); restarting it")
        self.wakeup.ring_all()
        self.start(child)

    def _may_restart(self, child: Child, code: int, cause: str, torn: bool, excused: bool) -> bool:
        """Whether a role is restarted after its death; else the run has its error."""
        part, allowed = child.part, self.plan.restarts
        if code > 0 and self.outcome.error is None:
            self.outcome.error = RunError(f"{part} ended with {cause}; see logs/{part.file}.log")
        if code > 0 or self.board.run[STOP] == FAILED:
            return False
        if excused or (number := self.recovery.deaths_in_a_row(child, torn)) <= allowed:
            return True
        how = f"{number} times in a row without any progress between" if number > 1 else "once"
        self.outcome.error = RunError(
            f"{part} died by {cause} {how}; --restarts allows {allowed}; see logs/{part.file}.log"
        )
        return False

    def _count_restart(self, child: Child) -> None:
        child.restarts += 1
        self.board.put("restarts", self.board.get("restarts") + 1)

    def _postpone(self, child: Child, cause: str) -> None:
        """An evaluator has died. Training continues without it: it is restarted after a pause, which grows as long as
        it evaluates nothing. After the stop there are as many more tries as `--restarts` allows."""
        progress = progress_of(child.part, self.plan, self.board)
        ending = self.board.run[STOP] != RUNNING
        child.in_a_row = 1 if progress > child.progress.get(ending, 0) else child.in_a_row + 1
        if ending and ending not in child.progress:
            child.in_a_row = 1
        child.progress[ending], child.failure = progress, ""
        if ending and child.in_a_row > self.plan.restarts:
            self.tell("warn", f"evaluator died ({cause}); the last checkpoint is not evaluated")
            self.outcome.warnings.append(f"the last checkpoint is not evaluated: the evaluator died ({cause})")
            self.finished(child)
            return
        self._count_restart(child)
        pause = min(FIRST_PAUSE * 2 ** min(child.in_a_row - 1, 20), LONGEST_PAUSE)
        child.starts_at = time.monotonic() + pause
        self.tell("warn", f"evaluator died ({cause}); restarting it in {pause:g} s; training continues")

    def _start_postponed(self) -> None:
        for child in self.children:
            soon = self.board.run[STOP] != RUNNING
            if child.starts_at and not child.done and (soon or time.monotonic() >= child.starts_at):
                child.starts_at = 0.0
                self.start(child)

    def _limits(self) -> None:
        """Stop the run when its time is up; kill processes that hang."""
        board, now, patience = self.board, time.monotonic(), self.plan.patience
        if self.plan.seconds is not None and board.get("first_step"):
            trained = now - board.get("first_step") / 1e9
            if trained >= self.plan.seconds:
                self.stop(f"{self.plan.seconds:g} seconds have passed")
        if board.run[STOP] != RUNNING or self._halted:
            late = self._late(now)
            hanging = self._patience.hanging(late) if board.run[STOP] != FAILED and not self.outcome.interrupted else []
            self._kill_hanging(hanging, "at the end of the run")  # its successor can still end the run in order
            if late and not hanging:
                self.end_all(late)
        elif not self.plan.script:  # before its training a script may take any time
            self._kill_hanging(self._patience.stuck_at_start(self.children, now, patience), "before its first step")
        if self._patience.preparing(self.processes.running, now):
            self.launched.raise_alarm()
        for child, seconds in self._patience.stopped(self.processes.running, now):
            self.launched.raise_alarm()
            if seconds > patience:
                self.tell("warn", f"{child.part} has been stopped for {patience:g} s; killing it")
                self.processes.kill(child)

    def _kill_hanging(self, hanging: Iterable[Child], when: str) -> None:
        for child in hanging:
            self.tell("warn", f"{child.part} hangs: no progress for {self.plan.patience:g} s {when}; killing it")
            self.processes.kill(child)

    def _late(self, now: float) -> list[Child]:
        """Processes that do not end. After an error all have `patience` to end; otherwise they may take any time as
        long as they work. After an interrupt the last evaluation gets no more than `patience`."""
        patience, left = max(self.plan.patience, 1.0), [child for child in self.children if not child.done]
        if self.board.run[STOP] == FAILED:
            self._failed_at = self._failed_at or now
            return left if now - self._failed_at > patience else []
        if self.outcome.interrupted and self.outcome.result is not None:
            return left if now - self._asked_at > patience else []
        exempt = [child for child in left if self._takes_its_time(child)]
        return self._patience.stuck_at_end(self.children, now, patience, exempt)

    def _takes_its_time(self, child: Child) -> bool:
        """The last evaluations of evaluator and chief, and a script after its training, have no time limit."""
        board, kind = self.board, child.part.kind
        trained = kind in ("chief", "worker") and bool(self.plan.script and board.gone[child.part.index])
        closing = bool(board.get("closing")) and not self.outcome.interrupted
        return kind == "evaluator" or trained or (closing and kind in ("chief", "server"))

    def end_all(self, late: Iterable[Child] = ()) -> None:
        """Kill every process that is left. `late`: those that did not end in time."""
        self.over = True
        names = ", ".join(str(child.part) for child in late)
        if names and self.outcome.error is None:
            text = f"{names} did not end: no progress for {self.plan.patience:g} s after the stop; killed"
            if self.outcome.interrupted:
                self.tell("warn", text)
            else:
                self.outcome.error = RunError(text)
        self.elsewhere.kill_all()
        for _, _, peak_rss in self.processes.kill_all(self.heard):
            self.outcome.peak_rss = max(self.outcome.peak_rss, peak_rss)
        for child in self.children:
            child.done = True
