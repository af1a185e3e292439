"""What a run is asked to be: plain data that JSON can hold, so that any process can be given it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from paceline.errors import UsageError
from paceline.task import Feed

Quorum = Literal["shrink", "hold"]
Start = Literal["fork", "exec"]


@dataclass(frozen=True)
class Plan:
    """Everything that the roles of a run must agree on."""

    task: str | None = None  # a name or reference; None: handed over as an object, or the script's own
    task_options: dict[str, Any] = field(default_factory=dict)
    batch: int | None = None
    feed: Feed | None = None
    shuffle: bool | None = None
    scheme: str | None = None
    hyper: dict[str, Any] = field(default_factory=dict)
    workers: int = 1  # of the scheme: with `exact` the micro-batches, whichever process computes them
    processes: int | None = None  # that the workers live in; None: one for each
    servers: int = 1
    steps: int | None = None  # updates of the centre
    seconds: float | None = None
    seed: int = 0
    hooks: list[str] = field(default_factory=list)
    exact: bool = False  # the same bits, however many processes there are and whoever dies
    micro: int = 8  # with `exact`: parts that every batch is cut in, each a worker of the scheme
    quorum: Quorum = "shrink"
    patience: float = 30.0
    restarts: int = 3  # of one role in a row, without progress between them
    start: Start = "fork"  # how a role's process begins
    collective: str = "shared"  # how means are taken: in shared memory, or by connections
    device: str = "cpu"
    threads: int = 1
    checkpoint_steps: int | None = None
    checkpoint_seconds: float | None = 60.0
    keep: int = 5
    summaries: bool = True  # for TensorBoard
    record: bool = True  # the order log, from which the run can be repeated
    launch: int = 1  # how often this run has been started
    evaluator: bool = False
    throttle: float = 0.0  # seconds between two evaluations of the evaluator
    delay: float = 0.0  # before its first
    eval_device: str = ""  # where it computes; "": on the CPU
    eval_steps: int | None = None  # batches of the test data that it takes; None: all
    best: str = ""  # the metric whose best checkpoint is kept
    every: int = 0  # updates between two evaluations by the chief
    curvature: float | None = None
    script: list[str] = field(default_factory=list)  # the user's own program and its arguments
    directory: str = ""
    title: str = ""

    @property
    def hosts(self) -> int:
        """Processes that train."""
        return self.processes or self.workers

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Plan:
        known = {one.name for one in fields(cls)}
        foreign = data.keys() - known
        if foreign:
            raise UsageError(f"the plan holds unknown keys: {', '.join(sorted(foreign))}; another version wrote it")
        for name, hint in get_type_hints(cls).items():
            if name in data and not _is(data[name], hint):
                raise UsageError(f"the plan's {name} cannot be {data[name]!r}")
        return cls(**data)


def _is(value: Any, hint: Any) -> bool:
    """Whether plain data is of a type that a plan declares."""
    origin, inner = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if origin is Literal:
        return value in inner
    if origin is list:
        return isinstance(value, list) and all(_is(one, inner[0]) for one in value)
    if origin is dict:
        return isinstance(value, dict) and all(_is(key, inner[0]) for key in value)
    if inner:
        return any(_is(value, one) for one in inner)
    if isinstance(value, bool):
        return hint is bool
    return isinstance(value, int | float if hint is float else hint)
