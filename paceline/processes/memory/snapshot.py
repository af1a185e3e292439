"""Snapshots of the run's state: shared memory to a checkpoint on disk, and back.

Every role copies its part of the state to the tensors named `keep.…`: a worker between two steps, a server between two
calls. The chief writes these tensors to disk. Servers copy their part last, so no worker's part is newer than theirs:
after a restore no worker waits for a version that the servers have not reached.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from paceline.config.build import hyper_of
from paceline.config.plan import Plan
from paceline.errors import UsageError
from paceline.ops import MESSAGE_CELLS
from paceline.processes.memory.board import FAILED, STOP, fence
from paceline.processes.memory.run_memory import RunMemory
from paceline.runs import checkpoint
from paceline.runs.checkpoint import Checkpoint
from paceline.runtime.messages import CUT
from paceline.scheme import Scheme
from paceline.state import Vector, mean_of
from paceline.task import average_buffers

KEEP = "keep."


def own_names(memory: RunMemory, rank: int) -> list[str]:
    """The names of the tensors of a worker's part."""
    whole = {f"rng.{rank}", f"person.{rank}"}
    prefixes = (f"worker.{rank}.", f"buffer.{rank}.", f"tally.{rank}.")
    return [name for name in memory.layout.places if name in whole or name.startswith(prefixes)]


def keep_worker(memory: RunMemory, rank: int, generator: torch.Generator | None) -> None:
    """Copy a worker's part to `keep.…`; call it between two steps of the worker."""
    start_keeping_worker(memory, rank, generator).finish()


def start_keeping_worker(memory: RunMemory, rank: int, generator: torch.Generator | None) -> KeptPart:
    """The same, but what is in the memory of a GPU is copied while the worker computes."""
    board = memory.board
    if generator is not None:
        memory.tensor(f"rng.{rank}").copy_(generator.get_state())
    counted = [board.t[rank], board.gradients[rank], board.samples[rank]]
    memory.tensor(f"person.{rank}").copy_(torch.tensor(counted))
    names = own_names(memory, rank)
    return KeptPart(memory, [(memory.tensor(KEEP + name), memory.tensor(name)) for name in names], rank)


def keep_shard(memory: RunMemory, shard: int) -> None:
    """Copy a server's part to `keep.…`; call it between two calls."""
    part = zip(shard_part(memory, shard, KEEP), shard_part(memory, shard), strict=True)
    KeptPart(memory, list(part)).finish()
    if shard == 0:
        memory.tensor(f"{KEEP}server.0.v").add_(sum(memory.board.direct))


class KeptPart:
    """A part of the state on its way to `keep.…`. Tensors of the host are copied at once. Tensors of a GPU are copied
    there first, and leave it on a stream of their own: training continues meanwhile. A worker's part (`rank`) is marked
    once it is whole: that of a worker that was killed while it copied is not used."""

    def __init__(self, memory: RunMemory, pairs: list[tuple[Tensor, Tensor]], rank: int | None = None) -> None:
        self._whole = None if rank is None else memory.tensor("kept")[rank]
        self._mark(whole=False)
        leaving = [(kept, tensor) for kept, tensor in pairs if tensor.is_cuda]
        for kept, tensor in pairs:
            if not tensor.is_cuda:
                kept.copy_(tensor)
        self._event: torch.cuda.Event | None = None
        if leaving:
            self._leave(memory, leaving)
        else:
            self._mark(whole=True)

    def _mark(self, *, whole: bool) -> None:
        if self._whole is not None:
            self._whole.fill_(int(whole))
            fence()

    def _leave(self, memory: RunMemory, pairs: list[tuple[Tensor, Tensor]]) -> None:
        device = pairs[0][1].device
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        copies = [(kept, tensor.clone()) for kept, tensor in pairs]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for kept, copy in copies:
                place = memory.segment.offset(kept)
                pinned = place is not None and memory.segment.pin(place, kept.nbytes)
                kept.copy_(copy, non_blocking=pinned)
                copy.record_stream(stream)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(stream)

    def done(self) -> bool:
        if self._event is None:
            return True
        if not self._event.query():  # type: ignore[no-untyped-call]
            return False
        self.finish()
        return True

    def finish(self) -> None:
        """Wait until all is copied."""
        if self._event is not None:
            self._event.synchronize()
            self._mark(whole=True)


