"""The server's desk where memory is shared: it works on what lies in the workers' lanes, in place."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from paceline.board import STOP, fence
from paceline.desk import Desk
from paceline.errors import RunError
from paceline.journal import CALL, MEMBER, PROBED, REFUSED, ROSE, SELDOM, Journal, probe_of
from paceline.journal import TELL as TOLD
from paceline.ops import Call
from paceline.stage import Stage
from paceline.transports.door import Door
from paceline.transports.lane import Lane, put
from paceline.transports.pieces import of_tensors
from paceline.wire import encode


class SharedDesk(Desk):
    """A server's desk that writes results where the worker reads them, and marks when it is inside a call."""

    def __init__(
        self, stage: Stage, shard: int, before_answer: Callable[[], None] | None = None, door: Door | None = None
    ) -> None:
        state = stage.shard_state(shard)
        super().__init__(stage.scheme, state, stage.plan.workers, stage.ledger(f"ledger.{shard}."))
        self._stage, self._shard = stage, shard
        self._mark, self._performed = stage.board.mark, stage.board.performed
        self._answered = stage.board.answered[shard]
        self._to_wake: set[int] = set()
        self._length = stage.layout.notes["length"]
        self._low, self._high = stage.bounds(shard)
        self._cut = stage.plan.servers > 1
        self._lead = shard == 0 and self._cut
        self._before_answer = before_answer  # whoever hears of the last update hears of the stop too
        self._door = door
        self.journal: Journal | None = None
        self._probe = probe_of(state.x)
        self._refused, self._version = self.ledger.cells.cell("refused").numpy(), state.cell("v").numpy()
        self._then = self._version.item(), self._refused.item()  # as the last call has left them
        self._until_probe = SELDOM
        self.befalls = 0  # to a worker: what the server has seen last
        self._present = stage.tensor("ledger.0.present").numpy()
        self._numbers = {name: number for number, name in enumerate(sorted(stage.scheme.methods))}

    def order(self, entry: int) -> None:
        """Fix what comes next for all servers; the lead does, and the others follow."""
        board, stage = self._stage.board, self._stage
        number = board.get("ordered")
        followers = range(1, stage.plan.servers)
        while number - min(board.performed[shard] for shard in followers) >= len(board.ring):
            if board.run[STOP] == 2:
                raise RunError("the run has failed")
            stage.bells.look()
            time.sleep(0)
        at = number % len(board.ring)
        board.ring[at], board.ring_numbers[at] = entry, board.posted[entry] if entry >= 0 else 0
        board.put("ordered", number + 1)
        if self._door is not None:
            self._door.order(number)
        for shard in followers:
            stage.bells.ring(board.server_place(shard))

    def _perform(self, rank: int, call: Call[Any], ticket: Any) -> Any:
        lane: Lane = ticket
        if self._lead:
            self.order(lane.index)
        self.settle_answers()
        self._mark[self._shard] += 1
        result = None if lane.tell else self._noted(rank, call, ticket)
        if lane.tell and self.journal is not None:
            self.journal.add(TOLD, self._numbers[call.method.name], rank)
            self.journal.flush()
        if self._before_answer is not None:
            self._before_answer()
        self.done(lane)
        return result

    def _noted(self, rank: int, call: Call[Any], ticket: Any) -> Any:
        """Perform a call and write down that it was, both inside the mark: who dies between leaves it torn."""
        journal, version, refused = self.journal, self._version, self._refused
        if journal is None:
            return super()._perform(rank, call, ticket)
        result = super()._perform(rank, call, ticket)
        now = version.item(), refused.item()
        flags = (ROSE if now[0] != self._then[0] else 0) | (REFUSED if now[1] != self._then[1] else 0)
        self._then = now
        self._until_probe -= 1
        if self._until_probe:
            journal.add(CALL, self._numbers[call.method.name], rank, flags)
        else:
            self._until_probe = SELDOM
            journal.add(PROBED, self._numbers[call.method.name], rank, flags, self._probe())
        journal.flush()
        return result

    def done(self, lane: Lane) -> None:
        """A call is performed: first the count, then the answer, then the end of the mark."""
        board = self._stage.board
        self._performed[self._shard] += 1
        self._answered[lane.index] = lane.taken  # this call, whatever lies in the lane by now
        self._mark[self._shard] += 1
        fence()
        if self._door is not None and self._door.far(lane.rank):
            self._door.answer(lane)
        elif board.awaited[lane.rank] == lane.index + 1:
            self._to_wake.add(lane.rank)

    def settle_answers(self) -> None:
        """The state is about to change: what lies there and may still be wanted is copied."""
        if self._door is not None and self._door.owed:
            self._door.settle()

    def wake(self) -> None:
        """Wake those whose answers are there, when nothing is left to do: they may want this core."""
        for rank in self._to_wake:
            self._stage.bells.ring(rank)
        self._to_wake.clear()

    def _member(self, event: Literal["left", "joined"], rank: int, quorum: bool) -> None:
        self.settle_answers()
        self._mark[self._shard] += 1
        if self._shard == 0:  # inside the mark: a death between the two would leave a quorum that nobody mends
            self._stage.board.known[rank] = self._present[rank] = int(event == "joined")
        super()._member(event, rank, quorum)
        self._then = self._version.item(), self._refused.item()
        if self.journal is not None:
            self.journal.add(MEMBER, self.befalls, rank)
            self.journal.flush()
        self._performed[self._shard] += 1
        self._mark[self._shard] += 1

    def _check_crossing(self, call: Call[Any], values: Any) -> None:
        """What could not cross would not be here; what cannot go back is refused when it is written."""

    def _handed_over(self, result: Any, call: Call[Any], ticket: Any) -> Any:
        lane: Lane = ticket
        room, low, high, length = lane.area("reply"), self._low, self._high, self._length
        segment = self._stage.segment
        owed = self._door.owed if self._door is not None and self._door.far(lane.rank) else None
        lane.pieces, lane.data = pieces, _ = [], None

        def place(tensor: Tensor) -> int:
            size = tensor.numel() * tensor.element_size()
            at = room(tensor, size)
            if owed is None or not owed.note(lane, tensor, at):
                segment.tensor(at, tensor.dtype, tensor.shape).copy_(tensor)
            pieces.append((at, size))
            return at

        if not self._cut:
            lane.told = encode((result,), place)
            put(lane.reply, lane.told)
            return None

        def place_part(tensor: Tensor) -> int:
            # a part of a vector goes to its own range of the whole; the rest is the same on all servers
            if not (tensor.dim() and tensor.is_floating_point() and tensor.shape[-1] == high - low):
                return place(tensor) if self._lead else room(tensor, tensor.numel() * tensor.element_size())
            whole = (*tensor.shape[:-1], length)
            count = tensor[..., 0].numel() * length
            at = room(tensor, count * tensor.element_size())
            part = segment.tensor(at, tensor.dtype, whole)[..., low:high]
            own = at + low * tensor.element_size()
            if owed is None or tensor.dim() > 1 or not owed.note(lane, tensor, own):
                part.copy_(tensor)
            if owed is not None:
                pieces.extend(of_tensors(segment, [part]))
            return at

        lane.told = words = encode((_widened(result, high - low, length),), _parts_in_order(result, place_part))
        if self._lead or not self._stage.near(0):
            put(lane.reply, words)
        return None


def _parts_in_order(result: Any, place: Callable[[Tensor], int]) -> Callable[[Tensor], int]:
    """Encoding sees tensors of the full shape, without memory; what is placed are the parts, in the same order."""
    parts = iter(list(_tensors(result)))
    return lambda _: place(next(parts))


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for item in value for tensor in _tensors(item)] if isinstance(value, tuple) else []


def _widened(value: Any, part: int, length: int) -> Any:
    if isinstance(value, Tensor):
        if value.dim() and value.is_floating_point() and value.shape[-1] == part:
            return torch.empty((*value.shape[:-1], length), dtype=value.dtype, device="meta")
        return value
    return tuple(_widened(item, part, length) for item in value) if isinstance(value, tuple) else value
