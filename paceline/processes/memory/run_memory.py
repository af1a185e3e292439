"""What the processes of a run on one node share: the plan, the board, the wakeup pipes, and the memory of the state."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from paceline.compressed_sites import CompressedSites
from paceline.config import build, discovery
from paceline.config.endpoint import ALONE, Endpoint
from paceline.config.plan import Plan
from paceline.ops import MESSAGE_CELLS
from paceline.processes.memory.board import MAILBOXES, Board
from paceline.processes.memory.gpu_memory import GpuMemory, NoSharing
from paceline.processes.memory.segment import WORD, Layout, Segment
from paceline.processes.memory.wakeup import Wakeup
from paceline.processes.transport import Transport
from paceline.result import Staleness
from paceline.runs import order_log
from paceline.runtime.staleness import StalenessLedger, staleness_of
from paceline.sampling import mixed
from paceline.scheme import Scheme
from paceline.state import State, Vector

MAILBOX_VECTORS = 4  # vectors that a call may carry each way, and
MAILBOX_BYTES = 1 << 22  # bytes beside them; untouched pages cost nothing
HEAD_WORDS = 512
OVERRIDES = 4096
GPU_BYTES = 1 << 20  # bytes beside one vector that a mean may carry on a GPU


def undone(scheme: Scheme, cells: State) -> list[str]:
    """The cells of a worker that are set back if it dies inside a step, because its messages leave at the end of one.
    Not the vectors of messages: those that are under way do not change."""
    return [name for name in cells if name != MESSAGE_CELLS[0]] if scheme.sends_messages() else []


class RunMemory:
    """One process's view of the run. The chief lays the memory out and fills it; the others open it."""

    def __init__(
        self,
        plan: Plan,
        scheme: Scheme,
        board: Board,
        wakeup: Wakeup,
        descriptor: int,
        node: Endpoint = ALONE,
        letters: tuple[int, int] | None = None,
    ) -> None:
        """`letters`: where the descriptors of GPU memory are; None: this run shares none."""
        self.plan, self.board, self.wakeup, self.node = plan, board, wakeup, node
        self.transport: Transport = discovery.transport(node.transport)
        self.first_scheme = self.scheme = scheme
        self._descriptor, self._letters = descriptor, letters
        self._sites: CompressedSites | None = None  # once they are known
        self._versions: list[int] = []  # words that hold the centre's version
        self._direct = False
        self.replaced: set[int] = set()  # absent workers whose parts of the last checkpoint are copies of another's
        self.no_sharing: str | None = None  # why the state is not in the memory of the GPUs that compute
        self.segment: Segment
        self.layout: Layout

    def lay_out(self, x0: Vector, buffers: Mapping[str, Tensor], notes: dict[str, Any]) -> None:
        """Decide the offset of every tensor, and allocate the memory for them. Only the chief does this."""
        gpus: list[int] = []
        if self.plan.device != "cpu" and self.node == ALONE and self._letters is not None:
            gpus = [self.device(rank).index or 0 for rank in range(self.plan.workers)]
        try:
            self._lay_out(x0, buffers, notes, gpus)
        except NoSharing as error:
            self.no_sharing = str(error)
            self._lay_out(x0, buffers, notes, [])

    def _lay_out(self, x0: Vector, buffers: Mapping[str, Tensor], notes: dict[str, Any], gpus: Sequence[int]) -> None:
        """`gpus`: the number of each worker's GPU, if their memory holds the state."""
        self.scheme = self.scheme.fitted(notes.get("parameters") or ())
        plan, scheme, layout = self.plan, self.scheme, Layout()
        cap = MAILBOX_VECTORS * x0.numel() * x0.element_size() + MAILBOX_BYTES
        layout.notes = {"vectors": [], "length": x0.numel(), **notes}
        saved: dict[str, Tensor] = {}  # what is in a checkpoint
        copies: dict[str, Tensor] = {}  # the other servers' own numbers
        if scheme.methods:
            state = scheme.server(x0, plan.workers)
            vectors = state.vectors(scheme.uncut)
            layout.notes["vectors"] = sorted(vectors)
            ledger = StalenessLedger.fresh(plan.workers, ()).cells
            for name in state:
                saved["server." + (name if name in vectors else f"0.{name}")] = state.cell(name)
            saved |= {f"ledger.0.{name}": ledger.cell(name) for name in ledger}
            # the workers that the server's state counts: copied to `keep.` together with that state
            saved["ledger.0.present"] = torch.ones(plan.workers, dtype=torch.int64)
            for shard in range(1, plan.servers):
                copies |= {f"server.{shard}.{name}": state.cell(name) for name in set(state) - vectors}
                for name in ledger:
                    layout.like(f"ledger.{shard}.{name}", ledger.cell(name))
            if self.direct():
                for rank in range(plan.workers):
                    saved |= {f"tally.{rank}.{name}": ledger.cell(name) for name in ledger}
        cells = scheme.worker_state(x0, plan.workers)
        for rank in range(plan.workers):
            saved |= {f"worker.{rank}.{name}": cells.cell(name) for name in cells}
            saved |= {f"buffer.{rank}.{name}": buffer for name, buffer in buffers.items()}
            stream = torch.Generator().manual_seed(mixed(plan.seed, "worker", rank))
            saved[f"rng.{rank}"] = stream.get_state()
            saved[f"person.{rank}"] = torch.zeros(3, dtype=torch.int64)  # t, gradients, samples
            if scheme.sends_messages():  # the cells as the step found them
                layout.add(f"undo_step.{rank}", (1,), torch.int64)
                for name in undone(scheme, cells):
                    layout.like(f"undo.{rank}.{name}", cells.cell(name))
            gpu = gpus[rank] if gpus else None
            for number in range(2):
                layout.like(f"grad.{rank}.{number}", x0, gpu)
            # memory of a GPU is taken at once, that of the host when it is written
            room = cap if gpu is None else 2 * (x0.nbytes + GPU_BYTES)
            layout.add(f"slot.{rank}", (room,), torch.uint8, gpu)
            layout.add(f"sum.{rank}", (room if gpu is None else room // 2,), torch.uint8, gpu)
            for mailbox in range(MAILBOXES):
                layout.add(f"lane.{rank}.{mailbox}.head", (2 * HEAD_WORDS,), torch.int64)
                layout.add(f"lane.{rank}.{mailbox}.args", (cap,), torch.uint8)
                layout.add(f"lane.{rank}.{mailbox}.reply", (cap,), torch.uint8)
        for name, tensor in saved.items():
            layout.like(name, tensor, self._home(name, tensor, gpus))
            layout.like(f"keep.{name}", tensor)
        for name, tensor in copies.items():
            layout.like(name, tensor)
        layout.add("overrides", (OVERRIDES,), torch.uint8)
        layout.add("kept", (plan.workers,), torch.int64)  # 1: a worker's part in `keep.` is whole
        layout.add("owed", (plan.servers, plan.workers * MAILBOXES, 3), torch.int64)
        os.ftruncate(self._descriptor, 0)  # discard what a chief that died had begun to fill
        os.ftruncate(self._descriptor, layout.size)
        self.segment, self.layout = Segment(self._descriptor, layout.size), layout
        if layout.gpus:
            assert self._letters is not None
            self.segment.gpus = GpuMemory.create(self._letters, layout.gpus)
            layout.gpus = self.segment.gpus.sizes
        layout.write(self.segment)
        for name, tensor in (saved | copies).items():
            self.tensor(name).copy_(tensor)
        for name in layout.places:
            if name.startswith(("ledger.", "tally.")) and name.endswith(".held"):
                for rank in range(plan.workers):
                    self.tensor(name)[scheme.holder(rank)] = 0
        self.synchronize()
        self.board.put("size", layout.size)

    def _home(self, name: str, tensor: Tensor, gpus: Sequence[int]) -> int | None:
        """The GPU that holds a tensor of the state; None: it is in the memory of the host, where single numbers are
        read and written without waiting for a GPU."""
        kind, _, rest = name.partition(".")
        if not gpus or kind not in ("worker", "buffer", "server") or (kind != "buffer" and not tensor.dim()):
            return None
        if kind == "server":
            return gpus[0] if self.plan.servers == 1 else None  # several servers work on the CPU
        return gpus[int(rest.partition(".")[0])]

    @property
    def on_gpu(self) -> bool:
        """Whether workers' cells, gradients and, with one server, its vectors are in the memory of GPUs."""
        return bool(self.layout.gpus)

    def open(self) -> None:
        """Map what the chief has laid out."""
        self.segment = Segment(self._descriptor, self.board.get("size"))
        self.layout = Layout.read(self.segment)
        if self.layout.gpus:
            assert self._letters is not None
            self.segment.gpus = GpuMemory(self._letters, self.layout.gpus)
        if "scheme" in self.layout.notes:  # a script's own choice, which its chief alone knew
            named = self.layout.notes["scheme"]
            self.plan = replace(self.plan, **self.layout.notes["plan"])
            made = build.scheme_of(named["name"], named["hyper"])
            self.first_scheme = self.scheme = build.compressing(made, self.plan.compress)
        self.load_overrides()

    def compressed_sites(self) -> CompressedSites | None:
        """What workers compress of what they send, if anything."""
        if self._sites is None and self.scheme.compressor is not None:
            self._sites = self.scheme.compressed_sites(self.layout.notes["length"])
        return self._sites

    def own_cells(self) -> frozenset[str]:
        """Cells that a worker keeps when it takes over those of another."""
        return self.scheme.own_cells(self.layout.notes["length"])

    def device(self, rank: int, asked: str = "") -> torch.device:
        """The device of a worker, or with `asked` of another process: `cuda` gives each one its own GPU while there
        are enough."""
        if (asked or self.plan.device) == "cuda":
            number = rank if asked else rank % self.plan.hosts
            return torch.device("cuda", number % max(torch.cuda.device_count(), 1))
        return torch.device(asked or self.plan.device)

    def near(self, shard: int) -> bool:
        """Whether a server is on this node."""
        return bool(self.board.server_node[shard] == self.node.number)

    def beside(self, rank: int) -> bool:
        """Whether a worker is on this node."""
        return bool(self.board.node[rank] == self.node.number)

    def spans(self, names: Iterable[str]) -> list[tuple[int, int]]:
        """Offset and size of tensors, in bytes."""
        places = (self.layout.places[name] for name in names)
        return [(place.offset, place.nbytes) for place in places]

    def spans_from_worker(self, rank: int) -> list[tuple[int, int]]:
        """What a worker of another node may write in this node's memory. The words of its calls are not among it: they
        are checked before they are written."""
        own = (f"grad.{rank}.", f"worker.{rank}.", f"buffer.{rank}.")
        return self._spans_of(own, rank, "args")

    def spans_from_server(self, rank: int) -> list[tuple[int, int]]:
        """What a server of another node may write in the memory of a worker's node."""
        own = ("server.", "ledger.", "keep.server.", "keep.ledger.", "overrides")
        return self._spans_of(own, rank, "reply")

    def _spans_of(self, prefixes: tuple[str, ...], rank: int, area: str) -> list[tuple[int, int]]:
        """Spans of the tensors with these prefixes, and of an area of all mailboxes of a worker."""
        mailboxes = [f"lane.{rank}.{number}.{area}" for number in range(MAILBOXES)]
        return self.spans([*(name for name in self.layout.places if name.startswith(prefixes)), *mailboxes])

    def locked_calls(self) -> bool:
        """Whether workers perform the server's calls themselves, under its lock: there is one server, and all processes
        share its memory."""
        return bool(self.scheme.methods) and self.plan.servers == 1 and self.node.secret is None

    def recorded(self) -> bool:
        """Whether the roles keep order logs: the run can be replayed."""
        plan = self.plan
        kept = plan.record and not plan.script and not self.direct()
        return kept and order_log.place(plan.directory, plan.launch).is_dir()

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
        return State.over(cells, low)

    def bounds(self, shard: int) -> tuple[int, int]:
        length, servers = self.layout.notes["length"], max(self.plan.servers, 1)
        return length * shard // servers, length * (shard + 1) // servers

    def worker_state(self, rank: int, *, prefix: str = "") -> State:
        cells = self.layout.under(self.segment, f"{prefix}worker.{rank}.")
        if not prefix and self.scheme.reads_in_place and self.locked_calls():
            shared = self.tensor("server.x")
            if shared.device == cells["x"].device:
                cells["x"] = shared
        return State.over(cells)

    def buffers(self, rank: int, *, prefix: str = "") -> dict[str, Tensor]:
        return self.layout.under(self.segment, f"{prefix}buffer.{rank}.")

    def ledger(self, prefix: str) -> StalenessLedger:
        return StalenessLedger(State.over(self.layout.under(self.segment, prefix)))

    def comes_to(self, rank: int) -> bool:
        """Whether a worker will come to a step that it has not reached: it is alive; or it has died, and continues from
        its own cells, not from those of a worker that is there."""
        board = self.board
        return bool(board.alive[rank] or (self.scheme.sends_messages() and not board.gone[rank]))

    def centre_of(self) -> int:
        """Where there is no server: the worker whose state counts, the lowest one alive."""
        alive = self.board.alive
        return next((rank for rank in range(self.plan.workers) if alive[rank]), 0)

    def version_words(self) -> list[int]:
        """The words that hold the centre's version: the server's, or every worker's."""
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
        """Take over a version from another node."""
        self.segment.words[self.version_words()[number]] = version

    @property
    def updates(self) -> int:
        """Changes of the centre so far."""
        if not self._versions:
            self.version_words()
        if self.scheme.decentralised:
            made = self.versions()
            return min((v for rank, v in enumerate(made) if self.comes_to(rank)), default=made[0])
        counted: int = self.segment.words[self._versions[0 if len(self._versions) == 1 else self.centre_of()]]
        return counted + sum(self.board.direct) if self._direct else counted

    @property
    def furthest(self) -> int:
        """The most changes of the centre that any worker has: without a server, one may be an update ahead."""
        updates = self.updates
        return updates if self.scheme.methods else max(self.segment.words[at] for at in self._versions)

    def staleness(self) -> Staleness:
        """As the server, or the workers that write into its vector themselves, have counted it."""
        prefixes = ["ledger.0."] if self.scheme.methods else []
        if self.direct():
            prefixes += [f"tally.{rank}." for rank in range(self.plan.workers)]
        return staleness_of([self.ledger(prefix) for prefix in prefixes], self.updates, sum(self.board.gradients))

    def save_overrides(self, hyper: Mapping[str, Any]) -> None:
        """Keep hyper-parameters that hooks have changed, for processes that start later."""
        text = json.dumps(dict(hyper)).encode()
        area = self.layout.places["overrides"].offset
        self.segment.memory[area + 8 : area + 8 + len(text)] = text
        self.segment.words[area // 8] = len(text)

    @property
    def overrides(self) -> dict[str, Any]:
        """Hyper-parameters that hooks have changed."""
        area = self.layout.places["overrides"].offset
        length = self.segment.words[area // 8]
        hyper: dict[str, Any] = json.loads(self.segment.memory[area + 8 : area + 8 + length]) if length else {}
        return hyper

    def load_overrides(self) -> None:
        """Use the scheme with the changes of hooks, or without any if the run has returned to before them."""
        self.scheme = self.scheme_with(self.overrides)

    def scheme_with(self, hyper: Mapping[str, Any]) -> Scheme:
        """The scheme with other hyper-parameters, for the parameters of this run's vector."""
        return build.scheme_of(self.first_scheme.fitted(self.layout.notes.get("parameters") or ()), hyper)

    def stop(self, how: int) -> None:
        """Stop the run, and wake every process of it."""
        self.board.stop(how)
        self.wakeup.ring_all()

    def synchronize(self) -> None:
        """Wait until this process's work on a GPU is finished: before other processes are told of a tensor that it has
        written or read. Without a GPU there is nothing to wait for."""
        if self.segment.gpus is not None:
            self.segment.gpus.synchronize()

    def now(self) -> int:
        return time.monotonic_ns()

    def seconds(self) -> float:
        """Since the launch."""
        return (time.monotonic_ns() - self.board.get("began")) / 1e9
