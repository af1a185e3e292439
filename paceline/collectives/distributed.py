"""Means over workers in any number of places, by connections: the interface and the bits of `SharedMeans`.

As long as nobody comes or goes, a mean is one or two operations of a group and nothing else. When somebody does, those
who are left form another one (assembly.py), and go on with the mean at which they stand.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from paceline.collectives import circle as circles
from paceline.collectives.assembly import Assembly, Meeting
from paceline.collectives.circle import Circle
from paceline.collectives.group import Broken, Header
from paceline.errors import RunError, SchemeError
from paceline.journal import DECIDED, MEAN
from paceline.ops import Mean
from paceline.seeds import mixed
from paceline.state import Vector, mean_into
from paceline.transports.shared import Stopped

EVERYBODY = 1


class DistributedMeans(Assembly):
    """One worker's side of all means."""

    # what the session calls

    def mean(self, op: Mean, *, first: bool) -> Vector:
        """Arrive, wait for the others, and give the mean. `first`: it is the first that this step awaits."""
        return self.leave(self._arrived(op, first=first))

    def arrive(self, op: Mean, *, first: bool) -> Meeting:
        """The exchange begins now, if the group stands, and proceeds while this worker does something else; `leave`
        does what is left."""
        meeting = self._arrived(op, first=first)
        if meeting.group is not None:
            meeting.group.carry_on()
        return meeting

    def _arrived(self, op: Mean, *, first: bool) -> Meeting:
        board, rank = self._board, self.rank
        workers = self._everybody if op.among is None else tuple(sorted(op.among))
        if rank not in workers:
            raise SchemeError(f"worker:{rank} asks for a mean among {op.among}, where it is not a member")
        if self._open is not None:
            raise SchemeError(f"worker:{rank} started a mean while its last one is open")
        v = op.v.reshape(-1)
        v = v if self._backend == "nccl" else v.cpu()
        number = board.at_seq[rank] + 1
        if self.journal is not None:
            self.journal.add(MEAN, number)
            self.journal.flush()
        circle = self._circle(workers, op.among is None)
        meeting = Meeting(op, v, number, first, circle)
        key = EVERYBODY if op.among is None else mixed("mean", *workers) >> 1 | 2
        board.at_key[rank] = key ^ self.generation << 2
        board.at_shape[rank] = 0  # as long as the number of the mean is not known
        board.first_await[rank] = first
        board.finished[rank] = number - 1
        board.at_seq[rank] = number
        self._open = meeting
        if self._settled(meeting) and meeting.shape in circle.groups:
            self._begin(meeting)
        return meeting

    def leave(self, meeting: Meeting) -> Vector:
        """Wait until the mean is there, and take it."""
        circle = meeting.circle
        while meeting.result is None:
            try:
                if meeting.exchange is None and not self._settled(meeting):
                    self._assemble(circle, meeting)
                    continue  # it may have brought the result
                if meeting.exchange is None:
                    self._begin(meeting)
                self._complete(meeting)
            except Broken:
                meeting.exchange = meeting.group = None
                circle.bury()
        self._board.finished[self.rank] = meeting.number
        self._open = None
        return meeting.result.view(meeting.op.v.shape).to(meeting.op.v.device)

    def forget(self) -> None:
        """The step was abandoned: this worker stands at no mean, and in no group."""
        self._board.at_key[self.rank] = 0
        self._board.finished[self.rank] = self._board.at_seq[self.rank]
        self._open = None
        self._assembling.clear()
        for circle in self._circles.values():
            circle.bury()
        self._circles.clear()

    def returned(self, place: int) -> bool:
        """Whether nobody reads any more what lies there: others only ever get copies."""
        return True

    def step_aside(self) -> None:
        """This worker is away for a while: for the others its life has ended, and when it is back it is a new one."""
        self.forget()
        self._board.lost[self.rank], self.life = self.life, self.life + 1
        self._board.life[self.rank] = self.life

    def wait(self, ready: Callable[[], bool], seconds: float) -> None:
        """Wait for something else, at most `seconds` after other workers have last wanted something of this one."""
        while self._bells.wait(lambda: ready() or self.rung(), seconds) and not ready():
            self.answer()

    def rung(self) -> bool:
        """Whether somebody has put something down in the store since this worker last looked."""
        return sum(self._board.called) != self._heard

    def answer(self) -> None:
        """See whether it was for this worker, and take part in forming a group whose mean it is not waiting for."""
        self._heard = sum(self._board.called)
        for circle in list(self._circles.values()):
            if not self._invites(self._record(circle), circle):
                continue
            if circle in self._assembling or (self._open is not None and self._open.circle is circle):
                circle.called = True
            else:
                self._assemble(circle, None)

    def invited(self) -> int | None:
        """For a worker that is back: the rank whose cells it goes on with, once they lie in its own."""
        self._heard = sum(self._board.called)
        circle = self._circle(self._everybody, True)
        try:
            if self._invites(self._record(circle), circle) and self._assemble(circle, None, new=True):
                return self.rank
        except Stopped:
            pass  # which the caller sees for itself
        return None

    # a mean in a group that stands

    def _settled(self, meeting: Meeting) -> bool:
        """Whether the mean can be begun in the group as it is."""
        circle, board = meeting.circle, self._board
        if self.rung():
            self.answer()
        unsettled = circle.called or (circle.joiner is not None and meeting.first)
        if not circle.attempt or unsettled or circles.lost(board, circle.members, self.rank):
            return False
        waits = meeting.first and len(circle.members) == 1 and self._joiner(circle) is not None
        return not waits and not circles.parted(board, circle.members)

    def _begin(self, meeting: Meeting) -> None:
        circle = meeting.circle
        if len(circle.members) == 1:
            return
        index = (circle.done or 0) + 1
        self._board.at_shape[self.rank] = circles.shape_word(index, meeting.shape)
        if meeting.shape not in circle.groups:
            self._another_shape(circle, meeting)
        joiner = self._joiner(circle) or (-1, 0)
        header = Header(index, meeting.number, meeting.op.weight, joiner[0] + 1, joiner[1], meeting.shape)
        meeting.group = circle.groups[meeting.shape]
        meeting.exchange = meeting.group.start(meeting.v, header)

    def _joiner(self, circle: Circle) -> tuple[int, int] | None:
        """A worker that waits to be taken in: where there is no server, it needs the cells of another."""
        board = self._board
        if self._serverless and any(board.joining):
            for rank in circle.workers:
                life = board.life[rank]
                if board.joining[rank] and life > board.lost[rank] and circle.members.get(rank) != life:
                    return rank, life
        return None

    def _complete(self, meeting: Meeting) -> None:
        circle, group, v = meeting.circle, meeting.group, meeting.v
        if group is None or meeting.exchange is None:  # alone
            result = torch.empty_like(v)
            mean_into(result, [v], [meeting.op.weight])
            self._had(meeting, result, {str(self.rank): meeting.number})
            return
        self._await(meeting.exchange, circle)
        headers = group.headers()
        if len({header.index for header in headers}) > 1:
            raise RunError(f"worker:{self.rank} is at a mean with others that are at another: {headers}")
        weights = [header.weight for header in headers]
        if group.small:
            result = group.small_mean(v, weights)
        else:
            self._await(group.start_second(weights), circle)
            result = group.large_mean(v)
        joiners = [(header.joiner - 1, header.joiner_life) for header in headers if header.joiner]
        circle.joiner = max(joiners, default=None)
        took = {str(rank): header.number for rank, header in zip(sorted(circle.members), headers, strict=True)}
        self._had(meeting, result, took)

    def _had(self, meeting: Meeting, result: Vector, took: dict[str, int]) -> None:
        """The mean is there. The log says who took part, before this worker does anything with it."""
        circle = meeting.circle
        if self.journal is not None and circles.told(took, circle.workers):
            self.journal.text(DECIDED, took)
            self.journal.flush()
        circle.done = (circle.done or 0) + 1
        circle.kept, circle.took = result, took
        meeting.result = result.clone()
