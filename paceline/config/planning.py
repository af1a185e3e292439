"""A plan of how a run scales: the declaration of every option of `plan`."""

from dataclasses import dataclass

from paceline.config import options
from paceline.config.options import COUNT, DIRECTORY, FAILURES, FINITE, NATURAL, POSITIVE, Quorum, option

SCHEMES = "allreduce,sync,async,local-sgd,diloco,aeasgd"
SAMPLES = 1_000_000
MACHINE, COST = "The machines", "Length and cost"


@dataclass(frozen=True)
class PlanningSettings:
    """The settings of a plan."""

    workers: str = option("2..256", "Numbers of workers: 2..256 for powers of two, or 2,4,8.", flags="--workers -n")
    servers: int = option(
        1, "Parameter servers of schemes that have one; each is a node of its own.", flags="--servers --ps", bound=COUNT
    )
    batch: int | None = options.BATCH.field(None)
    network: list[str] = option(
        ["10gbit,100us"],
        "BANDWIDTH,LATENCY of every node, each way; further networks are compared with the first.",
        MACHINE,
        default="10gbit,100us",
    )
    gpu: bool = option(False, "Measure gradients on the GPU of this machine.", MACHINE)
    gradient_time: str = option(
        "", "Time of one gradient on the machines that are planned for: 35ms.", MACHINE, default="measured here"
    )
    stragglers: str = option(
        "measured",
        "Spread of gradient times: none, slow:SHARE,FACTOR (slow:0.1,5), or a law of factors (exponential:1).",
        MACHINE,
        page="tasks.md#compute-laws",
    )
    failures: float = option(0.0, "Failures per node and hour.", FAILURES, bound=FINITE)
    restart: float = option(60.0, "Seconds until a node that failed is back.", FAILURES, bound=FINITE)
    checkpoint_every: float = option(60.0, "Seconds between two checkpoints.", FAILURES, bound=POSITIVE)
    quorum: Quorum = option("shrink", "Go on without dead workers, or hold until they are back.", FAILURES)
    samples: int | None = option(
        None, "Samples of the run that is planned.", COST, default=f"{SAMPLES:,}, unless --target is given", bound=COUNT
    )
    target: str = option("", "METRIC=VALUE that the run is to reach: accuracy=0.95.", COST)
    budget: float = option(
        120.0,
        "Seconds, about, for simulations with real gradients that find how many samples --target needs.",
        COST,
        bound=POSITIVE,
    )
    price: float = option(0.0, "Price of a node for an hour.", COST, bound=FINITE)
    sensitivity: bool = option(True, "Vary every assumption and tell which matter.")
    check: bool = option(False, "Train here, too, with 2 to 4 workers, and print the error of the forecast.")
    seed: int = option(0, "Seed of the simulations.", bound=NATURAL)
    directory: str | None = option(
        None, "Directory of the plan.", DIRECTORY, flags="--dir", default="plans/TASK-HASH, with a hash of the settings"
    )
