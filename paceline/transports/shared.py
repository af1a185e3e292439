"""Calls between processes of one machine. A worker's mailbox lies in shared memory; the server works on it in place.

A call is posted when its number is written, and not before: a worker killed on the way has posted nothing. It is
answered when the server has written the same number beside it. Numbers carry the generation of the run, so that what
was posted before a return to a checkpoint is void.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from paceline.board import LANES, STOP, fence
from paceline.desk import Desk
from paceline.errors import RunError, SchemeError
from paceline.ops import Call
from paceline.scheme import ServerMethod
from paceline.stage import HEAD_WORDS, Stage
from paceline.state import State
from paceline.wire import decode, encode

SAVE, SET = -1, -2  # what a worker may ask for beside the scheme's own methods
LEFT, JOINED, PARTED = -3, -4, -5  # what may befall it
READS = 16  # tries to read while nobody writes, before the server is asked
GENERATIONS = 1 << 32


class Stopped(Exception):
    """The run ends: whoever waits is let go."""


class RolledBack(Exception):
    """The run has gone back to a checkpoint: whatever was under way is void."""


class Lane:
    """One call's place: where its words, its arguments and its result lie."""

    def __init__(self, stage: Stage, rank: int, number: int) -> None:
        self.rank, self.number, self.index = rank, number, stage.board.lane(rank, number)
        self._segment = stage.segment
        head = stage.layout.places[f"lane.{rank}.{number}.head"].offset // 8
        self.request = stage.segment.words[head : head + HEAD_WORDS]
        self.reply = stage.segment.words[head + HEAD_WORDS : head + 2 * HEAD_WORDS]
        args, reply = (stage.layout.places[f"lane.{rank}.{number}.{part}"] for part in ("args", "reply"))
        self._areas = {"args": (args.offset, args.shape[0]), "reply": (reply.offset, reply.shape[0])}

    def area(self, part: str) -> Callable[[Tensor, int], int]:
        """A function that finds room for a tensor of so many bytes in one of the areas."""
        offset, size = self._areas[part]
        used = 0

        def room(tensor: Tensor, nbytes: int) -> int:
            nonlocal used
            place = offset + used
            used += -(-nbytes // 64) * 64
            if used > size:
                raise SchemeError(f"a call carries {used} bytes of tensors; {size} fit: send fewer vectors in one call")
            return place

        return room

    def copy_in(self, tensor: Tensor, room: Callable[[Tensor, int], int]) -> int:
        place = room(tensor, tensor.numel() * tensor.element_size())
        self._segment.tensor(place, tensor.dtype, tensor.shape).copy_(tensor)
        return place


def _put(words: memoryview, values: array[int]) -> None:
    words[0] = len(values)
    words[1 : 1 + len(values)] = values


def _got(words: memoryview) -> list[int]:
    taken: list[int] = words[1 : 1 + words[0]].tolist()
    return taken


class Link:
    """A worker's way to the servers."""

    def __init__(self, stage: Stage, rank: int, wait_for: Callable[[Callable[[], bool], str], None]) -> None:
        self.stage, self.rank = stage, rank
        self._board = board = stage.board
        self._wait_for = wait_for
        self._lanes = [Lane(stage, rank, number) for number in range(LANES)]
        self._free = list(reversed(self._lanes))
        self._void: list[Lane] = []  # forgotten, and perhaps still being read by a server
        self._methods = {name: number for number, name in enumerate(sorted(stage.scheme.methods))}
        self._servers = range(stage.plan.servers)
        self.generation = board.get("generation")  # the one that this worker has gone back with
        self.device = torch.device("cpu")  # where the worker's own tensors lie
        self._answered = [board.answered[shard] for shard in self._servers]
        self._silent: list[tuple[Lane, str, list[tuple[Tensor, int]]]] = []
        self._unheard = False
        self._grads = {stage.layout.places[f"grad.{rank}.{k}"].offset for k in range(2)}
        self._count = max((board.posted[lane.index] % GENERATIONS for lane in self._lanes), default=0)
        self._state = stage.server_state()
        self._x = self._state.x.data_ptr()
        self._held = stage.tensor("ledger.0.held").numpy()
        if stage.direct():
            self._tally = stage.ledger(f"tally.{rank}.")
            cells = {name: self._state.cell(name) for name in self._state}
            self._open = State.over(cells | {"v": torch.zeros((), dtype=torch.int64)})
            self._open.keep_ledger(self._tally)

    def call(self, call: Call[Any]) -> Any:
        """Have a call performed and give its result."""
        method = call.method
        if self.stage.scheme.methods.get(method.name) is not method:
            raise SchemeError(f"worker:{self.rank} called {method.name}(), which is not a method of its own scheme")
        if not method.atomic:
            return self._here(method, call.args)
        if method.silent:
            self._go_on(call)
            return None
        if method.reads:
            self._settle()
            seen, result = self._look(method, call.args)
            if seen:
                return result
        return self.collect(self.post(call))

    def post(self, call: Call[Any]) -> Lane:
        """Send a call without waiting for it."""
        return self._send(self._methods[call.method.name], call.args)

    def _go_on(self, call: Call[Any]) -> None:
        """Send a call that gives nothing back, and go on: the server performs a worker's calls in their order, so
        whatever this worker asks for next comes after it. Gradients stay where they are, all else is copied. The server
        is woken when this worker waits or computes: often another call follows at once."""
        segment = self.stage.segment
        held = [a for a in call.args if isinstance(a, Tensor) and segment.offset(a) in self._grads]
        lane = self._send(self._methods[call.method.name], call.args, silent=True)
        self._silent.append((lane, call.method.name, [(a, a._version) for a in held]))
        self._unheard = True

    def flush(self) -> None:
        """Let the servers know of what was sent on the way."""
        if self._unheard:
            self._ring()

    def _ring(self) -> None:
        self._unheard = False
        for shard in self._servers:
            self.stage.bells.ring(self._board.server_place(shard))

    def _settle(self) -> None:
        """Wait until everything that was sent on the way is done."""
        if self._silent:
            self.flush()
            last = self._silent[-1][0]
            self._board.awaited[self.rank] = last.index + 1
            self._wait_for(lambda: self.ready(last), "the server")
            self._settled()

    def _settled(self) -> None:
        sent, self._silent = self._silent, []
        for lane, name, held in sent:
            self._free.append(lane)
            for gradient, version in held:
                if gradient._version != version:
                    raise SchemeError(
                        f"worker:{self.rank} changed a gradient in place after {name}() had been given it; "
                        "arguments cross by value: change a copy"
                    )

    def returned(self, place: int) -> bool:
        """Whether no call under way still needs what lies there."""
        if self._silent and self.ready(self._silent[-1][0]):
            self._settled()
        offset = self.stage.segment.offset
        return not any(offset(gradient) == place for _, _, held in self._silent for gradient, _ in held)

    def special(self, kind: int, *args: Any) -> None:
        """Have the servers do something that is no method of the scheme."""
        self.collect(self.ask(kind, *args))

    def ask(self, kind: int, *args: Any) -> Lane:
        lane = self._send(kind, args)
        self._board.awaited[self.rank] = lane.index + 1
        return lane

    def _send(self, method: int, args: tuple[Any, ...], *, silent: bool = False) -> Lane:
        if self._void:
            self._free += [lane for lane in self._void if self.ready(lane)]
            self._void = [lane for lane in self._void if lane not in self._free]
        if not self._free:
            self._settle()
        if not self._free and method < 0 and self._void:  # the end must not fail because calls wait for ever
            self._free.append(self._void.pop(0))
        if not self._free:
            raise SchemeError(f"worker:{self.rank} has {LANES} calls under way; await some before it starts another")
        lane = self._free.pop()
        segment, room = self.stage.segment, lane.area("args")

        def place(tensor: Tensor) -> int:
            at = segment.offset(tensor)  # what lies in shared memory already is not copied, if the caller waits
            return lane.copy_in(tensor, room) if at is None or (silent and at not in self._grads) else at

        words = encode(args, place)
        lane.request[HEAD_WORDS - 1] = method
        _put(lane.request, words)
        self._count += 1
        board = self._board
        board.posted[lane.index] = self.generation * GENERATIONS + self._count
        if not silent:
            self._ring()
        return lane

    def ready(self, lane: Lane) -> bool:
        number = self._board.posted[lane.index]
        return all(answered[lane.index] == number for answered in self._answered)

    def collect(self, lane: Lane) -> Any:
        """Wait for a call's answer."""
        index, number, answered = lane.index, self._board.posted[lane.index], self._answered
        self._board.awaited[self.rank] = index + 1
        if len(answered) == 1:
            first = answered[0]
            self._wait_for(lambda: first[index] == number, "the server")
        else:
            self._wait_for(lambda: all(one[index] == number for one in answered), "the servers")
        segment = self.stage.segment

        def tensor(offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
            return segment.tensor(offset, dtype, shape).to(self.device, copy=True)

        (result,) = decode(_got(lane.reply), tensor)
        self._free.append(lane)
        if self._silent:  # sent before this one, so done before it
            self._settled()
        return result

    def forget(self) -> None:
        """Whatever was under way is void; its lanes serve again once no server can be reading them any more."""
        self._void = [lane for lane in self._lanes if not self.ready(lane)]
        self._free = [lane for lane in reversed(self._lanes) if lane not in self._void]
        self._silent.clear()

    def _look(self, method: ServerMethod[Any, Any], args: tuple[Any, ...]) -> tuple[bool, Any]:
        """Perform a method that only reads, at a moment at which no server writes."""
        board, state = self._board, self._state
        mark, performed = board.mark, board.performed
        for _ in range(READS):
            before = mark.tolist()
            if any(one % 2 for one in before) or (len(before) > 1 and len(set(performed.tolist())) > 1):
                time.sleep(0)  # let the server run: it may share this core
                continue
            result = method.function(self.stage.scheme, state, *args)
            version = state.v
            own = _cloned(result, self.device)
            fence()
            if mark.tolist() == before:
                if _gives(result, self._x):
                    self._held[self.stage.scheme.holder(self.rank)] = version
                return True, own
        return False, None

    def _here(self, method: ServerMethod[Any, Any], args: tuple[Any, ...]) -> Any:
        """Perform a call that is not atomic in the shared vector itself, without any lock."""
        state, before = self._open, self.stage.updates
        state.v = before
        self._tally.caller = holder = self.stage.scheme.holder(self.rank)
        args = tuple(a.cpu() if isinstance(a, Tensor) else a for a in args)
        result = method.function(self.stage.scheme, state, *args)
        self._board.direct[self.rank] += state.v - before
        if _gives(result, self._x):
            self._tally.pulled(holder, before)
        return _cloned(result, self.device)


class SharedDesk(Desk):
    """A server's desk that writes results where the worker reads them, and marks when it is inside a call."""

    def __init__(self, stage: Stage, shard: int, before_answer: Callable[[], None] | None = None) -> None:
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

    def order(self, entry: int) -> None:
        """Fix what comes next for all servers; the lead does, and the others follow."""
        board, stage = self._stage.board, self._stage
        number = board.get("ordered")
        followers = range(1, stage.plan.servers)
        while number - min(board.performed[shard] for shard in followers) >= len(board.ring):
            if board.run[STOP] == 2:
                raise RunError("the run has failed")
            time.sleep(0)
        board.ring[number % len(board.ring)] = entry
        board.put("ordered", number + 1)
        for shard in followers:
            stage.bells.ring(board.server_place(shard))

    def _perform(self, rank: int, call: Call[Any], ticket: Any) -> Any:
        lane: Lane = ticket
        if self._lead:
            self.order(lane.index)
        self._mark[self._shard] += 1
        result = super()._perform(rank, call, ticket)
        if self._before_answer is not None:
            self._before_answer()
        self.done(lane)
        return result

    def done(self, lane: Lane) -> None:
        """A call is performed: first the count, then the answer, then the end of the mark."""
        board = self._stage.board
        self._performed[self._shard] += 1
        self._answered[lane.index] = board.posted[lane.index]
        self._mark[self._shard] += 1
        fence()
        if board.awaited[lane.rank] == lane.index + 1:
            self._to_wake.add(lane.rank)

    def wake(self) -> None:
        """Wake those whose answers are there, when nothing is left to do: they may want this core."""
        for rank in self._to_wake:
            self._stage.bells.ring(rank)
        self._to_wake.clear()

    def _member(self, event: Literal["left", "joined"], rank: int, quorum: bool) -> None:
        self._mark[self._shard] += 1
        if self._shard == 0:  # inside the mark: a death between the two would leave a quorum that nobody mends
            self._stage.board.known[rank] = int(event == "joined")
        super()._member(event, rank, quorum)
        self._performed[self._shard] += 1
        self._mark[self._shard] += 1

    def _check_crossing(self, call: Call[Any], values: Any) -> None:
        """What could not cross would not be here; what cannot go back is refused when it is written."""

    def _handed_over(self, result: Any, call: Call[Any], ticket: Any) -> Any:
        lane: Lane = ticket
        room, low, high, length = lane.area("reply"), self._low, self._high, self._length
        segment = self._stage.segment

        def place(tensor: Tensor) -> int:
            return lane.copy_in(tensor, room)

        if not self._cut:
            _put(lane.reply, encode((result,), place))
            return None
        shapes: list[tuple[int, ...]] = []

        def place_part(tensor: Tensor) -> int:
            # a part of a vector goes to its own range of the whole; the rest is the same on all servers
            if not (tensor.dim() and tensor.is_floating_point() and tensor.shape[-1] == high - low):
                return place(tensor) if self._lead else room(tensor, tensor.numel() * tensor.element_size())
            whole = (*tensor.shape[:-1], length)
            shapes.append(whole)
            count = tensor[..., 0].numel() * length
            at = room(tensor, count * tensor.element_size())
            segment.tensor(at, tensor.dtype, whole)[..., low:high].copy_(tensor)
            return at

        words = encode((_widened(result, high - low, length),), _parts_in_order(result, place_part))
        if self._lead:
            _put(lane.reply, words)
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


def _cloned(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device, copy=True)
    return tuple(_cloned(item, device) for item in value) if isinstance(value, tuple) else value


def _gives(value: Any, x: int) -> bool:
    if isinstance(value, Tensor):
        return value.data_ptr() == x
    return isinstance(value, tuple) and any(_gives(item, x) for item in value)


def received(stage: Stage, lane: Lane, methods: list[ServerMethod[Any, Any]], bounds: tuple[int, int]) -> Any:
    """What lies in a lane: a call with its arguments in place (its range of the vectors), or a special request."""
    low, high = bounds
    length = stage.layout.notes["length"]
    segment = stage.segment
    whole = high - low == length

    def tensor(offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        found = segment.tensor(offset, dtype, shape)
        return found if whole or not shape or shape[-1] != length else found[..., low:high]

    args = decode(_got(lane.request), tensor)
    number = lane.request[HEAD_WORDS - 1]
    return (number, args) if number < 0 else Call(methods[number], args)
