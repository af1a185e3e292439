"""The run's state out of shared memory into a checkpoint, and back.

Every role copies its own part aside (`keep.…`) at a moment at which it is whole: a worker between two steps, a server
between two calls. The chief writes what lies there to disk. A worker's part is never newer than the servers', which
are asked last: so nobody ever waits for a version that a restored server has not reached.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from paceline import checkpoint
from paceline.board import FAILED, STOP, fence
from paceline.checkpoint import Checkpoint
from paceline.config import hyper_of
from paceline.errors import DataError, UsageError
from paceline.plan import Plan
from paceline.scheme import Scheme
from paceline.stage import Stage
from paceline.state import Vector

KEEP = "keep."


def own_names(stage: Stage, rank: int) -> list[str]:
    """The names of a worker's part."""
    whole = {f"rng.{rank}", f"person.{rank}"}
    prefixes = (f"worker.{rank}.", f"buffer.{rank}.", f"tally.{rank}.")
    return [name for name in stage.layout.places if name in whole or name.startswith(prefixes)]


def keep_worker(stage: Stage, rank: int, generator: torch.Generator | None) -> None:
    """Copy a worker's part aside; it stands between two steps."""
    board = stage.board
    if generator is not None:
        stage.tensor(f"rng.{rank}").copy_(generator.get_state())
    counted = [board.t[rank], board.gradients[rank], board.samples[rank]]
    stage.tensor(f"person.{rank}").copy_(torch.tensor(counted))
    for name in own_names(stage, rank):
        stage.tensor(KEEP + name).copy_(stage.tensor(name))


def keep_shard(stage: Stage, shard: int) -> None:
    """Copy a server's part aside; it stands between two calls."""
    low, high = stage.bounds(shard)
    for name in stage.layout.notes["vectors"]:
        stage.tensor(f"{KEEP}server.{name}")[..., low:high] = stage.tensor(f"server.{name}")[..., low:high]
    if shard == 0:
        _copy(stage, "server.0.")
        _copy(stage, "ledger.0.")
        stage.tensor(f"{KEEP}server.0.v").add_(sum(stage.board.direct))


def shard_part(stage: Stage, shard: int, prefix: str = "") -> list[Tensor]:
    """All that is a server's to tell: its range of the vectors, and if it is the first, numbers and ledger."""
    low, high = stage.bounds(shard)
    part = [stage.tensor(f"{prefix}server.{name}")[..., low:high] for name in stage.layout.notes["vectors"]]
    if shard == 0:
        own = (f"{prefix}server.0.", f"{prefix}ledger.0.")
        part += [stage.tensor(name) for name in stage.layout.places if name.startswith(own)]
    return part


def _copy(stage: Stage, prefix: str) -> None:
    for name in stage.layout.places:
        if name.startswith(prefix):
            stage.tensor(KEEP + name).copy_(stage.tensor(name))


def keep_all(stage: Stage) -> None:
    """Everything as it is now; only while nobody works on it."""
    for rank in range(stage.plan.workers):
        keep_worker(stage, rank, None)
    if stage.scheme.methods:
        for shard in range(stage.plan.servers):
            keep_shard(stage, shard)


def model_of(stage: Stage, *, prefix: str = "") -> Vector:
    """What is evaluated and saved; not copied."""
    if stage.scheme.methods:
        return stage.scheme.model(stage.server_state(prefix=prefix))
    return stage.scheme.model(stage.worker_state(stage.centre_of(), prefix=prefix))


def steady(stage: Stage) -> Vector:
    """A copy of the model, taken while no server is inside a call."""
    mark, direct = stage.board.mark, stage.direct()
    if not all(stage.near(shard) for shard in range(stage.plan.servers if stage.scheme.methods else 0)):
        return model_of(stage).clone()  # a copy that they have sent
    while True:
        before = mark.tolist()
        copy = model_of(stage).clone()
        fence()
        if direct or not stage.scheme.methods or stage.board.run[STOP] == FAILED:
            return copy
        if mark.tolist() == before and not any(one % 2 for one in before):
            return copy
        time.sleep(0)  # the server may share this core


