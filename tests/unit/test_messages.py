"""Messages that nobody waits for: when they arrive, who gets them, when one is refused, what a step that is never
finished has sent; in virtual time, and in cells that other processes read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from small_models import task

from paceline import simulate
from paceline.errors import SchemeError
from paceline.ops import MESSAGES, PeerMessage, Send
from paceline.runtime.messages import CUT, NEVER, STEP, MessageCells, Place, arrived, free_slot, restore_rows, under_way
from paceline.scheme import Scheme, State, Vector
from paceline.simulator.cost import Cost, NetworkLink
from paceline.simulator.engine import SimulationEngine
from paceline.simulator.faults import Fault
from paceline.tasks.quadratic import quadratic
from paceline.worker import Worker

SEEN: list[tuple[int, int, tuple[PeerMessage, ...]]] = []
SENT: list[tuple[int, int, bool]] = []


@pytest.fixture(autouse=True)
def fresh() -> None:
    SEEN.clear()
    SENT.clear()


@dataclass(frozen=True)
class Writing(Scheme, name="writing"):
    """Every worker writes to the next one in each step; `reads`: those that receive."""

    reads: tuple[int, ...] = (0, 1, 2)
    decentralised = True

    def sends_messages(self) -> bool:
        return True

    def worker(self, x0: Vector, workers: int) -> State:
        return State(x=x0, taken=0.0, given=0.0)

    async def step(self, w: Worker) -> None:
        if w.rank in self.reads:
            came = await w.receive()
            SEEN.append((w.rank, w.t, came))
            w.taken += sum(message.number for message in came)
        await w.grad()
        number = 10.0 * w.rank + w.t
        sent = await w.send((w.rank + 1) % w.workers, torch.full_like(w.x, number), number)
        SENT.append((w.rank, w.t, bool(sent)))
        if sent:
            w.given += number
        w.v += 1


def engine(scheme: Scheme | None = None, **settings: Any) -> SimulationEngine:
    cost = Cost(network=settings.pop("network", NetworkLink()))
    return SimulationEngine(quadratic(dim=3), scheme or Writing(), workers=3, seed=1, cost=cost, **settings)


def whole(run: SimulationEngine) -> bool:
    """Whether all that was given was taken, or is under way."""
    states = [seat.worker.state for seat in run.seats]
    out = sum(message.number for _, message in under_way(states))
    return bool(sum(s.given for s in states) == sum(s.taken for s in states) + out)


class TestInVirtualTime:
    def test_a_message_arrives_after_the_step_in_which_it_was_sent(self) -> None:
        run = engine()
        run.run(4)
        assert [(t, [m.number for m in came]) for rank, t, came in SEEN if rank == 1] == [
            (0, []),
            (1, [0.0]),
            (2, [1.0]),
            (3, [2.0]),
        ]
        assert all(message.v.eq(message.number).all() for _, _, came in SEEN for message in came)
        assert {message.sender for rank, _, came in SEEN if rank == 1 for message in came} == {0}
        assert whole(run)

    def test_the_network_carries_it(self) -> None:
        """Out of the sender and into the receiver: 1.5 s each, and 1 s per step."""
        run = engine(network=NetworkLink(latency=1.5))
        run.run(7)
        assert [t for rank, t, came in SEEN if rank == 0 and came] == [4, 5, 6]
        assert whole(run)

    def test_four_are_under_way_and_a_fifth_is_refused(self) -> None:
        """Worker 1 never receives: worker 0 sees that its message was not sent, and keeps what was in it."""
        run = engine(Writing(reads=(0, 2)))
        run.run(8)
        assert [sent for rank, _, sent in SENT if rank == 0] == [True] * MESSAGES + [False] * (8 - MESSAGES)
        assert whole(run)

    def test_a_dead_worker_is_sent_nothing(self) -> None:
        run = engine(faults=[Fault("kill", 1, 2.5)])
        run.run(6)
        assert [(t, sent) for rank, t, sent in SENT if rank == 0][1:] == [(t, t == 1) for t in range(1, 6)]
        assert whole(run)

    @pytest.mark.parametrize("number", range(1, 13))
    def test_a_step_that_is_never_finished_has_sent_and_taken_nothing(self, number: int) -> None:
        run = engine(faults=[Fault("kill", 1, number, "await", duration=0.5)], network=NetworkLink(latency=0.1))
        run.run(8)
        assert run.seats[1].worker.alive
        assert whole(run)

    def test_it_waits_while_its_receiver_is_cut_off(self) -> None:
        cut = Fault("partition", 1, 0.5, duration=4.0)
        run = engine(faults=[cut], network=NetworkLink(latency=0.01))
        run.run(8)
        first = next((t, came) for rank, t, came in SEEN if rank == 1 and came)
        assert first[0] == 5
        assert [message.number for message in first[1]] == [0.0, 1.0, 2.0, 3.0]
        assert whole(run)

    @pytest.mark.long
    def test_batched_gradients_change_nothing(self) -> None:
        plain, batched = (
            SimulationEngine(task(), Writing(), workers=3, seed=1, cost=Cost(), batched=batched)
            for batched in (False, True)
        )
        plain.run(10)
        batched.run(10)
        assert [seat.worker.taken for seat in plain.seats] == [seat.worker.taken for seat in batched.seats]
        assert sum(seat.worker.taken for seat in plain.seats) > 0

    def test_bytes_are_counted_when_sent_and_when_received(self) -> None:
        run = engine(Writing(reads=(0, 2)))
        run.run(park_at=8)
        size = run.seats[0].worker.x.nbytes
        sent, received = [[getattr(s.driver.traffic, way) for s in run.seats] for way in ("sent", "received")]
        assert sent == [4 * size, 8 * size, 8 * size]  # four of worker 0 were refused
        assert received == [6 * size, 0, 7 * size]  # what arrives as a step begins is in the next


@dataclass(frozen=True)
class Wrong(Writing, name="wrong"):
    """Uses messages as they are not meant."""

    how: str = ""

    def sends_messages(self) -> bool:
        return self.how != "undeclared"

    async def step(self, w: Worker) -> None:
        op = w.send(w.rank if self.how == "itself" else 7 if self.how == "nobody" else 1 - w.rank, w.x)
        if self.how == "long":
            op = w.send(1 - w.rank, torch.cat([w.x, w.x]))
        await (w.start(op) if self.how == "started" else op)


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("itself", "sends a message to worker 0: it is none of the other 1"),
        ("nobody", "sends a message to worker 7"),
        ("long", r"sends 4 numbers of torch.float32; a message is like x: 2 of torch.float32"),
        ("started", "starts a Send, which nobody waits for: await it"),
        ("undeclared", r"uses w.send, and sends_messages\(\) of its scheme says that it does not"),
    ],
)
def test_what_cannot_be_sent_is_refused(how: str, reason: str) -> None:
    with pytest.raises(SchemeError, match=reason):
        simulate(quadratic(dim=2), Wrong(how=how), workers=2, steps=1)


class Desks:
    """Two workers' cells, as processes share them."""

    def __init__(self) -> None:
        self.steps, x0 = [0, 0], torch.zeros(3)
        self._cells = [MessageCells(rank, Writing().worker_state(x0, 2)) for rank in range(2)]

    def cells(self, rank: int) -> MessageCells:
        return self._cells[rank]

    def finished(self, rank: int) -> int:
        return self.steps[rank]

    def arrived(self, sender: int, slot: int) -> bool:
        return True

    def send(self, number: float, cut: int = 0) -> int | None:
        """Worker 0 sends to worker 1."""
        slot = free_slot(self, self._cells[0], cut)
        if slot is not None:
            self._cells[0].put(slot, Send(1, torch.full((3,), number), number), self.steps[0], cut)
        return slot

    def waiting(self, cut: int = 0) -> list[Place]:
        return arrived(self, self._cells[1], range(2), cut)

    def take(self, place: Place, cut: int = 0) -> PeerMessage:
        return self._cells[1].take(place, self._cells[0], self.steps[1], cut)


