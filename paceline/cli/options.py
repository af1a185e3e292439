"""The options that several commands have, and how --json prints."""

import json
import sys
from dataclasses import dataclass
from typing import Any

from paceline.config.options import CLUSTER, OUTPUT, SAMPLES, Option, option
from paceline.fields import finite

RUN = Option("A run directory, or its name under runs/.", positional=True)
TASK = Option("A name of `paceline list tasks`, or file.py:task, or package.module:task.", positional=True)
WORDS = Option(
    "Hyper-parameters of the scheme (lr=0.1 rule=adam server.rule=adagrad) and task.OPTION=… of the task.",
    metavar="[KEY=VALUE]...",
    positional=True,
)
SCHEME = Option(
    "A name of `paceline list schemes`, file.py:Class or package.module:Class.", flags="--scheme -s", default="sync"
)
DATA = Option("Directory with data sets (or set PACELINE_DATA).", SAMPLES)
TABLE_AS_JSON = Option("One JSON object on stdout instead of the table.", OUTPUT, flags="--json")
AS_JSON = Option("One JSON object on stdout.", flags="--json")
PLAIN = Option("Lines instead of the live table.", OUTPUT)
WATCH = Option("Show the run in the browser until it ends, at a printed address.", OUTPUT, page="watch.md")
WHICH = Option("newest, best, or the step of a checkpoint.")
EMA = Option("The averaged weights of the hook weight-ema.")
CLUSTER_FILE = Option("TOML file that describes the cluster.", CLUSTER)


@dataclass(frozen=True)
class ClusterTaskOptions:
    """The options of `train` and `cluster` that say which task of which cluster this process is."""

    placement: str | None = option(
        None,
        "Roles of tasks that an engine only numbers: ps,worker,… or pack, spread, ps-per-node.",
        CLUSTER,
        default="pack",
    )
    worker_hosts: str = option("", "host:port,host:port,… of the workers of a cluster.", CLUSTER)
    ps_hosts: str = option("", "host:port,… of the servers.", CLUSTER, flags="--ps-hosts --server-hosts")
    chief_hosts: str = option("", "host:port of the chief.", CLUSTER, default="worker 0 is the chief")
    evaluator_hosts: str = option("", "host of the evaluator; it needs no port.", CLUSTER)
    job_name: str | None = option(None, "Job of this process: chief, worker, ps, evaluator.", CLUSTER)
    task_index: int | None = option(None, "Index of this process within its job.", CLUSTER)
    interface: str | None = option(
        None,
        "Network interface of this host, by name (ib0) or subnet (10.1.0.0/16).",
        CLUSTER,
        default="the one that leads to the coordinator",
    )
    no_ib: bool = option(False, "Use no InfiniBand interface.", CLUSTER)
    address_rule: str | None = option(
        None, "Function from host name to address: file.py:name or package.module:name.", CLUSTER
    )


def print_json(value: Any) -> None:
    """Print one JSON value on stdout, in one line; null stands for numbers that are not finite."""
    sys.stdout.write(json.dumps(finite(value), allow_nan=False) + "\n")