def buffers_of(stage: Stage, policy: str, *, prefix: str = "", late: Sequence[int] = ()) -> dict[str, Tensor]:
    """The buffers that go with the model: the mean over those who have trained, or the chief's. `late`: workers that
    may be writing theirs at this moment."""
    chief = stage.centre_of()
    rows = {rank: stage.buffers(rank, prefix=prefix) for rank in range(stage.plan.workers)}
    if policy == "chief" or not rows[chief]:
        return {name: buffer.clone() for name, buffer in rows[chief].items()}
    trained = [rows[rank] for rank in rows if stage.board.gradients[rank] and rank not in late] or [rows[chief]]
    averaged = {}
    for name in rows[chief]:
        stacked = torch.stack([row[name] for row in trained])
        averaged[name] = stacked.mean(dim=0) if stacked.is_floating_point() else stacked.amax(dim=0)
    return averaged


def write(stage: Stage, policy: str, own: dict[str, Tensor], late: Sequence[int] = ()) -> Path:
    """What was copied aside, as the newest checkpoint. `own`: tensors of the chief's hooks; `late`: workers that have
    not put their part aside, and may do so at any moment: theirs is taken from the checkpoint before."""
    names = [name for name in stage.layout.places if name.startswith(KEEP)]
    tensors = {name.removeprefix(KEEP): stage.tensor(name) for name in names}
    if late:
        before = find(stage, stage.board.get("checkpoint")).tensors
        tensors |= {name: before[name] for rank in late for name in own_names(stage, rank)}
    if not stage.scheme.methods and not stage.plan.script:  # of a script's steps nobody else knows
        tensors |= _taken_over(stage, tensors)
    tensors["model"] = model_of(stage, prefix=KEEP).clone()
    tensors |= {f"model_buffer.{name}": t for name, t in buffers_of(stage, policy, prefix=KEEP, late=late).items()}
    tensors |= {f"hook.{name}": tensor for name, tensor in own.items()}
    plan, scheme = stage.plan, stage.scheme
    centre = "server.0.v" if scheme.methods else f"worker.{stage.centre_of()}.v"
    step = int(tensors[centre])
    numbers = {
        "task": plan.task,
        "scheme": scheme.name,
        "hyper": hyper_of(scheme),
        "workers": plan.workers,
        "servers": plan.servers,
        "seed": plan.seed,
        "exact": plan.exact,
        "cut": common(stage),
        # not the board's words of now: the state that was put aside may count a worker that has left since
        "present": (tensors["ledger.0.present"] if scheme.methods else stage.board.known).tolist(),
        "overrides": stage.load_overrides(),
        "parameters": stage.layout.notes.get("parameters"),
        "seconds": stage.seconds(),
        "restarts": stage.board.get("restarts"),
        "rolled_back": stage.board.get("rolled_back"),
    }
    path = checkpoint.save(Path(plan.directory) / "checkpoints", step, tensors, numbers, keep=_kept(plan))
    stage.board.put("checkpoint", step)
    stage.board.put("written", stage.now())
    stage.bells.ring(stage.board.evaluator)
    return path


