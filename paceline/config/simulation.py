"""A run in virtual time: the declaration of every option of `simulate`."""

import math
from dataclasses import dataclass, field
from typing import Annotated

from paceline.config import options
from paceline.config.options import EVALUATION, FAILURES, VIRTUAL, Option
from paceline.fields import Bound


@dataclass(frozen=True)
class Simulation:
    """The settings of a simulated run. From Python some of them may be objects instead of texts."""

    workers: Annotated[
        int | None, Bound(1), Option("Workers.", "--workers -n", default="4; 1 if the scheme has one worker")
    ] = None
    servers: Annotated[
        int, Bound(1), Option("Parameter servers; the vector is sharded over them.", "--servers --ps")
    ] = 1
    steps: Annotated[int, Bound(1), Option("Updates of the centre after which the run ends.")] = 1000
    seconds: Annotated[
        float, Bound(0, above=True), Option("Virtual seconds after which the run ends.", panel=VIRTUAL)
    ] = math.inf
    batch: options.Batch = None
    feed: options.FeedOption = None
    shuffle: options.Shuffle = None
    seed: options.Seed = 0
    hooks: options.Hooks = field(default_factory=list)
    exact: options.Exact = False
    micro: Annotated[int | None, Bound(1), options.MICRO] = None
    compute: Annotated[
        str,
        Option("Seconds per gradient: a law of `paceline list compute`.", panel=VIRTUAL, page="tasks.md#compute-laws"),
    ] = "constant:1.0"
    speeds: Annotated[tuple[float, ...], Option("One factor per worker: 1,1,0.5.", panel=VIRTUAL, default="all 1")] = ()
    network: Annotated[
        str, Option("latency=SECONDS,bandwidth=BYTES_PER_SECOND of every connection.", panel=VIRTUAL, default="free")
    ] = ""
    links: Annotated[
        list[str], Option("RANK:latency=…,bandwidth=… of one worker's connection; may be repeated.", "--link", VIRTUAL)
    ] = field(default_factory=list)
    access: Annotated[
        str, Option("Seconds of one pass over the shared vector (hogwild): a law or a number.", panel=VIRTUAL)
    ] = "exponential:0.1"
    faults: Annotated[
        list[str],
        Option(
            "kill:1@step=20,back=5 | stop:… | partition:… | delay:… | random:seed=7,count=5; may be repeated.",
            "--fault",
            FAILURES,
            page="simulator.md#faults",
        ),
    ] = field(default_factory=list)
    quorum: Annotated[options.Quorum | None, options.QUORUM] = None
    checkpoint_steps: Annotated[
        int,
        Bound(0),
        Option(
            "Updates between virtual checkpoints, to which some faults roll the run back.",
            "--checkpoint-every",
            FAILURES,
            "0: only the start",
        ),
    ] = 0
    every: Annotated[
        int, Bound(0), Option("Updates between two evaluations.", panel=EVALUATION, default="only at the end")
    ] = 0
    curvature: Annotated[float | None, Bound(0, finite=True), options.CURVATURE] = None
    threads: Annotated[int, Bound(1), Option("Threads of torch; another number may give other bits.")] = 1
