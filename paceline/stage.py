"""Where the roles of a run on one machine meet: the plan, the board, the bells, and the state's shared memory."""

from __future__ import annotations

import json
import math
import os
import ssl
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from paceline import config
from paceline.accounts import staleness_of
from paceline.board import LANES, Bells, Board
from paceline.ledger import Ledger
from paceline.memory import WORD, Layout, Segment
from paceline.net import tls
from paceline.net.ports import Ports
from paceline.net.tls import Certificates
from paceline.plan import Plan
from paceline.result import Staleness
from paceline.scheme import Scheme
from paceline.seeds import mixed
from paceline.state import State, Vector

LANE_VECTORS = 4  # a call may carry so many vectors each way, and
LANE_BYTES = 1 << 22  # so much beside them; untouched pages cost nothing
HEAD_WORDS = 512
OVERRIDES = 4096


@dataclass(frozen=True)
class Undecided(Scheme, name="undecided"):
    """Stands for the scheme of a script until its `attach` says which one it is."""


UNDECIDED = Undecided()


@dataclass(frozen=True)
class Node:
    """Where a process is, and how it is reached from other nodes."""

    number: int = 0
    address: str = "127.0.0.1"
    secret: bytes | None = field(default=None, repr=False)  # None: there is no other node
    certificates: Certificates | None = None  # None: connections are not encrypted
    share: bool = True  # memory with other nodes of the same host
    store: tuple[str, int, bytes] | None = field(default=None, repr=False)  # address, port, secret: for collectives
    ports: Ports | None = None  # for everything that listens on this node; None: the system chooses

    @property
    def server_side(self) -> ssl.SSLContext | None:
        """For connections that come in, if they are encrypted."""
        return None if self.certificates is None else _contexts(self.certificates)[0]

    @property
    def client_side(self) -> ssl.SSLContext | None:
        """And for those that go out."""
        return None if self.certificates is None else _contexts(self.certificates)[1]


_contexts = cache(tls.contexts)
ALONE = Node()


