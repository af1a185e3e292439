"""What a transport and a collective are: how calls reach a server's memory, and how workers take means.

A transport is a class of `paceline/transports/NAME.py`, or an entry point of `paceline.transports`; the endpoint of a
process names it. A collective is a class of `paceline/collectives/NAME.py`, or an entry point of
`paceline.collectives`; `--collective` names it. Both are made once per process.

    worker                                    server
    CallClient ── RemoteCalls ~~~~~~~~~~~~~~~ CallPort ── SharedCallScheduler      servers of other nodes
    CallClient ── mailbox in shared memory ── SharedCallScheduler                  servers of this node
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.config.endpoint import Endpoint
    from paceline.ops import Mean, Meet
    from paceline.processes.calls.mailbox import Mailbox
    from paceline.processes.calls.zero_copy import PendingReplies, ReceiveBuffer
    from paceline.processes.memory.byte_ranges import Span
    from paceline.processes.memory.run_memory import RunMemory
    from paceline.runs.order_log import OrderLogWriter
    from paceline.runtime.messages import MessageCells
    from paceline.state import Vector

Final = Callable[[int, int], None]  # see Task.follow
WaitFor = Callable[[Callable[[], bool], str], None]  # wait until something holds; what for, in words
PARTS_OF_A_MEAN = "the others' part of a mean"  # the timeline of a run tells this wait from that for their arrival


class RemoteCalls(Protocol):
    """A worker's way to servers of other nodes."""

    latest: int  # the highest number of a call that any server knows of this worker
    ahead: set[int]  # mailboxes whose replies the worker does not wait for yet

    def __len__(self) -> int:
        """How many servers are on other nodes."""

    def post(self, mailbox: Mailbox, words: array[int], spans: list[Span]) -> None:
        """Send a call that is in a mailbox of this node."""

    def expect(self, mailbox: Mailbox, landing: ReceiveBuffer) -> None:
        """Where the reply to a call may be received."""

    def landed(self, mailbox: Mailbox) -> ReceiveBuffer | None:
        """Where a reply was received, if all of it came where it was expected."""

    def carry_on(self) -> None:
        """The worker goes to compute: send and receive meanwhile."""

    def meet(self) -> None:
        """Find out which servers are on other nodes, and connect to them."""

    def void(self) -> None:
        """The run has returned to a checkpoint: calls that were posted before it get no reply."""

    def forget(self) -> None:
        """The worker waits for no reply any more."""


class CallPort(Protocol):
    """Where a server takes calls of workers of other nodes, and replies to them."""

    owed: PendingReplies | None  # replies not yet copied out of the server's state; None: all are copied at once

    def far(self, rank: int) -> bool:
        """Whether a worker is on another node."""

    def answer(self, mailbox: Mailbox) -> None:
        """Send a reply."""

    def settle(self) -> None:
        """The state is about to change: copy what was not sent yet."""

    def order(self, position: int) -> None:
        """Tell servers of other nodes which call is next; only the first server does."""

    def close(self) -> None:
        """The server ends: no call is taken any more."""


class CallOrder(Protocol):
    """How a server of another node than the first hears of the order of the calls."""

    ordered: int  # calls whose place in the order is known here

    def go_back(self, generation: int) -> None:
        """The run has returned to a checkpoint: the order starts again."""

    def close(self) -> None:
        """The server ends."""


class Transport(Protocol):
    """How calls travel between nodes. All methods give None where all servers share the caller's memory."""

    name: ClassVar[str]

    def calls(
        self, memory: RunMemory, rank: int, mailboxes: list[Mailbox], ended: Callable[[], bool]
    ) -> RemoteCalls | None:
        """A worker's way to servers of other nodes."""

    def port(self, memory: RunMemory, shard: int, mailboxes: list[Mailbox]) -> CallPort | None:
        """A server's port for workers of other nodes."""

    def order(self, memory: RunMemory, shard: int) -> CallOrder | None:
        """The order of calls, for a server that does not share memory with the first."""


class Means(Protocol):
    """One worker's side of all means. Vectors are added in the order of ranks: every collective gives the same bits."""

    generation: int  # how often the run had returned to a checkpoint when this worker last did
    journal: OrderLogWriter | None

    def mean(self, op: Mean | Meet, *, first: bool) -> Any:
        """Arrive, wait for the others, and give the mean, or what this worker takes from a meeting. `first`: it is the
        first that this step awaits."""

    def arrive(self, op: Mean | Meet, *, first: bool) -> Any:
        """Begin a mean without waiting for it; `leave` takes what this gives."""

    def leave(self, meeting: Any) -> Any:
        """Wait for a mean or a meeting that was begun, and give its result."""

    def returned(self, place: int) -> bool:
        """Whether no other worker reads the vector at an offset of shared memory any more."""

    def wait(self, ready: Callable[[], bool], seconds: float) -> None:
        """Wait for something else, and do meanwhile what other workers need. It may end after `seconds` without."""

    def rung(self) -> bool:
        """Whether another worker may need something of this one."""

    def answer(self) -> None:
        """Do what other workers need."""

    def invited(self) -> int | None:
        """For a worker that has been restarted: the rank whose cells it may copy now."""

    def step_aside(self) -> None:
        """This worker does not take part for a while."""

    def forget(self) -> None:
        """The step was abandoned: this worker is at no mean."""


@runtime_checkable
class StreamedGradients(Protocol):
    """Means, or calls to servers of other nodes, to which a gradient can travel while the rest of it is computed."""

    def early(self, v: Vector) -> Final | None:
        """The next gradient is computed into `v`. Gives what is to be told of its progress; None: nothing is."""

    def computed(self, g: Vector) -> None:
        """A gradient is there. The step may do with it what it likes."""


class RemoteMessages(Protocol):
    """One worker's messages to and from workers whose memory it does not share. None of its methods waits."""

    def cells(self, rank: int) -> MessageCells:
        """What is known here of another worker's cells; all of it is of finished steps."""

    def packed(self, slot: int, payload: Tensor) -> None:
        """The bytes that stand for the vector which has just been put in a slot."""

    def begin_step(self) -> None:
        """A step begins: connect to others."""

    def end_step(self, step: int) -> None:
        """A step is finished: its messages leave, and the notes of those that it has taken."""

    def unsettled(self, reads: Callable[[int], bool]) -> bool:
        """Whether a message is under way to a worker that still `reads`."""


@runtime_checkable
class CarriesMessages(Protocol):
    """Means whose connections carry messages between workers too."""

    def messages(self) -> RemoteMessages:
        """This worker's messages."""


class Store(Protocol):
    """Where workers find each other. The launcher serves it: `pump()` when `fileno()` is readable."""

    place: tuple[str, int, bytes]  # address, port and secret, for workers

    def fileno(self) -> int:
        """What becomes readable when a worker asks for something."""

    def pump(self) -> None:
        """Answer what workers have asked, without waiting for more."""

    def close(self) -> None:
        """The run ends."""


class Collective(Protocol):
    """A way to take means."""

    name: ClassVar[str]
    device: ClassVar[str]  # where vectors are added: cpu or cuda

    def means(self, memory: RunMemory, rank: int, wait_for: WaitFor) -> Means:
        """A worker's side."""

    def store(self, endpoint: Endpoint, warn: Callable[[str], None]) -> Store | None:
        """The launcher's side; None: workers need no store to find each other."""