class TestInSharedCells:
    def test_it_is_seen_when_the_senders_step_is_finished(self) -> None:
        desks = Desks()
        assert desks.send(5.0) == 0
        assert desks.waiting() == []
        desks.steps[0] = 1
        assert desks.waiting() == [Place(0, 0, 1)]
        assert desks.take(Place(0, 0, 1)).number == 5.0
        assert desks.waiting() == []

    def test_its_slot_is_free_when_the_receivers_step_is_finished(self) -> None:
        desks = Desks()
        for number in range(MESSAGES):
            assert desks.send(number) == number
        desks.steps[0] = 1
        desks.take(desks.waiting()[2])
        assert desks.send(9.0) is None
        desks.steps[1] = 1
        assert desks.send(9.0) == 2
        desks.steps[0] = 2
        assert desks.waiting() == [Place(0, 0, 1), Place(0, 1, 1), Place(0, 3, 1), Place(0, 2, 2)]

    def test_a_message_that_is_half_written_is_never_read(self) -> None:
        """Killed while it wrote into the slot of a message that was taken: the step of the head is no step."""
        desks = Desks()
        desks.send(1.0)
        desks.steps[0] = 1
        head = desks.cells(0).heads[0]
        before = desks.cells(0).heads.copy()
        head[STEP], head[STEP + 1] = NEVER, 2
        assert desks.waiting() == []
        restore_rows(desks.cells(0).heads, before)
        assert desks.waiting() == [Place(0, 0, 1)]

    def test_what_comes_after_a_checkpoint_is_not_seen_before_it(self) -> None:
        """Both ways: a message, and the word that a message is taken. Else a checkpoint would have it twice, or not."""
        desks = Desks()
        desks.send(1.0, cut=4)
        desks.steps[0] = 1
        assert desks.waiting(cut=3) == []
        (place,) = desks.waiting(cut=4)
        for number in range(1, MESSAGES):
            desks.send(number)
        desks.take(place, cut=5)
        desks.steps[1] = 1
        assert desks.send(9.0, cut=4) is None
        assert desks.send(9.0, cut=5) == 0
        assert desks.cells(0).heads[0, CUT] == 5
