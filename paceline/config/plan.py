"""A run of real processes as plain data: the declaration of every option of `train`, and what JSON holds of it."""

import json
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from typing import Any, Literal, Self, get_type_hints

from paceline.config import options
from paceline.config.options import (
    COUNT,
    DIRECTORY,
    EVALUATION,
    FAILURES,
    FINITE,
    NATURAL,
    NO_EFFECT,
    OUTPUT,
    POSITIVE,
    option,
)
from paceline.errors import UsageError
from paceline.fields import Feed, converted
from paceline.inside.kind import processes_of

Prints = Literal["chief", "all", "none"]

no_effect = partial(option, no_effect=True)
_evaluator = partial(no_effect, panel=EVALUATION, needs="evaluator")


@dataclass(frozen=True)
class Plan:
    """Everything that the roles of a run must agree on. Fields that are an `option` are options of `train`; those with
    `no_effect` change no bit of the result."""

    task: str | None = None  # a name or reference; None: an object of the caller, or the script's own
    task_options: dict[str, Any] = field(default_factory=dict)
    batch: int | None = options.BATCH.field(None)
    feed: Feed | None = options.FEED.field(None)
    shuffle: bool | None = options.SHUFFLE.field(None)
    scheme: str | None = None
    hyper: dict[str, Any] = field(default_factory=dict)
    # with `exact` the plan has a worker per micro-batch
    workers: int = option(
        1,
        "Worker processes; worker 0 is the chief.",
        flags="--workers -n",
        default="2; 1 if the scheme has one worker",
        bound=COUNT,
    )
    processes: int | None = field(
        default=None, metadata=NO_EFFECT
    )  # that the workers share, in exact runs; None: one for each
    servers: int = option(
        1, "Parameter servers; the vector is sharded over them.", flags="--servers --ps", bound=NATURAL, run=True
    )
    steps: int | None = option(
        None,
        "Updates of the centre after which the run ends, counted over all launches.",
        default="1000, unless another length or the hook stop-at-step is given",
        bound=COUNT,
        run=True,
    )
    # they are converted to steps, which have an effect
    samples: int | None = options.SAMPLE_COUNT.field(None, no_effect=True)
    epochs: float | None = options.EPOCHS.field(None, no_effect=True)
    seconds: float | None = option(None, "Seconds of training after which this launch ends.", bound=POSITIVE, run=True)
    seed: int = options.SEED.field(0)
    hooks: list[str] = options.HOOKS.field([])
    compress: str = options.COMPRESS.field("")
    exact: bool = options.EXACT.field(False)
    micro: int = options.MICRO.field(8)
    inside: str = options.INSIDE.field("")
    quorum: options.Quorum = options.QUORUM.field("shrink")
    patience: float = no_effect(
        30.0, "Longest wait without progress, in seconds.", FAILURES, bound=POSITIVE, page="training.md", run=True
    )
    restarts: int = no_effect(3, "Restarts of one role without progress in between.", FAILURES, bound=NATURAL, run=True)
    start: options.Start = no_effect(
        "fork", "fork: roles start at once; exec: each starts in a fresh interpreter and makes the task itself."
    )
    collective: str = no_effect(  # all collectives give the same bits
        "shared",
        "How means are taken: shared (memory), tcp, gloo or nccl.",
        default="shared; tcp on several machines",
        page="collectives.md",
    )
    device: str = option("cpu", "Where workers compute: cpu, cuda (one GPU per worker) or cuda:K.")
    threads: int = option(1, "Threads of torch in each process.", bound=COUNT, run=True)
    checkpoint_steps: int | None = no_effect(
        None, "Updates between two checkpoints.", DIRECTORY, flags="--checkpoint-every", bound=COUNT, run=True
    )
    checkpoint_seconds: float | None = no_effect(
        60.0, "Seconds between two checkpoints.", DIRECTORY, bound=POSITIVE, run=True
    )
    keep: int = no_effect(5, "Newest checkpoints to keep.", DIRECTORY, bound=COUNT, run=True)
    summaries: bool = no_effect(True, "Write summaries for TensorBoard.", DIRECTORY)
    record: bool = no_effect(
        True, "Record the order of everything, for `paceline replay`.", DIRECTORY, page="replay.md"
    )
    profile: bool = no_effect(
        False,
        "Measure what every role spends its time on, and trace some steps with torch.profiler.",
        OUTPUT,
        page="profile.md",
        run=True,
    )
    launch: int = field(default=1, metadata=NO_EFFECT)  # counts the launches of a run directory
    evaluator: bool = no_effect(
        False, "Evaluate every new checkpoint in another process and keep the best one.", EVALUATION
    )
    throttle: float = _evaluator(0.0, "Seconds between two evaluations of the evaluator.", bound=FINITE)
    delay: float = _evaluator(
        0.0, "Seconds before the evaluator's first evaluation.", argument="start_delay", bound=FINITE
    )
    eval_device: str = _evaluator("", "Where the evaluator computes: cpu, cuda or cuda:K.", default="cpu")
    eval_steps: int | None = _evaluator(
        None, "Batches of the test data that the evaluator takes.", default="all", bound=COUNT
    )
    best: str = _evaluator("", "Metric by which the best checkpoint is kept.", default="accuracy, else loss")
    every: int = no_effect(
        0, "Updates between two evaluations by the chief.", EVALUATION, default="only at the end", bound=NATURAL
    )
    curvature: float | None = options.CURVATURE.field(None, no_effect=True)
    script: list[str] = field(default_factory=list)  # the user's own program and its arguments
    prints: Prints = field(default="chief", metadata=NO_EFFECT)  # whose prints of the script reach the terminal
    directory: str = field(default="", metadata=NO_EFFECT)
    title: str = field(default="", metadata=NO_EFFECT)

    @property
    def hosts(self) -> int:
        """Processes that train."""
        return self.processes or self.workers

    @property
    def worker_threads(self) -> int:
        """Threads of torch that compute for one worker, in all its processes."""
        return self.threads * processes_of(self.inside)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        known = {one.name for one in fields(cls)}
        foreign = data.keys() - known
        if foreign:
            raise UsageError(f"the plan holds unknown keys: {', '.join(sorted(foreign))}; another version wrote it")
        for name, hint in get_type_hints(cls).items():
            if name in data and not _is(data[name], hint):
                raise UsageError(f"the plan's {name} cannot be {data[name]!r}")
        return cls(**data)


def _is(value: Any, hint: Any) -> bool:
    """Whether plain data is of a type that a plan declares, without any conversion but of 1 to 1.0."""
    try:
        made = converted("plan", "value", value, hint)
    except UsageError:
        return False
    return bool(made == value) and isinstance(made, bool) == isinstance(value, bool)
