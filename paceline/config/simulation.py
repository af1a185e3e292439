"""A run in virtual time: the declaration of every option of `simulate`."""

import math
from dataclasses import dataclass

from paceline.config import options
from paceline.config.options import COUNT, EVALUATION, FAILURES, NATURAL, OUTPUT, POSITIVE, VIRTUAL, option
from paceline.fields import Feed


@dataclass(frozen=True)
class Simulation:
    """The settings of a simulated run. From Python some of them may be objects instead of texts."""

    workers: int | None = option(
        None, "Workers.", flags="--workers -n", default="4; 1 if the scheme has one worker", bound=COUNT
    )
    servers: int = option(1, "Parameter servers; the vector is sharded over them.", flags="--servers --ps", bound=COUNT)
    steps: int = option(1000, "Updates of the centre after which the run ends.", bound=COUNT)
    samples: int | None = options.SAMPLE_COUNT.field(None)
    epochs: float | None = options.EPOCHS.field(None)
    seconds: float = option(math.inf, "Virtual seconds after which the run ends.", VIRTUAL, bound=POSITIVE)
    batch: int | None = options.BATCH.field(None)
    feed: Feed | None = options.FEED.field(None)
    shuffle: bool | None = options.SHUFFLE.field(None)
    seed: int = options.SEED.field(0)
    hooks: list[str] = options.HOOKS.field([])
    compress: str = options.COMPRESS.field("")
    exact: bool = options.EXACT.field(False)
    micro: int | None = options.MICRO.field(None)
    inside: str = options.INSIDE.field("")
    compute: str = option(
        "constant:1.0", "Seconds per gradient: a law of `paceline list compute`.", VIRTUAL, page="tasks.md#compute-laws"
    )
    speeds: tuple[float, ...] = option((), "One factor per worker: 1,1,0.5.", VIRTUAL, default="all 1")
    network: str = option(
        "", "Every connection: 1gbit,100us, or latency=SECONDS,bandwidth=BYTES_PER_SECOND.", VIRTUAL, default="free"
    )
    links: list[str] = option(
        [], "RANK:latency=…,bandwidth=… of one worker's connection; may be repeated.", VIRTUAL, flags="--link"
    )
    access: str = option(
        "exponential:0.1", "Seconds of one pass over the shared vector (hogwild): a law or a number.", VIRTUAL
    )
    faults: list[str] = option(
        [],
        "kill:1@step=20,back=5 | stop:… | partition:… | delay:… | random:seed=7,count=5; may be repeated.",
        FAILURES,
        flags="--fault",
        page="simulator.md#faults",
    )
    quorum: options.Quorum | None = options.QUORUM.field(None)
    checkpoint_steps: int = option(
        0,
        "Updates between virtual checkpoints, to which some faults roll the run back.",
        FAILURES,
        flags="--checkpoint-every",
        default="0: only the start",
        bound=NATURAL,
    )
    every: int = option(0, "Updates between two evaluations.", EVALUATION, default="only at the end", bound=NATURAL)
    curvature: float | None = options.CURVATURE.field(None)
    batched: bool = option(
        False,
        "Compute the gradients that are in flight at once, by torch.func.vmap: the same times and orders, values equal "
        "to rounding.",
        page="simulator.md#thousands-of-workers",
    )
    device: str = option("cpu", "Where the run computes and keeps its vectors: cpu, cuda or cuda:K.")
    threads: int = option(1, "Threads of torch; another number may give other bits.", bound=COUNT)
    trace: str | None = option(
        None,
        "File for a trace of who computes and who waits, which Perfetto and Chrome show.",
        OUTPUT,
        metavar="FILE",
        page="trace.md",
    )
