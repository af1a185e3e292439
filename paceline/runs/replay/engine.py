"""Replays a recorded launch in one process: every call in the order in which the server performed it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from paceline.config import build
from paceline.config.plan import Plan
from paceline.errors import DataError
from paceline.ops import Call, Group, Met, mapped
from paceline.result import digest
from paceline.runs.checkpoint import Checkpoint, load
from paceline.runs.order_history import History
from paceline.runs.order_log import REFUSED, ROSE, LogRecord, MemberEvent, RecordKind, probe_of, returned
from paceline.runs.replay.worker_replay import Parted, WorkerReplay
from paceline.runtime.call_scheduler import CallScheduler
from paceline.runtime.messages import SEQUENCE, Place
from paceline.scheme import Scheme
from paceline.state import State, Vector, mean_of
from paceline.task import Task


@dataclass(frozen=True)
class ReplayDifference:
    """Where the replay first differs from the record."""

    update: int
    where: str
    text: str


class _Over(Exception):
    """The replay differs from the record, or the record ends here."""


class ReplayEngine:
    """Replays one launch. `what_if`: hyper-parameters that the server uses from an update on, instead of its own.
    `claimed`: the update whose model the run says that it saved; `saved` is its digest in the replay."""

    def __init__(
        self,
        history: History,
        scheme: Scheme,
        task: Task,
        *,
        until: int | None = None,
        what_if: tuple[int, Mapping[str, Any]] | None = None,
        watch: Callable[[int], None] = lambda _: None,
        claimed: int | None = None,
    ) -> None:
        scheme = scheme.fitted(task.parameters())
        self.history, self.scheme, self.task = history, scheme, task
        self.until, self.what_if, self.watch, self.claimed = until, what_if, watch, claimed
        plan = history.plan
        self.difference: ReplayDifference | None = None
        self.gradients = 0
        self.matched: list[int] = []  # checkpoints whose model has the same bits
        self.saved: str | None = None
        self._methods = [scheme.methods[name] for name in sorted(scheme.methods)]
        start = history.start
        x0 = task.start(plan.seed).cpu()
        self.scheduler: CallScheduler | None = None
        if plan.device != "cpu" and not torch.cuda.is_available():
            raise DataError(f"the run computed on {plan.device}, and there is no GPU here: its bits cannot be had")
        if scheme.methods:
            state = scheme.server(x0, plan.workers)
            if history.on_gpu and plan.servers == 1:
                state = state.on(_device(plan, 0))
            self.scheduler = CallScheduler(scheme, state, plan.workers)
            x = self.scheduler.state.x
            self._probe = probe_of(x[: x.numel() // max(plan.servers, 1)])  # the lead server has only its own shard
        if start is not None:
            self._restore(start)
        self._start, self._begun_at = (x0, 0) if start is None else (start.tensors["model"], start.step)
        if claimed == self._begun_at:
            self.saved = digest(self._start)
        self._players: list[WorkerReplay] = []
        self._offered: dict[tuple[int, int], tuple[Vector, float]] = {}  # contributions that are in several means
        for life in history.lives:
            device = _device(plan, life.rank)
            own = task.on(device) if device.type != "cpu" else task
            resumed = None if life.begun["generation"] else start
            self._players.append(WorkerReplay(history, life, scheme, own, x0, device, resumed, self._judge))
        self._takers: dict[tuple[int, Place], list[WorkerReplay]] = {}  # of each message, the lives that received it
        for player in self._players:
            for taken in player.receipts():
                self._takers.setdefault(taken, []).append(player)
        self._last: dict[int, Vector] = {}  # the models of a decentralised run at `until`, by rank
        self.generation = self.position = 0
        self._centre: State | None = None
        self._models: dict[tuple[int, int], dict[int, Vector]] = {}  # at (generation, version), by rank

    def _restore(self, saved: Checkpoint) -> None:
        if self.scheduler is None:
            return
        state, vectors = self.scheduler.state, self.scheduler.state.vectors(self.scheme.uncut)
        state.restore({name: saved.tensors["server." + (name if name in vectors else f"0.{name}")] for name in state})
        self.scheduler.ledger.restore({name: saved.tensors[f"ledger.0.{name}"] for name in self.scheduler.ledger.cells})
        self.scheduler.scheme = build.scheme_of(self.scheme, saved.numbers["overrides"])

    @property
    def updates(self) -> int:
        if self.scheduler is not None:
            return int(self.scheduler.state.v)
        reached = max((int(player.worker.state.v) for player in self._players), default=self._begun_at)
        return reached if self.until is None else min(reached, self.until)

    def model(self) -> Vector:
        """The model of the centre now."""
        if self.scheduler is not None:
            return self.scheduler.scheme.model(self.scheduler.state).cpu().clone()
        if self.scheme.decentralised:
            return self._everybody()
        if self._centre is None:  # no worker has made a step
            return self._start.clone()
        return self.scheme.model(self._centre).cpu().clone()

    def run(self) -> None:
        """Replay until the record ends, `until` is reached or a difference is found."""
        with suppress(_Over), torch.no_grad():
            self._run()

    def _run(self) -> None:
        for generation in self.history.generations():
            if generation:
                self._go_back(generation)
            self.generation, self.position = generation, 0
            self._settle()
            for record in self.history.server.get(generation, []):
                if self._enough():
                    return
                self._perform(record)
                self.position += 1
                self._settle()

    def _enough(self) -> bool:
        return self.until is not None and self.updates >= self.until

    def _go_back(self, generation: int) -> None:
        saved = load(returned(self.history.path, generation))
        self._restore(saved)
        for player in self._players:
            if player.generation < generation and not player.over:
                player.go_back(generation, saved)

    def _settle(self) -> None:
        """Run every worker as far as it can go at this position of the server."""
        moved = True
        while moved and not (self.scheduler is not None and self._enough()):
            moved = False
            for player in self._players:
                if player.over or player.generation != self.generation:
                    continue
                if player.read is not None and player.read[-1] == self.position:
                    self._look(player)
                    moved = True
                moved |= self._go(player)
            moved |= self._meet()
            moved |= self._gather()
            moved |= self._exchange()

    def _go(self, player: WorkerReplay) -> bool:
        before = player.moves
        try:
            # a worker may have received what another sent in a later step: then all go on until all are at `until`
            ends = self.scheduler is None and not self.scheme.sends_messages()
            for _ in player.go(self.until if ends else None):
                if self.scheduler is None:
                    self._stepped(player)
        except Parted as parted:
            self._differ(player, str(parted))
        return player.moves != before

    def _stepped(self, player: WorkerReplay) -> None:
        """Without a server the workers hold the model: compare it where a checkpoint was written."""
        version = int(player.worker.state.v)
        if self.history.abandoned(player.life, self.generation, version):
            return
        if self.scheme.decentralised:
            self._kept(player, version)
            self.watch(version)
            if version == self.until:
                self._last[player.rank] = self.scheme.model(player.worker.state).cpu().clone()
                if self._last.keys() == {one.rank for one in self._players}:
                    raise _Over
            return
        if self._centre is None or version >= int(self._centre.v):
            self._centre = player.worker.state
        if self._noted(version):
            self._compare(version, self.scheme.model(player.worker.state).cpu())
        self.watch(version)

    def _kept(self, player: WorkerReplay, version: int) -> None:
        """A worker of a decentralised run has made a step: the model is compared once all workers in it have."""
        at = self.generation, version
        if not self._noted(version) or (at in self.history.averaged and player.rank not in self.history.averaged[at]):
            return
        models = self._models.setdefault(at, {})
        models[player.rank] = self.scheme.model(player.worker.state).cpu().clone()
        if models.keys() == {*self.history.averaged.get(at, ())}:
            self._compare(version, mean_of([models[rank] for rank in sorted(models)]))

    def _everybody(self) -> Vector:
        """The mean of the models of the workers that have come furthest, or to `until`."""
        if self._last:
            return mean_of([self._last[rank] for rank in sorted(self._last)])
        reached = {player.rank: player for player in self._players if int(player.worker.state.v) == self.updates}
        states = [reached[rank].worker.state for rank in sorted(reached)]
        return mean_of([self.scheme.model(state).cpu() for state in states]) if states else self._start.clone()

    def _gather(self) -> bool:
        """Give every worker at a meeting what it took there, once all that took part are there; False: none has."""
        offers = {
            (p.rank, number): offer
            for p in self._players
            for number, offer in p.offers.items()
            if p.generation == self.generation and (p.rank, p.life.number, number) not in self.history.unseen
        }
        ready = []
        for player in self._players:
            if player.meeting is None or player.generation != self.generation:
                continue
            number, pending = player.meeting
            own = player.offers[number]
            present = self._present(player.rank, number, own.among)
            if present is not None and all(pair in offers for pair in present.items()):
                numbers = {rank: offers[rank, present[rank]].number for rank in sorted(present)}
                vectors = {rank: offers[rank, present[rank]].v.clone() for rank in own.of if rank in present}
                ready.append((player, pending, Met(tuple(numbers), vectors, numbers)))
        for player, pending, met in ready:
            player.give(pending, met)
        return bool(ready)

    def _exchange(self) -> bool:
        """Let workers send and receive what was recorded; False if none can. A message is there when its sender has
        finished its step; its slot is free when every life that received it has."""
        moved = False
        for player in self._players:
            if player.posting is not None and player.generation == self.generation:
                slot = player.posting[2]
                before = Place(player.rank, slot, int(player.messages.heads[slot, SEQUENCE]))
                if all(one.over or before in one.collected for one in self._takers.get((self.generation, before), ())):
                    player.post()
                    moved = True
            if player.collecting is not None and player.generation == self.generation:
                found = [self._holder(place) for place in player.collecting[1]]
                if None not in found:
                    player.collect([sender for sender in found if sender is not None])
                    moved = True
        return moved

    def _holder(self, place: Place) -> WorkerReplay | None:
        """The first life of a worker that has the message of a place. A later life begins with the slots of the one
        before: of a step that was not finished, they may hold other vectors than their heads say."""
        for one in self._players:
            if one.rank == place.sender and one.generation == self.generation:
                if one.holds(place):
                    return one
                if not one.over:
                    return None
        return None

    def _look(self, player: WorkerReplay) -> None:
        assert self.scheduler is not None
        assert player.read is not None
        call, pending, _ = player.read
        state = self.scheduler.state
        result = call.method.function(self.scheduler.scheme.rates_at(state), state, *call.args)
        player.give(pending, mapped(Tensor.clone, result))

    def _meet(self) -> bool:
        """Compute one mean that all of its participants have arrived at; False if there is none."""
        there = {
            (p.rank, number): p
            for p in self._players
            for number in p.arrived
            if p.generation == self.generation and (p.rank, p.life.number, number) not in self.history.unseen
        }
        for (rank, number), player in there.items():
            if (rank, number) in self.history.torn:
                op, _ = player.arrived[number]
                self._offered.setdefault((rank, number), (op.v.clone(), op.weight))
        for (rank, number), player in there.items():
            present = self._present(rank, number, player.arrived[number][0].among)
            if present is None or any(pair not in there and pair not in self._offered for pair in present.items()):
                continue
            vectors, weights = zip(*(self._offer(pair, there) for pair in sorted(present.items())), strict=True)
            mean = mean_of(list(vectors), list(weights))
            for one, n in sorted(present.items()):
                # a member that died right after the mean may be the only one that has it
                if (one, n) in there and self.history.decided.get((one, n), present) == present:
                    _, pending = there[one, n].arrived.pop(n)
                    there[one, n].give(pending, mean.clone())
            return True
        return False

    def _offer(self, pair: tuple[int, int], there: Mapping[tuple[int, int], WorkerReplay]) -> tuple[Vector, float]:
        """A worker's contribution to a mean."""
        if pair in self._offered:
            return self._offered[pair]
        op, _ = there[pair].arrived[pair[1]]
        return op.v, op.weight

    def _present(self, rank: int, number: int, among: Group | None) -> dict[int, int] | None:
        """The participants of a mean: as recorded, or else all members, each at the mean of the same number."""
        decided = self.history.decided
        if (rank, number) in decided:
            return decided[rank, number]
        members = range(self.history.plan.workers) if among is None else among
        if any((member, number) in decided for member in members):
            return None  # the mean was computed without this late worker
        return dict.fromkeys(members, number)

    def _perform(self, record: LogRecord) -> None:
        assert self.scheduler is not None
        if record.kind == RecordKind.CALL:
            self._call(*record.values)
        elif record.kind == RecordKind.MEMBER:
            what, rank = record.values
            quorum = self.history.plan.quorum == "shrink" or what == MemberEvent.PARTED
            self.scheduler._member("joined" if what == MemberEvent.JOINED else "left", rank, quorum)
        elif record.kind == RecordKind.SAVE:
            if self._noted(self.updates):
                self._compare(self.updates, self.model())
        elif record.kind == RecordKind.SET:
            self.scheduler.scheme = build.scheme_of(self.scheduler.scheme, record.values[0])

    def _call(self, method: int, rank: int, flags: int, probe: int | None) -> None:
        scheduler = self.scheduler
        assert scheduler is not None
        player = self._caller(rank)
        if method >= len(self._methods):
            raise DataError(f"the order log calls method {method} of {self.scheme.name}, which has fewer: it changed")
        name = self._methods[method].name
        if player is None or not player.outbox or player.outbox[0][0].method is not self._methods[method]:
            if player is not None and not player.outbox and player.over and player.life.cut:
                raise _Over  # the record of this call is lost
            found = player.outbox[0][0].method.name + "()" if player is not None and player.outbox else "nothing"
            self._differ(player, f"worker:{rank} called {name}() here, and now {found}")
        call, pending = player.outbox.popleft()
        if self.what_if is not None and scheduler.state.v >= self.what_if[0]:
            scheduler.scheme = build.scheme_of(scheduler.scheme, self.what_if[1])
            self.what_if = (1 << 62, {})
        version, refused = scheduler.state.v, scheduler.ledger.cells.refused
        there = scheduler.state.x.device
        answer = scheduler.perform(rank, Call(call.method, mapped(lambda tensor: tensor.to(there), call.args)))
        now = (ROSE if scheduler.state.v != version else 0) | (
            REFUSED if scheduler.ledger.cells.refused != refused else 0
        )
        self.watch(scheduler.state.v)
        if now != flags or (self.what_if is None and probe is not None and self._probe() != probe):
            self._differ(player, f"{name}() of worker:{rank} leaves another x than it did then")
        if not call.method.silent:
            player.give(pending, answer.result)

    def _caller(self, rank: int) -> WorkerReplay | None:
        """The life that makes the calls of that worker now."""
        number = self.history.living(rank, (self.generation, self.position))
        return next((p for p in self._players if (p.rank, p.life.number) == (rank, number)), None)

    def _judge(self, player: WorkerReplay, recorded: float, loss: float) -> None:
        self.gradients += 1
        if self.what_if is None and recorded != loss and not (recorded != recorded and loss != loss):
            self._differ(player, f"the loss was {recorded!r} and is {loss!r}")

    def _noted(self, version: int) -> bool:
        """Whether the run has recorded, or claims, the digest of its model at this update of this generation."""
        return version == self.claimed or (self.generation, version) in self.history.checkpoints

    def _compare(self, version: int, model: Vector) -> None:
        if self.what_if is not None:
            return
        here = digest(model)
        if version == self.claimed:
            self.saved = here
        noted = self.history.checkpoints.get((self.generation, version))
        if noted is not None and here != noted:
            self.difference = ReplayDifference(version, f"checkpoint {version}", "the model has other bits")
            raise _Over
        if noted is not None and version not in self.matched:
            self.matched.append(version)

    def _differ(self, player: WorkerReplay | None, text: str) -> NoReturn:
        where = "the server" if player is None else f"worker:{player.rank}, step {player.worker.t}"
        self.difference = ReplayDifference(self.updates, where, text)
        raise _Over


def _device(plan: Plan, rank: int) -> torch.device:
    """The device of a worker; of the server, that of worker 0."""
    device = torch.device(plan.device)
    return torch.device("cuda", rank % torch.cuda.device_count()) if device == torch.device("cuda") else device
