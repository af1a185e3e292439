"""How workers form a group, at first and after each change of its members (decision 13).

One record in the store lists the members. Every member writes its position there: from all positions, all of them
derive the same plan, which names the member that gives the last mean to those that missed it, and the member that
gives its cells to a newcomer. The board says which workers are alive, never a time-out; they wait for wakeups.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline.errors import Deadlock, RunError, SchemeError
from paceline.network.means import group_record as circles
from paceline.network.means.cell_handover import flat, own_cells, size_of, take_cells
from paceline.network.means.group import Broken, Exchange, Group, GroupBuilder, GroupRequest
from paceline.network.means.group_record import GroupPlan, GroupRecord, Lives, MeanGroup, MemberPosition
from paceline.network.means.peer_connections import TROUBLE
from paceline.network.means.rendezvous import Rendezvous
from paceline.ops import Mean, Meet, Met
from paceline.processes.calls.client import Stopped
from paceline.processes.means.decisions import gives_cells
from paceline.processes.memory.board import FAILED, GENERATION, STOP
from paceline.processes.memory.packed_words import empty_of, shape_word
from paceline.processes.memory.run_memory import RunMemory
from paceline.processes.transport import WaitFor
from paceline.state import Vector

if TYPE_CHECKING:
    from paceline.network.means.distributed import Connected
    from paceline.network.means.early_mean import EarlyMean

MOST_GROUPS = 16  # that are kept; a worker with more groups than these forms them again for each mean
LAST = 2.0  # seconds that the rest of a mean may take to come when the run is stopped


class PendingMean:
    """A mean, or a meeting, that this worker has arrived at."""

    def __init__(self, op: Mean | Meet, v: Vector, number: int, first: bool, circle: MeanGroup) -> None:
        self.op, self.v, self.number, self.first, self.circle = op, v, number, first, circle
        self.shape = shape_word(v)
        self.sent: Tensor | None = None  # the payload of a compressed vector, where the group gathers
        self.early: EarlyMean | None = None  # what has been sent of `v` while it was computed
        self.group: Group | None = None
        self.exchange: Exchange | None = None
        self.result: Vector | None = None
        # of a meeting: what this worker has got. It counts when all members have said that they have theirs: one that
        # goes on never leaves another behind without its vectors
        self.met: Met | None = None


# what is done when a mean is there: the mean, and at which of its own means each member took part in it
Taken = Callable[[PendingMean, Vector, dict[str, int]], None]


class GroupFormation:
    """One worker's groups, and its part in forming them."""

    def __init__(
        self,
        memory: RunMemory,
        rank: int,
        wait_for: WaitFor,
        maker: Connected,
        rendezvous: Rendezvous,
        had: Taken,
    ) -> None:
        self.memory, self.rank, self._wait_for = memory, rank, wait_for
        self._board, self._wakeup = memory.board, memory.wakeup
        self._maker, self._had, self._rendezvous = maker, had, rendezvous
        self.on_gpu = maker.device == "cuda"
        self._hold = memory.plan.quorum == "hold"
        self._store = rendezvous.store
        self._circles: dict[str, MeanGroup] = {}
        self._uses = 0
        self._heard = 0  # wakeups by changes in the store, when this worker last looked
        self.open: PendingMean | None = None
        self._assembling: list[MeanGroup] = []

    def circle(self, workers: tuple[int, ...], everybody: bool, generation: int) -> MeanGroup:
        key = f"{generation}/{'all' if everybody else '-'.join(map(str, workers))}"
        circle = self._circles.setdefault(key, MeanGroup(key, workers, generation))
        self._uses += 1
        circle.used = self._uses
        return circle

    def rung(self) -> bool:
        """Whether the store has changed since this worker last looked."""
        return self._rendezvous.changes() != self._heard

    def answer(self) -> None:
        """If the change concerns this worker, help to form a group whose mean it is not waiting for."""
        self._heard = self._rendezvous.changes()
        for circle in list(self._circles.values()):
            if not self._invites(self._record(circle), circle):
                continue
            if circle in self._assembling or (self.open is not None and self.open.circle is circle):
                circle.called = True
            else:
                self.assemble(circle, None)

    def invited(self, circle: MeanGroup) -> bool:
        """Whether a worker that is back has been taken into a group, and has the cells of another member."""
        self._heard = self._rendezvous.changes()
        return self._invites(self._record(circle), circle) and self.assemble(circle, None, new=True)

    def forget(self) -> None:
        """The step was abandoned: this worker is at no mean and in no group."""
        self.open = None
        self._assembling.clear()
        for circle in self._circles.values():
            circle.bury()
        self._circles.clear()

    def assemble(self, circle: MeanGroup, meeting: PendingMean | None, *, new: bool = False) -> bool:
        """Form a group. A worker at a mean (`meeting`) asks for one; the others only come when asked. True if this
        worker is in a group afterwards."""
        circle.bury()
        self._assembling.append(circle)
        try:
            while True:
                circle.called, circle.trying = False, 0
                record = self._record(circle)
                usable = self._invites(record, circle) and not self._hopeless(record.members)
                if usable and self._formed(circle, record, meeting, new):
                    break
                if usable:
                    circle.failed = record.attempt
                if meeting is not None and meeting.result is not None:
                    break  # the last mean has come, then the group broke: a worker that needs one will ask
                if not usable and meeting is None:
                    break
                if not usable:
                    self._ask(circle, record)
        finally:
            self._assembling.remove(circle)
            circle.trying = 0
        self._bound_groups(circle)
        return circle.attempt > 0

    def _ask(self, circle: MeanGroup, record: GroupRecord) -> None:
        """Write down the members of the next group, unless another worker has done so first."""
        gives = partial(self._gives, circle)

        def members_now() -> Lives | None:
            known = self.acquainted(circle)
            return circles.proposal(self._board, circle, record, self.rank, hold=self._hold, gives=gives, known=known)

        self._wait_for(lambda: circle.called or members_now() is not None, "the others at a mean")
        members = members_now()
        if members is None or circle.called:
            return
        asked = record.next(members, self.rank)
        if self._store.compare_set(circle.key, record.text, asked) == asked:
            self._store.clear(f"{circle.key}/{record.attempt - 1}/")
            self._rendezvous.ring()

    def acquainted(self, circle: MeanGroup) -> Lives:
        """Workers of a circle that are in another group of this worker, where they may have joined: they belong to the
        next group of this circle too, which other members may not know yet."""
        if len(self._circles) < 2:
            return {}
        found: Lives = {}
        for other in self._circles.values():
            if other is not circle and other.attempt and other.generation == circle.generation:
                found |= other.members
        board = self._board
        return {r: n for r, n in found.items() if r in circle.workers and board.lost[r] < n >= board.life[r]}

    def _gives(self, circle: MeanGroup, other: int) -> bool:
        """Whether a worker that waits to join may have the cells of a member of this circle."""
        return gives_cells(self.memory, self.rank, other, circle.workers)

    def _formed(self, circle: MeanGroup, record: GroupRecord, meeting: PendingMean | None, new: bool) -> bool:
        """Form the group of a record, and hand over there what members lack; False if it could not be formed."""
        place = f"{circle.key}/{record.attempt}"
        kept = 0 if circle.kept is None else shape_word(circle.kept)
        at = meeting is not None and meeting.result is None
        first = meeting is not None and meeting.first
        shape = 0 if meeting is None else meeting.shape
        stand = MemberPosition(circle.done, at, first, shape, kept, circle.took, new)
        circle.trying = record.attempt
        self._store.set(f"{place}/at/{self.rank}", stand.written())
        self._rendezvous.ring()
        group: Group | None = None
        try:
            self._gather(place, record.members, circle)
            told = {rank: self._store.get(f"{place}/at/{rank}") for rank in record.members}
            stands = {rank: MemberPosition.read(text) for rank, text in told.items()}
            future = circles.outlook(stands)
            if self.rank not in future.members:
                return False
            circle.members = {rank: record.members[rank] for rank in future.members}
            if len(future.members) > 1:
                group = self._made(place, future.members, circle)
                self._hand_over(circle, group, stands, future, meeting)
        except BaseException as error:
            circle.members = {}
            if group is not None:
                group.bury()
            if isinstance(error, Broken):
                return False
            raise
        circle.attempt, circle.joiner = record.attempt, None
        if group is not None:
            circle.groups[future.shape] = group
        if circle.done is None or self.rank not in future.behind:
            circle.done = future.done
        return True

    def _hand_over(
        self,
        circle: MeanGroup,
        group: Group,
        stands: dict[int, MemberPosition],
        future: GroupPlan,
        meeting: PendingMean | None,
    ) -> None:
        """Give the last mean to the members that missed it, and cells to those that are new."""
        me, members = self.rank, future.members
        if future.giver is not None:
            shape = stands[future.giver].kept
            last = circle.kept if me == future.giver else None
            if last is None:
                last = empty_of(shape, self._device())
            self.wait_for_exchange(group.broadcast(last, members.index(future.giver)), circle)
            if me in future.behind and meeting is not None:
                if isinstance(meeting.op, Mean) and meeting.shape != shape:
                    raise SchemeError("a mean of vectors of different lengths")
                circle.done = future.done - 1
                self._had(meeting, last, stands[future.giver].took)
        if future.donor is not None and any(stands[rank].new for rank in members):
            cells = own_cells(self.memory, me)
            given = flat(cells) if me == future.donor else torch.empty(size_of(cells), dtype=torch.uint8)
            given = given.to(self._device())
            self.wait_for_exchange(group.broadcast(given, members.index(future.donor)), circle)
            if stands[me].new:
                take_cells(self.memory, me, given.cpu())

    def another_shape(self, circle: MeanGroup, meeting: PendingMean) -> None:
        """Vectors of another length get a group of their own where torch carries them: torch ends a process that
        receives more than it expects."""
        there = next(iter(circle.groups.values()), None)
        if there is not None and there.any_length:
            circle.groups[meeting.shape] = there
            return
        place = f"{circle.key}/{circle.attempt}/{meeting.shape}"
        self._store.set(f"{place}/at/{self.rank}", b"here")
        self._rendezvous.ring()
        self._gather(place, circle.members, circle)
        circle.groups[meeting.shape] = self._made(place, sorted(circle.members), circle)
        self._bound_groups(circle)

    def _gather(self, place: str, members: Lives, circle: MeanGroup) -> None:
        """Wait until all members have written their positions."""
        keys = [f"{place}/at/{rank}" for rank in members]
        looked, complete = -1, False

        def there() -> bool:
            nonlocal looked, complete
            rung = self._rendezvous.changes()
            if rung != looked:  # else nothing has changed in the store
                looked, complete = rung, self._store.check(keys)
            return complete or circle.called or self._hopeless(members) or self._out_of_step(circle)

        self._wait_for(there, "the others at a mean")
        if not complete:
            raise Broken

    def _made(self, place: str, members: list[int], circle: MeanGroup) -> Group:
        """Make a group, together with its other members."""
        rendezvous = self._rendezvous
        store = rendezvous.borrow()
        self._maker.prepare(self.memory)

        def make(building: GroupBuilder[Group]) -> Group:
            mine = members.index(self.rank)
            request = GroupRequest(store, place, members, mine, self._device(), building, rendezvous.wake)
            try:
                group = self._maker.group(self.memory, request)
            except BaseException:
                store.close()
                raise
            rendezvous.give_back(store)
            return group

        building = GroupBuilder(make, rendezvous.wake)
        try:
            self._wait_in(circle, lambda: building.over or circle.called or self._hopeless(circle.members), "a group")
            return building.group()
        except BaseException:
            building.give_up()
            raise

    def _wait_in(self, circle: MeanGroup, ready: Callable[[], bool], what: str) -> None:
        """Wait for the others of a group; after a timeout, raise the cause that one of them has written, if any."""
        try:
            self._wait_for(ready, what)
        except Deadlock as error:
            trouble = self._store.peek(f"{circle.key}/{circle.trying or circle.attempt}/{TROUBLE}")
            if not trouble:
                raise
            raise RunError(trouble.decode(errors="replace")) from error

    def _bound_groups(self, current: MeanGroup) -> None:
        for circle in sorted(self._circles.values(), key=lambda circle: circle.used)[:-MOST_GROUPS]:
            circle.kept = None  # all members have got it by now
        while sum(len(set(circle.groups.values())) for circle in self._circles.values()) > MOST_GROUPS:
            others = [circle for circle in self._circles.values() if circle.groups and circle is not current]
            if not others:
                return
            min(others, key=lambda circle: circle.used).bury()

    def _record(self, circle: MeanGroup) -> GroupRecord:
        return GroupRecord.read(self._store.peek(circle.key))

    def _invites(self, record: GroupRecord, circle: MeanGroup) -> bool:
        """Whether a record asks this worker, in this life, to a group that it has not been in."""
        newer = record.attempt > max(circle.attempt, circle.failed, circle.trying)
        return newer and record.members.get(self.rank) == self._rendezvous.life

    def _hopeless(self, members: Lives) -> bool:
        return circles.lost(self._board, members, self.rank) or circles.parted(self._board, members)

    def _device(self) -> torch.device:
        return self.memory.device(self.rank) if self.on_gpu else torch.device("cpu")

    def wait_for_exchange(self, exchange: Exchange, circle: MeanGroup) -> None:
        """Wait until an exchange is over; Broken if the group has changed."""
        board = self._board

        def there() -> bool:
            return exchange.over or circle.called or self._out_of_step(circle)

        if self.on_gpu:  # work on a GPU wakes nobody
            while not there() and not board.run[STOP] and board.run[GENERATION] == circle.generation:
                os.sched_yield()
        try:
            self._wait_in(circle, there, "the others at a mean")
        except Stopped:
            # a member that had this mean and then ended the run has sent its part: it may still arrive
            if board.run[STOP] != FAILED:
                self._wakeup.wait(there, min(LAST, self.memory.plan.patience / 4))
            if exchange.over:
                with contextlib.suppress(Exception):
                    exchange.finish()
                    return
            raise
        if not exchange.over:
            raise Broken
        exchange.finish()

    def _out_of_step(self, circle: MeanGroup) -> bool:
        board, rank = self._board, self.rank
        if circles.lost(board, circle.members, rank):
            return True
        if self.open is not None and self.open.circle is circle:
            index, shape = circles.shape_of(board, rank)
            for other in circle.members:
                if board.at_key[other] == board.at_key[rank]:
                    its_index, its_shape = circles.shape_of(board, other)
                    if its_index == index and its_shape != shape:
                        raise SchemeError("a mean of vectors of different lengths")
        return False
