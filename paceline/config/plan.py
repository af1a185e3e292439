"""A run of real processes as plain data: the declaration of every option of `train`, and what JSON holds of it."""

import json
from dataclasses import asdict, dataclass, field, fields
from typing import Annotated, Any, Literal, Self, get_args, get_origin, get_type_hints

from paceline.config import options
from paceline.config.options import DIRECTORY, EVALUATION, FAILURES, NO_EFFECT, Option, Start
from paceline.errors import UsageError
from paceline.fields import Bound


def _of_the_evaluator(help: str, default: str | None = None, argument: str = "") -> Option:
    flags = f"--{argument.replace('_', '-')}" if argument else ""
    return Option(help, flags, EVALUATION, default, argument, needs="evaluator")


@dataclass(frozen=True)
class Plan:
    """Everything that the roles of a run must agree on. Fields with an `Option` are options of `train`."""

    task: str | None = None  # a name or reference; None: an object of the caller, or the script's own
    task_options: dict[str, Any] = field(default_factory=dict)
    batch: options.Batch = None
    feed: options.FeedOption = None
    shuffle: options.Shuffle = None
    scheme: str | None = None
    hyper: dict[str, Any] = field(default_factory=dict)
    # with `exact` the plan has a worker per micro-batch
    workers: Annotated[
        int,
        Bound(1),
        Option("Worker processes; worker 0 is the chief.", "--workers -n", default="2; 1 if the scheme has one worker"),
    ] = 1
    processes: Annotated[int | None, NO_EFFECT] = None  # that the workers share, in exact runs; None: one for each
    servers: Annotated[
        int, Bound(0), Option("Parameter servers; the vector is sharded over them.", "--servers --ps", run=True)
    ] = 1
    steps: Annotated[
        int | None,
        Bound(1),
        Option(
            "Updates of the centre after which the run ends, counted over all launches.",
            default="1000, unless --seconds or the hook stop-at-step is given",
            run=True,
        ),
    ] = None
    seconds: Annotated[
        float | None, Bound(0, above=True), Option("Seconds of training after which this launch ends.", run=True)
    ] = None
    seed: options.Seed = 0
    hooks: options.Hooks = field(default_factory=list)
    exact: options.Exact = False
    micro: Annotated[int, Bound(1), options.MICRO] = 8
    quorum: Annotated[options.Quorum, options.QUORUM] = "shrink"
    patience: Annotated[
        float,
        Bound(0, above=True),
        Option("Longest wait without progress, in seconds.", panel=FAILURES, page="training.md", run=True),
        NO_EFFECT,
    ] = 30.0
    restarts: Annotated[
        int, Bound(0), Option("Restarts of one role without progress in between.", panel=FAILURES, run=True), NO_EFFECT
    ] = 3
    start: Annotated[
        Start,
        Option("fork: roles start at once; exec: each starts in a fresh interpreter and makes the task itself."),
        NO_EFFECT,
    ] = "fork"
    # all collectives give the same bits
    collective: Annotated[
        str,
        Option(
            "How means are taken: shared (memory), tcp, gloo or nccl.",
            default="shared; tcp on several machines",
            page="collectives.md",
        ),
        NO_EFFECT,
    ] = "shared"
    device: Annotated[str, Option("Where workers compute: cpu, cuda (one GPU per worker) or cuda:K.")] = "cpu"
    threads: Annotated[int, Bound(1), Option("Threads of torch in each process.", run=True)] = 1
    checkpoint_steps: Annotated[
        int | None,
        Bound(1),
        Option("Updates between two checkpoints.", "--checkpoint-every", DIRECTORY, run=True),
        NO_EFFECT,
    ] = None
    checkpoint_seconds: Annotated[
        float | None,
        Bound(0, above=True),
        Option("Seconds between two checkpoints.", panel=DIRECTORY, run=True),
        NO_EFFECT,
    ] = 60.0
    keep: Annotated[int, Bound(1), Option("Newest checkpoints to keep.", panel=DIRECTORY, run=True), NO_EFFECT] = 5
    summaries: Annotated[
        bool, Option("Write summaries for TensorBoard.", "--summaries/--no-summaries", DIRECTORY), NO_EFFECT
    ] = True
    record: Annotated[
        bool,
        Option(
            "Record the order of everything, for `paceline replay`.",
            "--record/--no-record",
            DIRECTORY,
            page="replay.md",
        ),
        NO_EFFECT,
    ] = True
    launch: Annotated[int, NO_EFFECT] = 1  # counts the launches of a run directory
    evaluator: Annotated[
        bool,
        Option("Evaluate every new checkpoint in another process and keep the best one.", "--evaluator", EVALUATION),
        NO_EFFECT,
    ] = False
    throttle: Annotated[
        float, Bound(0, finite=True), _of_the_evaluator("Seconds between two evaluations of the evaluator."), NO_EFFECT
    ] = 0.0
    delay: Annotated[
        float,
        Bound(0, finite=True),
        _of_the_evaluator("Seconds before the evaluator's first evaluation.", argument="start_delay"),
        NO_EFFECT,
    ] = 0.0
    eval_device: Annotated[
        str, _of_the_evaluator("Where the evaluator computes: cpu, cuda or cuda:K.", "cpu"), NO_EFFECT
    ] = ""
    eval_steps: Annotated[
        int | None, Bound(1), _of_the_evaluator("Batches of the test data that the evaluator takes.", "all"), NO_EFFECT
    ] = None
    best: Annotated[
        str, _of_the_evaluator("Metric by which the best checkpoint is kept.", "accuracy, else loss"), NO_EFFECT
    ] = ""
    every: Annotated[
        int,
        Bound(0),
        Option("Updates between two evaluations by the chief.", panel=EVALUATION, default="only at the end"),
        NO_EFFECT,
    ] = 0
    curvature: Annotated[float | None, Bound(0, finite=True), options.CURVATURE, NO_EFFECT] = None
    script: list[str] = field(default_factory=list)  # the user's own program and its arguments
    directory: Annotated[str, NO_EFFECT] = ""
    title: Annotated[str, NO_EFFECT] = ""

    @property
    def hosts(self) -> int:
        """Processes that train."""
        return self.processes or self.workers

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