def _taken_over(stage: Stage, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without a server: a worker that was absent has an older part; it takes over the centre's cells, as it would on
    joining. What it has computed stays its own."""
    lead, found = stage.centre_of(), {}
    for rank in range(stage.plan.workers):
        if int(tensors[f"worker.{rank}.v"]) == int(tensors[f"worker.{lead}.v"]):
            continue
        for kind in ("worker", "buffer"):
            prefix = f"{kind}.{rank}."
            for name in tensors:
                if name.startswith(prefix):
                    found[name] = tensors[f"{kind}.{lead}.{name.removeprefix(prefix)}"]
        person = tensors[f"person.{rank}"].clone()
        person[0] = tensors[f"person.{lead}"][0]
        found[f"person.{rank}"] = person
    return found


def _kept(plan: Plan) -> int:
    """With `exact` one more: while the chief writes, others may be going back to the one before."""
    return max(plan.keep, 2) if plan.exact else plan.keep


def common(stage: Stage) -> bool:
    """Whether all that was copied aside is of one and the same step."""
    steps = {int(stage.tensor(f"{KEEP}person.{rank}")[0]) for rank in range(stage.plan.workers)}
    return len(steps) == 1 and not stage.board.get("uncut")


def evened(stage: Stage, final: int, left: int) -> bool:
    """Without a server: whether all who were there at the end have put parts of the same step aside. Whoever was not
    there (it had died, or had `left` before) takes over the chief's cells, as it would on joining."""
    board, others = stage.board, range(1, stage.plan.workers)

    def reached(rank: int) -> tuple[int, int]:
        return int(stage.tensor(f"{KEEP}worker.{rank}.v")), int(stage.tensor(f"{KEEP}person.{rank}")[0])

    if board.get("midway") or any(board.saved[rank] == final and reached(rank) != reached(0) for rank in others):
        return False
    for rank in others:
        if board.saved[rank] < left or reached(rank) != reached(0):
            stage.worker_state(rank).restore(stage.worker_state(0).saved())
            for name, buffer in stage.buffers(0).items():
                stage.buffers(rank)[name].copy_(buffer)
            board.t[rank] = board.t[0]
            keep_worker(stage, rank, None)
    return True


def saved_buffers(saved: Checkpoint) -> dict[str, Tensor]:
    """Those that go with the model of a checkpoint."""
    prefix = "model_buffer."
    return {name.removeprefix(prefix): one for name, one in saved.tensors.items() if name.startswith(prefix)}


def check(stage_plan: Plan, scheme: Scheme, saved: Checkpoint, x0: Vector | None = None) -> None:
    """Refuse a checkpoint that is of another run than the one that is to go on with it."""
    found = saved.numbers
    for name, wanted in (("scheme", scheme.name), ("workers", stage_plan.workers), ("task", stage_plan.task)):
        if found.get(name) != wanted:
            raise UsageError(
                f"{saved.path} was written with {name} {found.get(name)!r}; it cannot go on with {wanted!r}"
            )
    if bool(found.get("exact")) != stage_plan.exact:
        was, wanted = ("exact", "not") if found.get("exact") else ("not exact", "exact")
        raise UsageError(f"{saved.path} is of a run that was {was}; it cannot go on as one that is {wanted}")
    if x0 is None:
        return
    parts = {"worker.0.": scheme.worker(x0, stage_plan.workers)}
    if scheme.methods:
        parts["server."] = scheme.server(x0, stage_plan.workers)
    for prefix, state in parts.items():
        vectors = state.vectors(scheme.uncut) if prefix == "server." else set(state)
        for cell in state:
            name = prefix + (cell if cell in vectors else f"0.{cell}")
            there = saved.tensors.get(name)
            if there is None or there.shape != state.cell(cell).shape:
                found_there = "missing" if there is None else tuple(there.shape)
                raise UsageError(
                    f"{saved.path} does not fit these settings: its cell {name!r} is {found_there}; "
                    "the model and the rules must stay as they were"
                )


def restore_shard(stage: Stage, shard: int, saved: Checkpoint) -> None:
    """A server's part as it was in the checkpoint."""
    low, high = stage.bounds(shard)
    for name in stage.layout.notes["vectors"]:
        stage.tensor(f"server.{name}")[..., low:high] = saved.tensors[f"server.{name}"][..., low:high]
    # an older checkpoint has these as numbers only
    tensors = {"ledger.0.present": torch.tensor(saved.numbers["present"]), **saved.tensors}
    for part in ("server", "ledger"):
        for name in stage.layout.places:
            if name.startswith(f"{part}.{shard}."):
                stage.tensor(name).copy_(tensors[f"{part}.0." + name.split(".", 2)[2]])


def restore_worker(stage: Stage, rank: int, saved: Checkpoint) -> None:
    """A worker's part as it was in the checkpoint."""
    board = stage.board
    for name in own_names(stage, rank):
        stage.tensor(name).copy_(saved.tensors[name])
    board.t[rank], board.gradients[rank], board.samples[rank] = stage.tensor(f"person.{rank}").tolist()
    board.direct[rank] = 0


def find(stage: Stage, step: int) -> Checkpoint:
    """The checkpoint of that step."""
    directory = Path(stage.plan.directory) / "checkpoints"
    path = checkpoint.find(directory, step)
    if path is None:
        raise DataError(f"the checkpoint of update {step} is not in {directory}")
    return checkpoint.load(path)