def shard_part(memory: RunMemory, shard: int, prefix: str = "") -> list[Tensor]:
    """All that is a server's to tell: its range of the vectors, and if it is the first, numbers and ledger."""
    low, high = memory.bounds(shard)
    part = [memory.tensor(f"{prefix}server.{name}")[..., low:high] for name in memory.layout.notes["vectors"]]
    return part + shard_counts(memory, shard, prefix)


def shard_counts(memory: RunMemory, shard: int, prefix: str = "") -> list[Tensor]:
    """The first server's numbers and ledger; of another server nothing."""
    own = (f"{prefix}server.0.", f"{prefix}ledger.0.")
    return [memory.tensor(name) for name in memory.layout.places if name.startswith(own)] if shard == 0 else []


def keep_all(memory: RunMemory) -> None:
    """Copy all parts to `keep.…`; only before the first step, while no process changes them."""
    for rank in range(memory.plan.workers):
        keep_worker(memory, rank, None)
    if memory.scheme.methods:
        for shard in range(memory.plan.servers):
            keep_shard(memory, shard)


def release(memory: RunMemory, ranks: Sequence[int]) -> None:
    """The parts of these workers and of the servers are in the newest checkpoint: give the memory of their copies back.
    Until a worker copies its part again, the one of that checkpoint counts."""
    if memory.on_gpu or memory.node.secret is not None:  # a GPU copies to it directly; other nodes read it
        return
    for rank in ranks:
        memory.tensor("kept")[rank] = 0
    fence()
    names = [name for rank in ranks for name in own_names(memory, rank)]
    names += [name for name in memory.layout.places if name.startswith("server.")]
    for name in names:
        if (place := memory.layout.places.get(KEEP + name)) is not None:
            memory.segment.release(place.offset, place.nbytes)


def model_of(memory: RunMemory, *, prefix: str = "") -> Vector:
    """The vector that is evaluated and saved; a view, not a copy."""
    if memory.scheme.methods:
        return memory.scheme.model(memory.server_state(prefix=prefix))
    if memory.scheme.decentralised:
        return mean_of([memory.scheme.model(memory.worker_state(r, prefix=prefix)) for r in averaged(memory, prefix)])
    return memory.scheme.model(memory.worker_state(memory.centre_of(), prefix=prefix))


def averaged(memory: RunMemory, prefix: str = "") -> list[int]:
    """Of a decentralised run: the workers whose models the model is the mean of. In `keep.…` those with a part of the
    common step; else the living ones of this node, in whatever step they are."""
    lead, ranks = memory.centre_of(), range(memory.plan.workers)
    if prefix != KEEP:
        living = [r for r in ranks if memory.board.alive[r] and memory.beside(r)]
        return living or ([*ranks] if int(memory.tensor(f"worker.{lead}.v")) else [lead])
    version, kept = int(memory.tensor(f"{KEEP}worker.{lead}.v")), memory.tensor("kept").tolist()
    if not version:
        return [lead]  # all are alike
    there = [r for r in ranks if int(memory.tensor(f"{KEEP}worker.{r}.v")) == version and kept[r]]
    return [r for r in there if r not in memory.replaced] or [lead]


def steady(memory: RunMemory) -> Vector:
    """A copy of the model, taken while no server is inside a call."""
    mark, direct = memory.board.mark, memory.direct()
    if memory.scheme.decentralised and memory.board.get("closing"):  # the other workers have left
        return model_of(memory, prefix=KEEP)
    if not all(memory.near(shard) for shard in range(memory.plan.servers if memory.scheme.methods else 0)):
        return model_of(memory).clone()  # this node's copy, which no server writes
    while True:
        before, copying = mark.tolist(), memory.board.copying.tolist()
        copy = model_of(memory).clone()
        memory.synchronize()
        fence()
        if direct or not memory.scheme.methods or memory.board.run[STOP] == FAILED:
            return copy
        if mark.tolist() == before and not any(one % 2 for one in before) and not any(copying):
            return copy
        time.sleep(0)  # let the server run: it may share this core


def buffers_of(memory: RunMemory, policy: str, *, prefix: str = "", late: Sequence[int] = ()) -> dict[str, Tensor]:
    """The buffers of the model: the mean over the workers that have trained, or the chief's. `late`: workers that are
    left out, because they may be writing theirs now."""
    chief = memory.centre_of()
    rows = {rank: memory.buffers(rank, prefix=prefix) for rank in range(memory.plan.workers)}
    if policy == "chief" or not rows[chief]:
        return {name: buffer.clone() for name, buffer in rows[chief].items()}
    trained = [rows[rank] for rank in rows if memory.board.gradients[rank] and rank not in late] or [rows[chief]]
    return average_buffers(trained)


