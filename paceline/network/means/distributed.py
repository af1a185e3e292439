"""Means over workers on any number of nodes, by connections: the interface and the bits of `SharedMeans`.

As long as its members do not change, a mean is one or two operations of a group and nothing else. When a member comes
or goes, those that are left form another group (group_formation.py), and continue with the mean that they are at.
Meetings among some of the workers need no groups (partial_meetings.py).
"""

from __future__ import annotations

import contextlib
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from paceline.config.endpoint import Endpoint
from paceline.errors import RunError, SchemeError
from paceline.network.means import group_record as circles
from paceline.network.means.early_mean import EarlyMean, MeanForecast
from paceline.network.means.group import HEAD, Broken, Group, GroupRequest, Header
from paceline.network.means.group_formation import GroupFormation, PendingMean
from paceline.network.means.group_record import MeanGroup
from paceline.network.means.linked_messages import LinkedMessages
from paceline.network.means.partial_meetings import PartialMeeting, PartialMeetings
from paceline.network.means.rendezvous import Rendezvous
from paceline.network.secure import secret, tls
from paceline.network.secure.admission import AdmissionListener, listener
from paceline.network.secure.store_server import StoreServer
from paceline.ops import Mean, Meet, Met
from paceline.processes.calls.client import Stopped
from paceline.processes.calls.zero_copy import BufferPool
from paceline.processes.memory.packed_words import mean_key, shape_word
from paceline.processes.memory.payload_codec import from_bytes, to_bytes
from paceline.processes.memory.run_memory import RunMemory
from paceline.processes.transport import Final, WaitFor
from paceline.runs.order_log import OrderLogWriter, RecordKind
from paceline.state import Vector, mean_into


class Connected(ABC):
    """A collective over connections: workers find each other in a store, and form groups there. Members say how a
    group is made."""

    device: ClassVar[str] = "cpu"

    def means(self, memory: RunMemory, rank: int, wait_for: WaitFor) -> DistributedMeans:
        return DistributedMeans(memory, rank, wait_for, self)

    def store(self, endpoint: Endpoint, warn: Callable[[str], None]) -> StoreServer:
        listening = listener(endpoint.address, endpoint.ports)
        proof = endpoint.secret or secret.fresh()
        gate = AdmissionListener(listening, proof, tls=tls.server_side(endpoint), log=warn)
        return StoreServer(gate, (endpoint.address, listening.getsockname()[1], proof))

    def prepare(self, memory: RunMemory) -> None:  # noqa: B027
        """Refuse here, in the worker's own thread, what cannot work."""

    def connections(self, memory: RunMemory, request: GroupRequest) -> dict[int, socket.socket]:
        """A connection to each other member, by its place, in a thread: it waits for the other members."""
        raise SchemeError("workers meet over connections of --collective tcp only")

    @abstractmethod
    def group(self, memory: RunMemory, request: GroupRequest) -> Group:
        """Make a group, in a thread of its own: it waits for the other members."""


