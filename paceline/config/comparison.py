"""A comparison of schemes: the declaration of every option of `compare`."""

from dataclasses import dataclass

from paceline.config import options
from paceline.config.options import COUNT, DIRECTORY, EVALUATION, FAILURES, OUTPUT, POSITIVE, VIRTUAL, option
from paceline.fields import Bound, Feed

GRADIENTS = 2000  # the work of each run, if no length is given: this number of batches
LIMIT = 5  # a run to a target ends after this multiple of that work


@dataclass(frozen=True)
class ComparisonSettings:
    """The settings of a comparison. Every run of it has the same, but for scheme, workers, seed and swept values."""

    workers: tuple[int, ...] = option(
        (4,), "Workers of every run; 1,2,4 compares each scheme at each number.", flags="--workers -n", bound=COUNT
    )
    servers: int = option(1, "Parameter servers; the vector is sharded over them.", flags="--servers --ps", bound=COUNT)
    real: bool = option(False, "Train in real processes of this machine; time is wall time.")
    simulate: bool = option(False, "Train in the simulator, which is the default; time is virtual.")
    seeds: int = option(3, "Runs of each scheme, each with another seed.", bound=COUNT)
    seed: int = option(0, "The first seed.", bound=Bound(0))
    samples: int | None = option(
        None,
        "Equal work: samples of every run, rounded up to whole updates.",
        default=f"{GRADIENTS:,} batches, unless --seconds or --target is given",
        bound=COUNT,
    )
    seconds: float | None = option(None, "Equal time: virtual or wall seconds of every run.", bound=POSITIVE)
    target: str = option(
        "",
        "METRIC=VALUE that ends a run (accuracy=0.97), or --samples or --seconds that end it before.",
        default=f"none; a run that misses it ends after {LIMIT * GRADIENTS:,} batches",
    )
    sweep: list[str] = option(
        [],
        "KEY=VALUE,VALUE,…: choose the best value for each scheme by runs of their own (lr=0.01,0.03,0.1); may be "
        "repeated.",
        default="no tuning: the schemes' own values, or KEY=VALUE words",
    )
    budget: float = option(
        0.5, "Length of a run of --sweep, as a part of the length of the others.", bound=Bound(0, 1, above=True)
    )
    batch: int | None = options.BATCH.field(None)
    feed: Feed | None = options.FEED.field(None)
    compress: str = options.COMPRESS.field("")
    exact: bool = options.EXACT.field(False)
    micro: int | None = options.MICRO.field(None)
    compute: str = option(
        "exponential:1.0",
        "Simulator: seconds per gradient, a law of `paceline list compute`.",
        VIRTUAL,
        page="tasks.md#compute-laws",
    )
    speeds: tuple[float, ...] = option((), "Simulator: one factor per worker: 1,1,0.5.", VIRTUAL, default="all 1")
    network: str = option(
        "",
        "Simulator: every connection: 1gbit,100us, or latency=SECONDS,bandwidth=BYTES_PER_SECOND.",
        VIRTUAL,
        default="free",
    )
    batched: bool = option(
        False,
        "Simulator: compute gradients in flight at once; faster with many workers.",
        VIRTUAL,
        page="simulator.md#thousands-of-workers",
    )
    faults: list[str] = option(
        [], "Simulator: a fault of every run; may be repeated.", FAILURES, flags="--fault", page="simulator.md#faults"
    )
    points: int = option(
        30, "Evaluations during each run. A real chief computes no gradients meanwhile.", EVALUATION, bound=COUNT
    )
    jobs: int | None = option(
        None,
        "Runs at the same time.",
        OUTPUT,
        default="one per core in the simulator; 1 with --real, as runs would slow each other",
        bound=COUNT,
    )
    directory: str | None = option(
        None,
        "Directory of the comparison; the same command goes on where it ended.",
        DIRECTORY,
        flags="--dir",
        default="comparisons/TASK-HASH, with a hash of the settings",
    )