class Stage:
    """One process's view of the run. The chief lays the memory out and fills it; everybody opens it."""

    def __init__(
        self,
        plan: Plan,
        scheme: Scheme,
        board: Board,
        bells: Bells,
        descriptor: int,
        node: Node = ALONE,
    ) -> None:
        self.plan, self.board, self.bells, self.node = plan, board, bells, node
        self.first_scheme = self.scheme = scheme
        self._descriptor = descriptor
        self._versions: list[int] = []  # where the centre's version stands
        self._direct = False
        self.segment: Segment
        self.layout: Layout

    def lay_out(self, x0: Vector, buffers: Mapping[str, Tensor], notes: dict[str, Any]) -> None:
        """Decide where everything lies, and make the memory so large. Only the chief does this."""
        plan, scheme, layout = self.plan, self.scheme, Layout()
        cap = LANE_VECTORS * x0.numel() * x0.element_size() + LANE_BYTES
        layout.notes = {"vectors": [], "length": x0.numel(), **notes}
        saved: dict[str, Tensor] = {}
        if scheme.methods:
            state = scheme.server(x0, plan.workers)
            vectors = state.vectors(scheme.uncut)
            layout.notes["vectors"] = sorted(vectors)
            ledger = Ledger.fresh(plan.workers, ()).cells
            for name in state:
                saved["server." + (name if name in vectors else f"0.{name}")] = state.cell(name)
            saved |= {f"ledger.0.{name}": ledger.cell(name) for name in ledger}
            # the workers that the server's state counts: it goes aside with that state
            saved["ledger.0.present"] = torch.ones(plan.workers, dtype=torch.int64)
            for shard in range(1, plan.servers):
                for name in set(state) - vectors:
                    layout.like(f"server.{shard}.{name}", state.cell(name))
                for name in ledger:
                    layout.like(f"ledger.{shard}.{name}", ledger.cell(name))
            if self.direct():
                for rank in range(plan.workers):
                    saved |= {f"tally.{rank}.{name}": ledger.cell(name) for name in ledger}
        for rank in range(plan.workers):
            cells = scheme.worker(x0, plan.workers)
            saved |= {f"worker.{rank}.{name}": cells.cell(name) for name in cells}
            saved |= {f"buffer.{rank}.{name}": buffer for name, buffer in buffers.items()}
            stream = torch.Generator().manual_seed(mixed(plan.seed, "worker", rank))
            saved[f"rng.{rank}"] = stream.get_state()
            saved[f"person.{rank}"] = torch.zeros(3, dtype=torch.int64)  # t, gradients, samples
            for number in range(2):
                layout.like(f"grad.{rank}.{number}", x0)
            layout.add(f"slot.{rank}", (cap,), torch.uint8)
            layout.add(f"sum.{rank}", (cap,), torch.uint8)
            for lane in range(LANES):
                layout.add(f"lane.{rank}.{lane}.head", (2 * HEAD_WORDS,), torch.int64)
                layout.add(f"lane.{rank}.{lane}.args", (cap,), torch.uint8)
                layout.add(f"lane.{rank}.{lane}.reply", (cap,), torch.uint8)
        for name, tensor in saved.items():
            layout.like(name, tensor)
            layout.like(f"keep.{name}", tensor)
        layout.add("overrides", (OVERRIDES,), torch.uint8)
        layout.add("owed", (plan.servers, plan.workers * LANES, 3), torch.int64)
        os.ftruncate(self._descriptor, 0)  # what a predecessor had begun to fill is void
        os.ftruncate(self._descriptor, layout.size)
        self.segment, self.layout = Segment(self._descriptor, layout.size), layout
        layout.write(self.segment)
        for name, tensor in saved.items():
            layout.tensor(self.segment, name).copy_(tensor)
        for shard in range(1, plan.servers if scheme.methods else 0):
            for name in layout.places:
                if name.startswith(f"server.{shard}."):
                    self.tensor(name).copy_(self.tensor("server.0." + name.split(".", 2)[2]))
        if scheme.methods:
            for name in ("ledger.", "tally."):
                for place in layout.places:
                    if place.startswith(name) and place.endswith(".held"):
                        for rank in range(plan.workers):
                            self.tensor(place)[scheme.holder(rank)] = 0
        self.board.put("size", layout.size)

    def open(self) -> None:
        """Map what the chief has laid out."""
        self.segment = Segment(self._descriptor, self.board.get("size"))
        self.layout = Layout.read(self.segment)
        if "scheme" in self.layout.notes:  # a script's own choice, which its chief alone knew
            named = self.layout.notes["scheme"]
            self.first_scheme = self.scheme = config.scheme_of(named["name"], named["hyper"])
            self.plan = replace(self.plan, **self.layout.notes["plan"])
        self.load_overrides()

    def device(self, rank: int, asked: str = "") -> torch.device:
        """Where a worker computes, or with `asked` another process: `cuda` gives each one a GPU of its own, as far as
        there are."""
        if (asked or self.plan.device) == "cuda":
            number = rank if asked else rank % self.plan.hosts
            return torch.device("cuda", number % max(torch.cuda.device_count(), 1))
        return torch.device(asked or self.plan.device)

    def near(self, shard: int) -> bool:
        """Whether a server works on the memory of this node."""
        return bool(self.board.server_node[shard] == self.node.number)

    def beside(self, rank: int) -> bool:
        """Whether a worker works on the memory of this node."""
        return bool(self.board.node[rank] == self.node.number)

    def spans(self, names: Iterable[str]) -> list[tuple[int, int]]:
        """Where tensors lie: offset and size in bytes."""
        found = []
        for name in names:
            place = self.layout.places[name]
            found.append((place.offset, math.prod(place.shape) * place.dtype.itemsize))
        return found

    def spans_from_worker(self, rank: int) -> list[tuple[int, int]]:
        """What a worker of another node may write in this node's memory."""
        own = (f"grad.{rank}.", f"worker.{rank}.", f"buffer.{rank}.")
        lanes = [f"lane.{rank}.{number}.args" for number in range(LANES)]  # words come beside, and are looked at
        return self.spans([*(name for name in self.layout.places if name.startswith(own)), *lanes])

    def spans_from_server(self, rank: int) -> list[tuple[int, int]]:
        """What a server of another node may write in the memory of a worker's node."""
        own = ("server.", "ledger.", "keep.server.", "keep.ledger.", "overrides")
        lanes = [f"lane.{rank}.{number}.reply" for number in range(LANES)]
        return self.spans([*(name for name in self.layout.places if name.startswith(own)), *lanes])

    def direct(self) -> bool:
        """Whether workers change the server's vector themselves."""
        return any(not method.atomic for method in self.scheme.methods.values())

    def tensor(self, name: str) -> Tensor:
        return self.layout.tensor(self.segment, name)

    def server_state(self, *, prefix: str = "") -> State:
        """The server's whole state: full vectors, and the numbers as the lead server has them."""
        cells = self.layout.under(self.segment, f"{prefix}server.0.")
        cells |= {name: self.tensor(f"{prefix}server.{name}") for name in self.layout.notes["vectors"]}
        return State.over(cells)

    def shard_state(self, shard: int) -> State:
        """What one server works on: its range of the vectors, its own copy of the rest."""
        low, high = self.bounds(shard)
        cells = self.layout.under(self.segment, f"server.{shard}.")
        cells |= {name: self.tensor(f"server.{name}")[..., low:high] for name in self.layout.notes["vectors"]}
        return State.over(cells)

    def bounds(self, shard: int) -> tuple[int, int]:
        length, servers = self.layout.notes["length"], max(self.plan.servers, 1)
        return length * shard // servers, length * (shard + 1) // servers

    def worker_state(self, rank: int, *, prefix: str = "") -> State:
        return State.over(self.layout.under(self.segment, f"{prefix}worker.{rank}."))

    def buffers(self, rank: int, *, prefix: str = "") -> dict[str, Tensor]:
        return self.layout.under(self.segment, f"{prefix}buffer.{rank}.")

    def ledger(self, prefix: str) -> Ledger:
        return Ledger(State.over(self.layout.under(self.segment, prefix)))

    def centre_of(self) -> int:
        """Where there is no server: the worker whose state counts, the chief or the lowest living one."""
        alive = self.board.alive
        return next((rank for rank in range(self.plan.workers) if alive[rank]), 0)

    def version_words(self) -> list[int]:
        """Where the versions of the centre stand: the server's, or every worker's."""
        if not self._versions:
            workers = range(self.plan.workers)
            names = ["server.0.v"] if self.scheme.methods else [f"worker.{rank}.v" for rank in workers]
            self._versions = [self.layout.places[name].offset // WORD for name in names]
            self._direct = self.direct()
        return self._versions

    def versions(self) -> list[int]:
        words = self.segment.words
        return [words[at] for at in self.version_words()]

    def set_version(self, number: int, version: int) -> None:
        """What another node has told."""
        self.segment.words[self.version_words()[number]] = version

    @property
    def updates(self) -> int:
        """Changes of the centre so far."""
        if not self._versions:
            self.version_words()
        counted: int = self.segment.words[self._versions[0 if len(self._versions) == 1 else self.centre_of()]]
        return counted + sum(self.board.direct) if self._direct else counted

    @property
    def furthest(self) -> int:
        """Changes of the centre that anybody has made: without a server, one worker may be an update ahead."""
        updates = self.updates
        return updates if self.scheme.methods else max(self.segment.words[at] for at in self._versions)

    def staleness(self) -> Staleness:
        """As the server, or the workers that write into its vector themselves, have counted it."""
        gradients = sum(self.board.gradients)
        if not self.scheme.methods:
            return Staleness(histogram={0: gradients} if gradients else {})
        prefixes = ["ledger.0."]
        if self.direct():
            prefixes += [f"tally.{rank}." for rank in range(self.plan.workers)]
        return staleness_of([self.ledger(prefix) for prefix in prefixes], self.updates)

    def save_overrides(self, hyper: Mapping[str, Any]) -> None:
        """Hyper-parameters that were changed on the way; whoever starts later takes them over."""
        text = json.dumps(dict(hyper)).encode()
        area = self.layout.places["overrides"].offset
        self.segment.memory[area + 8 : area + 8 + len(text)] = text
        self.segment.words[area // 8] = len(text)

    def load_overrides(self) -> dict[str, Any]:
        area = self.layout.places["overrides"].offset
        length = self.segment.words[area // 8]
        hyper: dict[str, Any] = json.loads(self.segment.memory[area + 8 : area + 8 + length]) if length else {}
        if hyper:
            self.scheme = config.scheme_of(self.first_scheme, hyper)
        return hyper

    def now(self) -> int:
        return time.monotonic_ns()

    def seconds(self) -> float:
        """Since the launch."""
        return (time.monotonic_ns() - self.board.get("began")) / 1e9
