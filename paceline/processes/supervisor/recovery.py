"""What a launcher knows of its crew, and how it puts a run right that somebody has died in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from paceline.config.endpoint import ALONE, Endpoint
from paceline.config.plan import Plan
from paceline.errors import DataError, PacelineError, RunError
from paceline.processes.memory import snapshot
from paceline.processes.memory.board import FAILED, RUNNING, STARTING, STOP, Board
from paceline.processes.memory.run_memory import RunMemory
from paceline.processes.memory.wakeup import Wakeup
from paceline.processes.roles import recorder
from paceline.processes.roles.control_channel import Listener
from paceline.processes.roles.main import Role, ranks
from paceline.runs import checkpoint
from paceline.runs.checkpoint import Checkpoint
from paceline.runs.run_directory import RunDirectory
from paceline.scheme import Scheme


@dataclass
class Child:
    """One role and the process that plays it now."""

    part: Role
    pid: int = 0
    listener: Listener | None = None
    restarts: int = 0
    in_a_row: int = 0  # deaths without progress between them
    progress: dict[bool, int] = field(default_factory=dict)  # at its last death outside, inside a call
    done: bool = False
    frozen: float = 0.0  # since when it has been stopped by a signal
    begins: bool = False  # on another node, once that has all it needs
    progress_at_start: int = 0  # of the process that plays it now
    starts_at: float = 0.0  # when it is started again, if not at once
    failure: str = ""  # what an evaluator has said of its error


@dataclass
class Outcome:
    """How it ended."""

    result: dict[str, Any] | None = None
    error: PacelineError | None = None
    stopped: str | None = None
    interrupted: bool = False
    notice: str | None = None
    warnings: list[str] = field(default_factory=list)
    batch: int = 0
    task: str = ""
    history: list[dict[str, Any]] = field(default_factory=list)
    peak_rss: int = 0  # KiB
    words: dict[str, int] = field(default_factory=dict)


class Recovery:
    """The part of a launcher that mends."""

    plan: Plan
    scheme: Scheme
    board: Board
    wakeup: Wakeup
    directory: RunDirectory
    outcome: Outcome
    children: list[Child]
    tell: Callable[[str, str], None]
    _state: int  # the descriptor of the memory for the state
    _node: Endpoint = ALONE
    _memory: RunMemory | None = None
    _restored: Checkpoint | None = None  # what the run went back to last

    def stop(self, reason: str, how: int) -> None:
        """Let everybody end in order."""
        raise NotImplementedError

    def _unmask(self, child: Child, *, awaited: bool) -> None:
        """What the dead can no longer take back itself. `awaited`: the others hold until it is back."""
        board, part = self.board, child.part
        for rank in ranks(part, self.plan):
            board.alive[rank] = int(awaited)
            board.at_key[rank] = board.joining[rank] = board.grant[rank] = 0
            board.lost[rank] = board.life[rank]
            if awaited:  # it reads nobody's vector any more
                board.finished[rank] = board.at_seq[rank]
            board.state[rank] = STARTING
            board.sleeping[rank] = 0
        if part.kind == "server":
            board.server_state[part.index] = STARTING
            board.sleeping[board.server_place(part.index)] = 0

    def _takes_no_part_yet(self, part: Role, lost: str) -> bool:
        """Whether a worker died before it took part: its successor starts as it would have, and the others, who wait
        for it, need not hear of it. Where its node is gone they wait only if they have to."""
        mine = ranks(part, self.plan)
        waited_for = not lost or self.plan.exact or self.plan.quorum == "hold"
        return bool(mine) and waited_for and not any(self.board.begun[rank] for rank in mine)

    def _had_finished(self, part: Role) -> bool:
        """Whether it died on its very last way out, with all its work done."""
        board = self.board
        if self.plan.script:
            return False  # what the script does after its training may not be done yet
        if part.kind == "worker":
            return all(board.gone[rank] for rank in ranks(part, self.plan))
        return part.kind == "chief" and bool(board.get("over"))

    def _all_go_back(self, part: Role) -> bool:
        """Whether a worker's death sets everybody back: an exact run goes on from where all stood at one step. While it
        ends nobody is left to go back; before it has begun there is nothing to go back from."""
        board = self.board
        if not self.plan.exact or part.kind not in ("chief", "worker") or not board.get("ready"):
            return False
        if board.run[STOP] != RUNNING:
            board.put("uncut", 1)
            return False
        return True

    def _torn(self, shard: int) -> bool:
        """Whether a dead server may have left its part half changed: inside a call, or with one put in order for the
        others that it has not performed itself."""
        board = self.board
        ahead = shard == 0 and board.servers > 1 and board.get("ordered") != board.performed[0]
        return bool(board.mark[shard] % 2 or ahead)

    def _went_back(self, part: Role, lost: str = "") -> bool:
        """Have everybody go back to the newest checkpoint; False if there is none."""
        board = self.board
        what = f"{part} died inside a call" if part.kind == "server" and not lost else f"{part} died"
        try:
            saved = checkpoint.newest(self.directory.checkpoints, lambda text: self.tell("warn", text))
        except DataError as error:
            saved, cause = None, str(error)
        else:
            cause = "there is no checkpoint to go back to"
        if saved is None:
            self.outcome.error = RunError(f"{what}, and {cause}")
            self.stop("", FAILED)
            return False
        wasted = max(self.updates() - saved.step, 0)
        board.put("rolled_back", board.get("rolled_back") + wasted)
        board.put("restore", saved.step)
        board.put("checkpoint", saved.step)
        recorder.keep_return(self.plan, board.get("generation") + 1, saved.path)
        board.put("generation", board.get("generation") + 1)
        self._restored = saved
        for child in self.children:  # who comes back later is of the new generation and will not go back itself
            child.progress.pop(False, None)
            if not child.done and any(not board.alive[rank] for rank in ranks(child.part, self.plan)):
                self._restore_absent(child.part)
        self.tell(
            "warn",
            f"{what}: going back to the checkpoint of update {saved.step:,} ({wasted:,} updates are lost)",
        )
        self.wakeup.ring_all()
        return True

    def _restore_absent(self, part: Role) -> None:
        """A worker that died before it had followed the others back: its cells are still those from before. On another
        node it goes back itself, when it begins."""
        board, generation = self.board, self.board.get("generation")
        for rank in ranks(part, self.plan):
            if board.parted[rank]:  # it has put its last part aside, which the chief will set back with the servers'
                continue
            if self._restored is not None and not board.alive[rank] and board.followed[rank] != generation:
                snapshot.restore_worker(self.memory, rank, self._restored)
                if self.memory.beside(rank):
                    board.followed[rank] = generation

    def opened(self) -> bool:
        """Whether the state can be looked at; the chief lays it out."""
        if self._memory is None and self.board.get("ready"):
            self._memory = RunMemory(self.plan, self.scheme, self.board, self.wakeup, self._state, self._node)
            self._memory.open()
            self.plan, self.scheme = self._memory.plan, self._memory.first_scheme  # a script has said what it wants
        return self._memory is not None

    @property
    def memory(self) -> RunMemory:
        assert self._memory is not None
        return self._memory

    def updates(self) -> int:
        """Changes of the centre so far."""
        return self.memory.furthest if self.opened() else 0

    def _progress(self, part: Role) -> int:
        return progress_of(part, self.plan, self.board)


def progress_of(part: Role, plan: Plan, board: Board) -> int:
    """A number that rises with each gradient of a worker, call of a server, evaluation of an evaluator."""
    if part.kind == "server":
        return int(board.performed[part.index])
    if part.kind == "evaluator":
        return int(board.evaluator_words[1])
    return sum(board.gradients[rank] for rank in ranks(part, plan))