def write_first(memory: RunMemory, policy: str) -> Path:
    """Write the state itself as the first checkpoint; only before the first step, while no process changes it."""
    return _write(memory, policy, {}, prefix="")


def write(memory: RunMemory, policy: str, own: dict[str, Tensor], late: Sequence[int] = ()) -> Path:
    """Write the tensors `keep.…` as the newest checkpoint. `own`: tensors of the chief's hooks. `late`: workers that
    have not copied their part, and may do so at any moment: theirs is taken from the checkpoint before, as that of
    workers which have died before they copied any."""
    kept = memory.tensor("kept").tolist()
    return _write(memory, policy, own, sorted({*late, *(rank for rank, done in enumerate(kept) if not done)}))


def _write(
    memory: RunMemory, policy: str, own: dict[str, Tensor], late: Sequence[int] = (), prefix: str = KEEP
) -> Path:
    names = [name for name in memory.layout.places if name.startswith(KEEP)]
    tensors = {name.removeprefix(KEEP): memory.tensor(prefix + name.removeprefix(KEEP)) for name in names}
    if late:
        before = find(memory, memory.board.get("checkpoint")).tensors
        tensors |= {name: before[name] for rank in late for name in own_names(memory, rank)}
    if not memory.scheme.methods and not memory.plan.script:  # only a script itself knows the state of its steps
        tensors |= _of_absent_workers(memory, tensors)
    tensors["model"] = model_of(memory, prefix=prefix)
    tensors |= {f"model_buffer.{name}": t for name, t in buffers_of(memory, policy, prefix=prefix, late=late).items()}
    tensors |= {f"hook.{name}": tensor for name, tensor in own.items()}
    plan, scheme = memory.plan, memory.scheme
    centre = "server.0.v" if scheme.methods else f"worker.{memory.centre_of()}.v"
    step = int(tensors[centre])
    numbers = {
        "task": plan.task,
        "scheme": scheme.name,
        "hyper": hyper_of(scheme),
        "workers": plan.workers,
        "servers": plan.servers,
        "seed": plan.seed,
        "exact": plan.exact,
        **({} if scheme.compressor is None else {"compress": str(scheme.compressor)}),
        "cut": common(memory),
        # not the board's words: the state that was copied may count a worker that has left since
        "present": (tensors["ledger.0.present"] if scheme.methods else memory.board.known).tolist(),
        "overrides": memory.overrides,
        "parameters": memory.layout.notes.get("parameters"),
        "seconds": memory.seconds(),
        "restarts": memory.board.get("restarts"),
        "rolled_back": memory.board.get("rolled_back"),
    }
    keep = max(plan.keep, 2) if plan.exact else plan.keep  # workers may be returning to the checkpoint before
    path = checkpoint.save(Path(plan.directory) / "checkpoints", step, tensors, numbers, keep=keep)
    memory.board.put("checkpoint", step)
    memory.board.put("written", memory.now())
    memory.wakeup.ring(memory.board.evaluator)
    return path


