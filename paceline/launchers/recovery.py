"""What a launcher knows of its crew, and how it puts a run right that somebody has died in."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from paceline import checkpoint, snapshots
from paceline.board import FAILED, STARTING, Bells, Board
from paceline.checkpoint import Checkpoint
from paceline.control import Listener
from paceline.directory import RunDirectory
from paceline.errors import DataError, PacelineError, RunError
from paceline.plan import Plan
from paceline.role import Part
from paceline.scheme import Scheme
from paceline.stage import Stage


@dataclass
class Child:
    """One role and the process that plays it now."""

    part: Part
    pid: int = 0
    listener: Listener | None = None
    restarts: int = 0
    in_a_row: int = 0  # deaths without progress between them
    progress: dict[bool, int] = field(default_factory=dict)  # at its last death outside, inside a call
    done: bool = False
    frozen: float = 0.0  # since when it has been stopped by a signal


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
    restarts: int = 0
    peak_rss: int = 0  # KiB
    words: dict[str, int] = field(default_factory=dict)


class Recovery:
    """The part of a launcher that mends."""

    plan: Plan
    scheme: Scheme
    board: Board
    bells: Bells
    directory: RunDirectory
    outcome: Outcome
    children: list[Child]
    tell: Callable[[str, str], None]
    _state: int  # the descriptor of the memory for the state
    _stage: Stage | None = None
    _restored: Checkpoint | None = None  # what the run went back to last,
    _returned = 0  # and when, ns

    def stop(self, reason: str, how: int) -> None:
        """Let everybody end in order."""
        raise NotImplementedError

    def _unmask(self, child: Child) -> None:
        """What the dead can no longer take back itself."""
        board, part = self.board, child.part
        if part.kind in ("chief", "worker"):
            rank = part.index
            board.alive[rank] = board.at_key[rank] = board.joining[rank] = board.grant[rank] = 0
            board.state[rank] = STARTING
            board.sleeping[rank] = 0
        elif part.kind == "server":
            board.server_state[part.index] = STARTING
            board.sleeping[board.server_place(part.index)] = 0

    def _had_finished(self, part: Part) -> bool:
        """Whether it died on its very last way out, with all its work done."""
        board = self.board
        if self.plan.script:
            return False  # what the script does after its training may not be done yet
        if part.kind == "worker":
            return bool(board.gone[part.index])
        return part.kind == "chief" and bool(board.get("over"))

    def _torn(self, shard: int) -> bool:
        """Whether a dead server may have left its part half changed: inside a call, or with one put in order for the
        others that it has not performed itself."""
        board = self.board
        ahead = shard == 0 and board.servers > 1 and board.get("ordered") != board.performed[0]
        return bool(board.mark[shard] % 2 or ahead)

    def _went_back(self, part: Part) -> bool:
        """Have everybody go back to the newest checkpoint; False if there is none."""
        board, shard = self.board, part.index
        try:
            saved = checkpoint.newest(self.directory.checkpoints, lambda text: self.tell("warn", text))
        except DataError as error:
            saved, cause = None, str(error)
        else:
            cause = "there is no checkpoint to go back to"
        if saved is None:
            self.outcome.error = RunError(f"server:{shard} died inside a call, and {cause}")
            self.stop("", FAILED)
            return False
        lost = max(self.updates() - saved.step, 0)
        board.put("rolled_back", board.get("rolled_back") + lost)
        board.put("restore", saved.step)
        board.put("checkpoint", saved.step)
        board.put("generation", board.get("generation") + 1)
        self._returned, self._restored = time.monotonic_ns(), saved
        for child in self.children:  # who comes back later is of the new generation and will not go back itself
            child.progress.pop(False, None)
            if not child.done and child.part.kind in ("chief", "worker") and not board.alive[child.part.index]:
                self._restore_absent(child.part)
        self.tell(
            "warn",
            f"server:{shard} died inside a call: going back to the checkpoint of update {saved.step:,} "
            f"({lost:,} updates are lost)",
        )
        self.bells.ring_all()
        return True

    def _restore_absent(self, part: Part) -> None:
        """A worker that died before it had followed the others back: its cells are still those from before."""
        trains = part.kind in ("chief", "worker")
        if self._restored is not None and trains and self.board.heard[part.index] < self._returned:
            snapshots.restore_worker(self.stage, part.index, self._restored)

    def opened(self) -> bool:
        """Whether the state can be looked at; the chief lays it out."""
        if self._stage is None and self.board.get("ready"):
            self._stage = Stage(self.plan, self.scheme, self.board, self.bells, self._state)
            self._stage.open()
            self.plan, self.scheme = self._stage.plan, self._stage.first_scheme  # a script has said what it wants
        return self._stage is not None

    @property
    def stage(self) -> Stage:
        assert self._stage is not None
        return self._stage

    def updates(self) -> int:
        """Changes of the centre so far."""
        return self.stage.furthest if self.opened() else 0

    def _progress(self, part: Part) -> int:
        board = self.board
        if part.kind == "server":
            return int(board.performed[part.index])
        if part.kind == "evaluator":
            return int(board.evaluator_words[1])
        return int(board.gradients[part.index])