class DistributedMeans:
    """One worker's side of all means."""

    def __init__(self, memory: RunMemory, rank: int, wait_for: WaitFor, maker: Connected) -> None:
        self.rank, self._board, self._wakeup = rank, memory.board, memory.wakeup
        self._rendezvous = rendezvous = Rendezvous(memory, rank)
        self._groups = GroupFormation(memory, rank, wait_for, maker, rendezvous, self._had)
        self._partial = PartialMeetings(memory, rank, wait_for, maker, rendezvous)
        self._messages: LinkedMessages | None = None
        if memory.scheme.sends_messages():
            self._messages = LinkedMessages(memory, rank, maker, rendezvous, lambda: self.generation)
        self._everybody = tuple(range(memory.plan.workers))
        parts = memory.scheme.mean_groups(rank, memory.plan.workers)
        self._parts = [tuple(sorted(part)) for part in parts]  # whose means this worker may join at
        self._serverless = not memory.scheme.methods
        self._recycled = BufferPool()
        self._forecast = MeanForecast()
        self._early: EarlyMean | None = None  # a mean whose vector is being computed
        self.rung, self.answer = self._groups.rung, self._groups.answer
        self.journal: OrderLogWriter | None = None
        self.generation = 0  # how often the run had returned to a checkpoint when this worker last did

    def mean(self, op: Mean | Meet, *, first: bool) -> Any:
        """Arrive, wait for the others, and give the mean. `first`: it is the first that this step awaits."""
        return self.leave(self._arrived(op, first=first))

    def arrive(self, op: Mean | Meet, *, first: bool) -> PendingMean | PartialMeeting:
        """Begin the exchange, if there is a group; it proceeds while this worker computes. `leave` completes it."""
        meeting = self._arrived(op, first=first)
        if isinstance(meeting, PartialMeeting):
            self._partial.carry_on()
        elif meeting.group is not None:
            meeting.group.carry_on()
        return meeting

    def early(self, v: Vector) -> Final | None:
        """The next mean of all workers is perhaps of this vector, which is about to be computed: begin it, if the last
        gradients went to means as they were. Gives a function that is told what of the vector is final."""
        self._void_early()  # the step has not come to that mean
        weight = self._forecast.weight()
        circle = self._groups.circle(self._everybody, True, self.generation)
        group = circle.groups.get(shape_word(v)) if weight is not None else None
        changing = self.rung() or circle.called or circle.joiner is not None or self._groups.open is not None
        if weight is None or group is None or changing:
            return None
        if circles.lost(self._board, circle.members, self.rank) or circles.parted(self._board, circle.members):
            return None
        tell = group.open_early(v, Header((circle.done or 0) + 1, 0, weight, shape=shape_word(v)))
        if tell is None:
            return None
        self._early = EarlyMean(circle, group, v, weight, tell)
        return self._early.final

    def computed(self, g: Vector) -> None:
        """A gradient is there."""
        self._forecast.computed(g)

    def _void_early(self) -> None:
        """What was sent of a vector is not what its mean is of: the others wait for the rest of it, so leave them, and
        form the group again."""
        early, self._early = self._early, None
        if early is not None and early.group in early.circle.groups.values():
            early.circle.bury()

    def _arrived(self, op: Mean | Meet, *, first: bool) -> PendingMean | PartialMeeting:
        board, rank = self._board, self.rank
        workers = self._everybody if op.among is None else tuple(sorted(op.among))
        if self._groups.open is not None or self._partial.open is not None:
            raise SchemeError(f"worker:{rank} started a mean while its last one is open")
        v = op.v.reshape(-1)
        v = v if self._groups.on_gpu else v.cpu()
        number = board.at_seq[rank] + 1
        if self.journal is not None:
            self.journal.add(RecordKind.MEAN if isinstance(op, Mean) else RecordKind.MEET, number)
            self.journal.flush()
        if isinstance(op, Meet) and op.among is not None:
            self._void_early()
            return self._partial.arrive(op, v, number, self.generation, first=first)
        circle = self._groups.circle(workers, op.among is None, self.generation)
        meeting = PendingMean(op, v, number, first, circle)
        board.at_key[rank] = mean_key(None if op.among is None else workers, self.generation)
        board.at_shape[rank] = 0  # as long as the number of the mean is not known
        board.first_await[rank] = first
        board.finished[rank] = number - 1
        board.at_seq[rank] = number
        self._groups.open = meeting
        if isinstance(op, Mean):
            self._forecast.mean(op)
        if self._early is not None and not self._early.becomes(meeting):
            self._forecast.missed()
            self._void_early()
        meeting.early, self._early = self._early, None
        if self._settled(meeting) and meeting.shape in circle.groups:
            self._begin(meeting)
        return meeting

    def leave(self, meeting: PendingMean | PartialMeeting) -> Any:
        """Wait until the mean, or all that a meeting gives this worker, is there, and take it."""
        if isinstance(meeting, PartialMeeting):
            met = self._partial.leave(meeting)
            self._note(meeting.took, meeting.workers)
            return met
        circle = meeting.circle
        while meeting.result is None:
            try:
                if meeting.exchange is None and not self._settled(meeting):
                    self._groups.assemble(circle, meeting)
                    continue  # it may have brought the result
                if meeting.exchange is None:
                    self._begin(meeting)
                self._complete(meeting)
            except Broken:
                meeting.exchange = meeting.group = None
                circle.bury()
        self._board.finished[self.rank] = meeting.number
        self._groups.open = None
        if isinstance(meeting.op, Meet):
            assert meeting.met is not None
            return meeting.met
        return meeting.result.view(meeting.op.v.shape).to(meeting.op.v.device)

    def forget(self) -> None:
        """The step was abandoned: this worker is at no mean and in no group."""
        self._board.at_key[self.rank] = 0
        self._board.finished[self.rank] = self._board.at_seq[self.rank]
        self._early = None
        self._groups.forget()
        self._partial.forget()
        if self._messages is not None:
            self._messages.forget()

    def messages(self) -> LinkedMessages:
        """Messages to and from workers of other nodes."""
        assert self._messages is not None
        return self._messages

    def returned(self, place: int) -> bool:
        """Whether a vector is no longer read: other workers only ever get copies."""
        return True

    def step_aside(self) -> None:
        """This worker is away for a while: for the others its life has ended, and when it is back it has a new one."""
        self.forget()
        self._rendezvous.new_life()

    def wait(self, ready: Callable[[], bool], seconds: float) -> None:
        """Wait for something else, at most `seconds` after other workers have last wanted something of this one."""
        while self._wakeup.wait(lambda: ready() or self.rung(), seconds) and not ready():
            self.answer()

    def invited(self) -> int | None:
        """For a worker that is back: the rank whose cells it continues with, once they are in its own memory."""
        with contextlib.suppress(Stopped):  # which the caller sees for itself
            circles = [self._groups.circle(workers, False, self.generation) for workers in self._parts]
            circles.append(self._groups.circle(self._everybody, True, self.generation))
            if any(map(self._groups.invited, circles)) or self._partial.invited(self.generation):
                return self.rank
        return None

    # a mean in a group whose members do not change

    def _settled(self, meeting: PendingMean) -> bool:
        """Whether the mean can begin in the group as it is."""
        circle, board = meeting.circle, self._board
        if self.rung():
            self.answer()
        unsettled = circle.called or (circle.joiner is not None and meeting.first)
        if not circle.attempt or unsettled or circles.lost(board, circle.members, self.rank):
            return False
        if any(circle.members.get(rank) != life for rank, life in self._groups.acquainted(circle).items()):
            return False
        waits = meeting.first and len(circle.members) == 1 and self._joiner(circle) is not None
        return not waits and not circles.parted(board, circle.members)

    def _begin(self, meeting: PendingMean) -> None:
        circle = meeting.circle
        if len(circle.members) == 1:
            return
        index = (circle.done or 0) + 1
        self._board.at_shape[self.rank] = circles.shape_word(index, meeting.shape)
        if meeting.shape not in circle.groups:
            self._groups.another_shape(circle, meeting)
        joiner = self._joiner(circle) or (-1, 0)
        weight = meeting.op.weight if isinstance(meeting.op, Mean) else meeting.op.number
        header = Header(index, meeting.number, weight, joiner[0] + 1, joiner[1], meeting.shape)
        meeting.group = circle.groups[meeting.shape]
        if isinstance(meeting.op, Meet):
            places = {rank: place for place, rank in enumerate(sorted(circle.members))}
            to, of = ([places[rank] for rank in ranks if rank in places] for ranks in (meeting.op.to, meeting.op.of))
            packed = meeting.op.packed
            meeting.sent = to_bytes(packed.payloads[0]) if packed is not None and meeting.group.gathers else None
            given = meeting.v if meeting.sent is None else meeting.sent
            meeting.exchange = meeting.group.start_meeting(given, header, to, of)
        elif (packed := meeting.op.packed) is not None and packed.payloads and meeting.group.gathers:
            meeting.sent = to_bytes(packed.payloads[0])
            meeting.exchange = meeting.group.gather(meeting.sent, header)
        elif meeting.early is not None and meeting.early.group is meeting.group:
            meeting.exchange = meeting.group.commit(header)
        else:
            meeting.exchange = meeting.group.start(meeting.v, header)
        meeting.early = None

    def _joiner(self, circle: MeanGroup) -> tuple[int, int] | None:
        """A worker that waits to join: without a server it needs the cells of another worker."""
        board = self._board
        if self._serverless and any(board.joining):
            for rank in circle.workers:
                life = board.life[rank]
                if board.joining[rank] and life > board.lost[rank] and circle.members.get(rank) != life:
                    return rank, life
        return None

    def _complete(self, meeting: PendingMean) -> None:
        circle, group, v = meeting.circle, meeting.group, meeting.v
        if group is None or meeting.exchange is None:  # alone
            result = torch.empty_like(v)
            if isinstance(meeting.op, Mean):
                mean_into(result, [v], [meeting.op.weight])
            else:
                meeting.met = Met((self.rank,), {}, {self.rank: meeting.op.number})
            self._had(meeting, result, {str(self.rank): meeting.number})
            return
        self._groups.wait_for_exchange(meeting.exchange, circle)
        headers = group.headers()
        if len({header.index for header in headers}) > 1:
            raise RunError(f"worker:{self.rank} is at a mean with others that are at another: {headers}")
        weights = [header.weight for header in headers]
        if isinstance(meeting.op, Meet):
            meeting.met = self._met(meeting.op, group, sorted(circle.members), weights)
            self._groups.wait_for_exchange(group.confirm(), circle)
            result = torch.zeros(1)  # kept in place of a mean: it tells those that are behind that they have all
        elif meeting.sent is not None:
            result = self._mean_of_payloads(meeting.op, v, group, meeting.sent.numel(), weights)
        elif group.small:
            result = group.small_mean(v, weights)
        else:
            self._groups.wait_for_exchange(group.start_second(weights), circle)
            result = group.large_mean(v)
        joiners = [(header.joiner - 1, header.joiner_life) for header in headers if header.joiner]
        circle.joiner = max(joiners, default=None)
        took = {str(rank): header.number for rank, header in zip(sorted(circle.members), headers, strict=True)}
        self._had(meeting, result, took)

    def _met(self, op: Meet, group: Group, members: list[int], weights: list[float]) -> Met:
        came = group.met()
        if op.packed is not None and group.gathers:
            sites = self._groups.memory.compressed_sites()
            assert sites is not None
            compressor = sites.compressor(None)
            came = {place: compressor.decode(from_bytes(data), op.v) for place, data in came.items()}
        found = {members[place]: v.view(op.v.shape).to(op.v.device) for place, v in came.items()}
        return Met(tuple(members), dict(sorted(found.items())), dict(zip(members, weights, strict=True)))

    def _mean_of_payloads(self, op: Mean, v: Vector, group: Group, size: int, weights: list[float]) -> Vector:
        """The mean of compressed vectors, of which this worker's decodes to v."""
        sites = self._groups.memory.compressed_sites()
        assert sites is not None
        compressor = sites.compressor(sites.fragment(op.fragment))
        vectors = [
            v if place == group.place else compressor.decode(from_bytes(row[HEAD : HEAD + size]), v)
            for place, row in enumerate(group.rows())
        ]
        result = torch.empty_like(v)
        mean_into(result, vectors, weights)
        return result

    def _had(self, meeting: PendingMean, result: Vector, took: dict[str, int]) -> None:
        """The mean is there. The log gets its members before this worker uses it."""
        circle = meeting.circle
        self._note(took, circle.workers)
        circle.done = (circle.done or 0) + 1
        circle.kept, circle.took = result, took
        # in memory that is used again: the system would clear a new block, which takes longer than the copy
        meeting.result = result.clone() if self._groups.on_gpu else self._recycled.copy(result)

    def _note(self, took: dict[str, int], workers: tuple[int, ...]) -> None:
        """Log the members of a mean or a meeting, before this worker uses what it has taken from it."""
        if self.journal is not None and circles.told(took, workers):
            self.journal.text(RecordKind.DECIDED, took)