def _of_absent_workers(memory: RunMemory, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without a server, a worker that was absent has an older part. It gets the centre's cells, as it would on
    joining; its counts of gradients and samples stay its own."""
    lead, found = memory.centre_of(), dict[str, Tensor]()
    for rank in range(memory.plan.workers):
        if int(tensors[f"worker.{rank}.v"]) == int(tensors[f"worker.{lead}.v"]):
            continue
        for kind in ("worker", "buffer"):
            prefix = f"{kind}.{rank}."
            names = [name for name in tensors if name.startswith(prefix)]
            found |= {name: tensors[f"{kind}.{lead}.{name.removeprefix(prefix)}"] for name in names}
        person = tensors[f"person.{rank}"].clone()
        person[0] = tensors[f"person.{lead}"][0]
        found[f"person.{rank}"] = person
    return found


def common(memory: RunMemory) -> bool:
    """Whether the workers' parts in `keep.…` are of one step."""
    steps = {int(memory.tensor(f"{KEEP}person.{rank}")[0]) for rank in range(memory.plan.workers)}
    return len(steps) == 1 and not memory.board.get("uncut")


def evened(memory: RunMemory, final: int, left: int) -> bool:
    """Without a server: whether the workers that were alive at the end have copied parts of the same step. The others
    (they had died, or had `left` before) get the chief's cells, as they would on joining."""
    board, others = memory.board, range(1, memory.plan.workers)

    def reached(rank: int) -> tuple[int, int]:
        return int(memory.tensor(f"{KEEP}worker.{rank}.v")), int(memory.tensor(f"{KEEP}person.{rank}")[0])

    if board.get("midway") or any(board.saved[rank] == final and reached(rank) != reached(0) for rank in others):
        return False
    for rank in others:
        if board.saved[rank] < left or reached(rank) != reached(0):
            memory.replaced.add(rank)
            take_over(memory, rank, 0)
            keep_worker(memory, rank, None)
    return True


def check(plan: Plan, scheme: Scheme, saved: Checkpoint, x0: Vector | None = None) -> None:
    """Refuse a checkpoint that this plan cannot resume from."""
    found = saved.numbers
    for name, wanted in (("scheme", scheme.name), ("workers", plan.workers), ("task", plan.task)):
        if found.get(name) != wanted:
            raise UsageError(
                f"{saved.path} was written with {name} {found.get(name)!r}; it cannot resume with {wanted!r}"
            )
    was, wanted = found.get("compress", ""), str(scheme.compressor or "")
    if was != wanted:  # what it has kept would mean something else
        raise UsageError(
            f"{saved.path} was written with compress {was or 'none'!r}; it cannot resume with {wanted or 'none'!r}"
        )
    if bool(found.get("exact")) != plan.exact:
        was, wanted = ("exact", "not") if found.get("exact") else ("not exact", "exact")
        raise UsageError(f"{saved.path} is of a run that was {was}; it cannot resume as one that is {wanted}")
    if x0 is None:
        return
    parts = {"worker.0.": scheme.worker_state(x0, plan.workers)}
    if scheme.methods:
        parts["server."] = scheme.server(x0, plan.workers)
    for prefix, state in parts.items():
        vectors = state.vectors(scheme.uncut) if prefix == "server." else set(state)
        for cell in state:
            name = prefix + (cell if cell in vectors else f"0.{cell}")
            there = saved.tensors.get(name)
            if there is None or there.shape != state.cell(cell).shape:
                found_there = "missing" if there is None else tuple(there.shape)
                raise UsageError(
                    f"{saved.path} does not fit these settings: its cell {name!r} is {found_there}; "
                    "resume with the same model and rules"
                )


def restore_shard(memory: RunMemory, shard: int, saved: Checkpoint) -> None:
    """Set a server's part back to a checkpoint."""
    low, high = memory.bounds(shard)
    for name in memory.layout.notes["vectors"]:
        memory.tensor(f"server.{name}")[..., low:high] = saved.tensors[f"server.{name}"][..., low:high]
    # checkpoints of earlier versions have `present` among the numbers only
    tensors = {"ledger.0.present": torch.tensor(saved.numbers["present"]), **saved.tensors}
    for part in ("server", "ledger"):
        for name in memory.layout.places:
            if name.startswith(f"{part}.{shard}."):
                memory.tensor(name).copy_(tensors[f"{part}.0." + name.split(".", 2)[2]])
    memory.synchronize()


def restore_worker(memory: RunMemory, rank: int, saved: Checkpoint) -> None:
    """Set a worker's part back to a checkpoint."""
    board = memory.board
    for name in own_names(memory, rank):
        memory.tensor(name).copy_(saved.tensors[name])
    if memory.scheme.sends_messages():
        memory.tensor(f"undo_step.{rank}").zero_()
        for name in MESSAGE_CELLS[2:]:
            memory.tensor(f"worker.{rank}.{name}")[:, CUT] = 0  # all of it is of before this launch's checkpoints
    memory.synchronize()
    board.t[rank], board.gradients[rank], board.samples[rank] = memory.tensor(f"person.{rank}").tolist()
    board.direct[rank] = 0


def take_over(memory: RunMemory, rank: int, donor: int) -> None:
    """Give a worker the step, the cells and the buffers of another one."""
    state = memory.worker_state(rank)
    whole = not memory.board.busy[rank] % 2  # else it died while it may have been writing one
    own = {name: state.cell(name) * whole for name in memory.own_cells()}
    state.restore(memory.worker_state(donor).saved() | own)
    for name, buffer in memory.buffers(donor).items():
        memory.buffers(rank)[name].copy_(buffer)
    memory.synchronize()
    memory.board.t[rank] = memory.board.t[donor]


def find(memory: RunMemory, step: int) -> Checkpoint:
    """The checkpoint of a step; DataError if it is not there."""
    return checkpoint.of_step(Path(memory.plan.directory) / "checkpoints", step)
