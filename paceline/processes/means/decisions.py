"""Who takes part in a mean: the lowest living member of a group decides, and writes it to its row of the board."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

from paceline.errors import SchemeError
from paceline.ops import Mean
from paceline.processes.means.mean_form import SharedMean
from paceline.processes.memory.board import fence
from paceline.processes.memory.run_memory import RunMemory
from paceline.runs.order_log import OrderLogWriter, RecordKind

Readers = tuple[tuple[int, ...], list[int]]  # workers that may read a vector; by rank, the number of the mean


def gives_cells(memory: RunMemory, rank: int, other: int, members: Sequence[int]) -> bool:
    """Whether a restarted worker (`other`) may copy the cells of this one, which waits for a mean among these members.
    A living member that the scheme prefers may still be at an earlier step, where it waits for the restarted worker:
    then that member gives its cells there."""
    board = memory.board
    for near in memory.scheme.donors(other, memory.plan.workers):
        if near == rank:
            return True
        if near in members and board.alive[near] and not board.parted[near] and board.t[near] < board.t[rank]:
            return False
    return True


class Decisions:
    """One worker's view of all decisions, and its own."""

    def __init__(self, memory: RunMemory, rank: int) -> None:
        self.memory, self.rank, self._board, self._wakeup = memory, rank, memory.board, memory.wakeup
        self._hold = memory.plan.quorum == "hold"
        self._workers = memory.plan.workers
        self._nobody = bytes(memory.board.joining.nbytes)
        self._all_alive = array("q", [1] * self._workers).tobytes()
        self._column = memory.board.joint_column(rank)
        self._asleep = memory.board.sleeping[: self._workers]
        # the last mean, if all workers took part and this one, the lowest of them, decided it
        self.last: SharedMean | None = None
        self.journal: OrderLogWriter | None = None

    def all_alive(self) -> bool:
        return self._board.alive.tobytes() == self._all_alive

    def decided(self, meeting: SharedMean) -> bool:
        """Whether a decision counts this worker in. No two means of a worker have the same number."""
        number, first, valid, column = meeting.number, meeting.form.members[0], self._board.row_valid, self._column
        age = valid[first]
        if 0 < age <= number and column[first] == number + 1 - age and valid[first] == age:
            meeting.lead = first
            return True
        ages, numbers = valid.tolist(), column.tolist()
        for d in meeting.form.members:
            if 0 < ages[d] <= number and numbers[d] == number + 1 - ages[d] and valid[d] == ages[d]:
                meeting.lead = d
                return True
        return False

    def decide(self, meeting: SharedMean) -> bool:
        """If this worker is to decide, and all members have arrived: write which members take part."""
        board, rank, form, missing = self._board, self.rank, meeting.form, meeting.missing
        members = form.members
        if form.position and rank != self._decider(meeting):
            return False  # a lower one decides
        if meeting.step is None and self._all_here_again(meeting):
            return True
        if self._take_in(meeting):
            return False
        if missing >= 0 and self._absent(missing, meeting):
            return False
        present = self._present(meeting)
        if present is None or self._read_by_others():
            return False
        shapes, numbers = board.at_shape.tolist(), board.at_seq.tolist()
        if len({shapes[other] for other in present}) > 1:
            raise SchemeError("a mean of vectors of different lengths")
        if self.journal is not None and (len(present) < len(members) or len({numbers[r] for r in present}) > 1):
            self.journal.text(RecordKind.DECIDED, {str(other): numbers[other] for other in present})
        board.row_valid[rank] = 0
        meeting.row = [numbers[r] if r in present else 0 for r in range(self._workers)]
        board.joint[rank][:] = array("q", meeting.row)
        board.row_valid[rank] = 1
        board.held[rank] = 0
        meeting.lead = rank
        usual = form.everybody and form.kind is Mean and rank == members[0] and len(present) == len(members)
        self.last = meeting if usual else None
        self.wake([other for other in present if other != rank])
        return True

    def _decider(self, meeting: SharedMean) -> int:
        """The lowest living member. A restarted worker may be past the step of a meeting, which it will not decide."""
        alive, rank = self._board.alive, self.rank
        return next((r for r in meeting.form.members if r == rank or (alive[r] and not self._past(r, meeting))), rank)

    def _past(self, other: int, meeting: SharedMean) -> bool:
        """Whether a worker has finished the step of a meeting. Until a worker has returned to the checkpoint like this
        one, its step on the board is of before the return, and says nothing."""
        board, step = self._board, meeting.step
        return step is not None and board.t[other] > step and board.followed[other] == meeting.form.generation

    def _all_here_again(self, meeting: SharedMean) -> bool:
        """The usual case, decided in few steps: all workers took part in this worker's last mean, they live, and each
        has arrived at its next mean, with a vector of the same shape. Then all have read the last decision, and no
        other worker can have decided."""
        last, form, board = self.last, meeting.form, self._board
        if last is None or last.number + 1 != meeting.number or last.form.key != form.key:
            return False
        row = [number + 1 for number in last.row]
        # in this order: a worker that is restarted takes back what its predecessor has finished, then writes its key
        if board.at_key.tolist() != form.keys or board.at_seq.tolist() != row or board.finished.tolist() != last.row:
            return False
        if not self.all_alive() or board.at_shape.tolist() != form.shapes:
            return False
        if row.count(meeting.number) != len(row) and self.journal is not None:
            self.journal.text(RecordKind.DECIDED, {str(other): number for other, number in enumerate(row)})
        board.row_valid[self.rank] += 1
        board.held[self.rank] = 0
        meeting.lead, meeting.row, self.last = self.rank, row, meeting
        self.wake(form.others)
        return True

    def _absent(self, other: int, meeting: SharedMean) -> bool:
        """Whether a living member is at no mean; one that is at another group's is not told apart here."""
        board = self._board
        waited_for = board.alive[other] and not board.parted[other] and not self._past(other, meeting)
        return bool(waited_for and board.at_seq[other] <= board.finished[other])

    def _present(self, meeting: SharedMean) -> list[int] | None:
        """The members that take part; None if one that is waited for has not arrived."""
        board, members = self._board, meeting.form.members
        # in this order: a worker that is restarted takes back what its predecessor has finished, then writes its key
        keys, numbers, finished = board.at_key.tolist(), board.at_seq.tolist(), board.finished.tolist()
        rows = [self.row(d) for d in members if board.row_valid[d]]
        alive, present = board.alive.tolist(), []
        for other in members:
            here = keys[other] == meeting.key and numbers[other] > finished[other]
            waited_for = alive[other] or (self._hold and not self._comes_later(other))
            if here and waited_for and not any(row[other] == numbers[other] for row in rows):
                present.append(other)
            elif waited_for and not board.parted[other] and not self._past(other, meeting):
                meeting.missing = other
                return None
        return present

    def _comes_later(self, other: int) -> bool:
        """Without a server: whether a restarted worker can be taken in at the next step only, because this mean is not
        the first of its step: it waits for the cells of a worker that is at a first one."""
        board = self._board
        return bool(board.joining[other] and not board.first_await[self.rank] and not self.memory.scheme.methods)

    def row(self, lead: int) -> list[int]:
        """A worker's decision: by rank, the numbers of the means of those that take part, 0 of others."""
        more = self._board.row_valid[lead] - 1
        return [number and number + more for number in self._board.joint[lead].tolist()]

    def still_reading(self, readers: Readers) -> Readers | None:
        """The workers of these that have not finished the mean."""
        ranks, row = readers
        finished, alive = self._board.finished, self._board.alive
        left = tuple([r for r in ranks if finished[r] < row[r] and alive[r]])
        return (left, row) if left else None

    def _read_by_others(self) -> bool:
        """Whether members of this worker's last decision still read the decision, or its sum."""
        board, rank = self._board, self.rank
        row = self.row(rank)
        readers: Readers = (tuple(r for r, number in enumerate(row) if number and r != rank), row)
        if self.still_reading(readers) is None:
            return False
        board.held[rank] = 1  # they wake this worker when they have finished
        fence()
        return self.still_reading(readers) is not None

    def _take_in(self, meeting: SharedMean) -> bool:
        """Without a server: let restarted workers copy this worker's cells while it waits here."""
        board = self._board
        if board.joining.tobytes() == self._nobody or self.memory.scheme.methods or not board.first_await[self.rank]:
            return False
        members = meeting.form.members
        waiting = [r for r in members if board.joining[r] and gives_cells(self.memory, self.rank, r, members)]
        for other in waiting:
            if board.grant[other] != 1 + self.rank:
                board.grant[other] = 1 + self.rank
                self._wakeup.ring(other)
        return bool(waiting)

    def wake(self, ranks: Iterable[int]) -> None:
        """Wake those of some workers that sleep."""
        fence()
        if self._asleep.tobytes() != self._nobody:
            self._wakeup.ring_those(ranks)

    def wake_decider(self, meeting: SharedMean) -> None:
        """Wake the member that decides, if it sleeps and this worker is the last that it waits for."""
        alive, sleeping, step = self._board.alive, self._board.sleeping, meeting.step
        if step is not None and not meeting.form.everybody:  # some may wait for this worker at a past step
            self._wakeup.ring_those([r for r, t in enumerate(self._board.t) if t < step and alive[r]])
        decider = self._decider(meeting)
        if decider == self.rank or not sleeping[decider]:
            return
        if not any(self._absent(r, meeting) for r in meeting.form.members if alive[r]):
            self._wakeup.ring(decider)
