"""How a run is repaired after a process has died: what is lost with it, and what the others return to."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from paceline.errors import DataError, RunError
from paceline.processes.memory import snapshot
from paceline.processes.memory.board import RUNNING, STARTING, STEPPING, STOP
from paceline.processes.roles import recorder
from paceline.processes.roles.roles import Role, places, ranks
from paceline.processes.supervisor.children import Child, progress_of
from paceline.processes.supervisor.launch_memory import LaunchMemory
from paceline.runs import checkpoint
from paceline.runs.checkpoint import Checkpoint
from paceline.runs.run_directory import RunDirectory


class Recovery:
    """Reads and mends the words of processes that have died."""

    def __init__(self, launched: LaunchMemory, directory: RunDirectory, tell: Callable[[str, str], None]) -> None:
        self._launched, self._directory, self._tell = launched, directory, tell
        self.restored: Checkpoint | None = None  # the checkpoint that the run last returned to

    def take_back_words(self, part: Role, *, awaited: bool) -> None:
        """Reset the words on the board that a dead process can no longer reset itself. `awaited`: the others wait until
        its successor is there."""
        board = self._launched.board
        for rank in ranks(part, self._launched.plan):
            board.alive[rank] = int(awaited)
            board.at_key[rank] = board.joining[rank] = board.grant[rank] = 0
            board.lost[rank] = board.life[rank]
            if awaited:  # it no longer reads the vectors of others
                board.finished[rank] = board.at_seq[rank]
            board.state[rank], board.work[rank] = STARTING, STEPPING
            board.sleeping[rank] = board.reading[rank] = 0
        if part.kind == "server":
            board.server_state[part.index] = STARTING
            board.sleeping[board.server_place(part.index)] = 0

    def died_before_joining(self, part: Role, *, away: bool) -> bool:
        """Whether a worker died before it took part: its successor starts as it would have started, and the others,
        which wait for it, need not be told. `away`: its node is gone, or cannot reach a server, so it may be long until
        it is back; then they wait only if the plan makes them wait."""
        plan, mine = self._launched.plan, ranks(part, self._launched.plan)
        waited_for = not away or plan.exact or plan.quorum == "hold"
        return bool(mine) and waited_for and not any(self._launched.board.begun[rank] for rank in mine)

    def had_finished(self, part: Role) -> bool:
        """Whether a process died after all its work was done."""
        plan, board = self._launched.plan, self._launched.board
        if plan.script:
            return False  # the script may still have work to do after its training
        if part.kind == "worker":
            return all(board.gone[rank] for rank in ranks(part, plan))
        return part.kind == "chief" and bool(board.get("over"))

    def sets_all_back(self, part: Role) -> bool:
        """Whether the death of a worker sends every process back to the checkpoint: an exact run resumes from one step
        of all workers. While the run ends, or before it has begun, it does not."""
        board = self._launched.board
        if not self._launched.plan.exact or part.kind not in ("chief", "worker") or not board.get("ready"):
            return False
        if board.run[STOP] != RUNNING:
            board.put("uncut", 1)
            return False
        return True

    def holds_state(self, part: Role) -> bool:
        """Whether the run cannot continue without the memory of a process: it is a server, or a worker that sends
        messages, of which others wait for an answer, and which has its own part of what is conserved."""
        return part.kind == "server" or (part.kind == "worker" and self._launched.scheme.sends_messages())

    def lost_with(self, part: Role) -> bool:
        """Whether every process returns to the checkpoint because the memory of this one is gone."""
        ending = part.kind != "server" and self._launched.board.run[STOP] != RUNNING
        return self.holds_state(part) and not ending

    def torn(self, part: Role) -> bool:
        """Whether a dead process may have left the state of a server half changed: it died inside a call, or it was a
        server that had ordered a call for the other servers and not performed it itself."""
        board = self._launched.board
        if not self._launched.opened():
            return False
        if self._launched.memory.locked_calls():  # the calling worker performs the call
            inside = board.get("inside") - 1
            if board.mark[0] % 2 and inside in places(part, self._launched.plan):
                return True
            return any(board.copying[rank] for rank in ranks(part, self._launched.plan))  # rows of its last call
        if part.kind != "server":
            return False
        ahead = part.index == 0 and board.servers > 1 and board.get("ordered") != board.performed[0]
        return bool(board.mark[part.index] % 2 or ahead)

    def deaths_in_a_row(self, child: Child, torn: bool) -> int:
        """Count a death; gives how many there were without progress between them."""
        launched = self._launched
        progress = progress_of(child.part, launched.plan, launched.board)
        if torn:  # all progress since the checkpoint is lost
            progress = launched.board.get("checkpoint")
        child.in_a_row = 1 if progress > child.progress.get(torn, 0) else child.in_a_row + 1
        child.progress[torn] = progress
        return child.in_a_row

    def go_back(self, part: Role, lost: str, children: Iterable[Child]) -> None:
        """Send every process back to the newest checkpoint; RunError if there is none."""
        launched, board = self._launched, self._launched.board
        what = f"{part} died" + (" inside a call" if self.torn(part) and not lost else "")
        try:
            saved = checkpoint.newest(self._directory.checkpoints, lambda text: self._tell("warn", text))
        except DataError as error:
            raise RunError(f"{what}, and {error}") from None
        if saved is None:
            raise RunError(f"{what}, and there is no checkpoint to return to")
        wasted = max(launched.updates() - saved.step, 0)
        board.put("rolled_back", board.get("rolled_back") + wasted)
        board.put("restore", saved.step)
        board.put("checkpoint", saved.step)
        recorder.keep_return(launched.plan, board.get("generation") + 1, saved.path)
        board.put("generation", board.get("generation") + 1)
        for rank in ranks(part, launched.plan):  # after the generation: who waits for these rows must not go on
            board.copying[rank] = 0
        self.restored = saved
        for child in children:  # a process that starts later is of the new generation: it does not return by itself
            child.progress.pop(False, None)
            if not child.done and any(not board.alive[rank] for rank in ranks(child.part, launched.plan)):
                self.restore_absent(child.part)
        self._tell(
            "warn", f"{what}: returning to the checkpoint of update {saved.step:,} ({wasted:,} updates are lost)"
        )
        launched.wakeup.ring_all()

    def restore_absent(self, part: Role) -> None:
        """Set back the cells of a worker that died before it had followed the others to the checkpoint. A worker on
        another node, or on a GPU, does it itself when it starts."""
        board, generation = self._launched.board, self._launched.board.get("generation")
        if self.restored is not None and self._launched.memory.on_gpu:
            return
        for rank in ranks(part, self._launched.plan):
            if board.parted[rank]:  # the chief sets back its last part together with the servers'
                continue
            if self.restored is not None and not board.alive[rank] and board.followed[rank] != generation:
                snapshot.restore_worker(self._launched.memory, rank, self.restored)
                if self._launched.memory.beside(rank):
                    board.followed[rank] = generation
