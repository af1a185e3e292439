"""The options that several commands have, and what --data and --json do."""

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from paceline.config.options import CLUSTER, OUTPUT, SAMPLES, Option
from paceline.fields import finite

RunArgument = Annotated[str, Option("A run directory, or its name under runs/.", positional=True)]
TaskArgument = Annotated[
    str | None, Option("A name of `paceline list tasks`, or file.py:task, or package.module:task.", positional=True)
]
Words = Annotated[
    list[str],
    Option(
        "Hyper-parameters of the scheme (lr=0.1 rule=adam server.rule=adagrad) and task.OPTION=… of the task.",
        metavar="[KEY=VALUE]...",
        positional=True,
    ),
]
DataDirectory = Annotated[str | None, Option("Directory with data sets (or set PACELINE_DATA).", "--data", SAMPLES)]
AsJson = Annotated[bool, Option("One JSON object on stdout instead of the table.", "--json", OUTPUT)]
Json = Annotated[bool, Option("One JSON object on stdout.", "--json")]
Plain = Annotated[bool, Option("Lines instead of the live table.", "--plain", OUTPUT)]
Which = Annotated[str, Option("newest, best, or the step of a checkpoint.")]
Averaged = Annotated[bool, Option("The averaged weights of the hook weight-ema.", "--ema")]

ClusterFile = Annotated[Path | None, Option("TOML file that describes the cluster.", panel=CLUSTER)]
NUMBERED = "Roles of tasks that an engine only numbers: ps,worker,… or pack, spread, ps-per-node."
INTERFACE = "Network interface of this host, by name (ib0) or subnet (10.1.0.0/16)."
RULE = "Function from host name to address: file.py:name or package.module:name."


@dataclass(frozen=True)
class ClusterTaskOptions:
    """The options of `train` and `cluster` that say which task of which cluster this process is."""

    placement: Annotated[str | None, Option(NUMBERED, panel=CLUSTER, default="pack")] = None
    worker_hosts: Annotated[str, Option("host:port,host:port,… of the workers of a cluster.", panel=CLUSTER)] = ""
    ps_hosts: Annotated[str, Option("host:port,… of the servers.", "--ps-hosts --server-hosts", CLUSTER)] = ""
    chief_hosts: Annotated[str, Option("host:port of the chief.", panel=CLUSTER, default="worker 0 is the chief")] = ""
    evaluator_hosts: Annotated[str, Option("host of the evaluator; it needs no port.", panel=CLUSTER)] = ""
    job_name: Annotated[str | None, Option("Job of this process: chief, worker, ps, evaluator.", panel=CLUSTER)] = None
    task_index: Annotated[int | None, Option("Index of this process within its job.", panel=CLUSTER)] = None
    interface: Annotated[
        str | None, Option(INTERFACE, panel=CLUSTER, default="the one that leads to the coordinator")
    ] = None
    no_ib: Annotated[bool, Option("Use no InfiniBand interface.", "--no-ib", CLUSTER)] = False
    address_rule: Annotated[str | None, Option(RULE, panel=CLUSTER)] = None


def use_data_directory(directory: str | None) -> None:
    """Obey --data."""
    if directory is not None:
        os.environ["PACELINE_DATA"] = directory


def print_json(value: Any) -> None:
    """Print one JSON value on stdout, in one line; null stands for numbers that are not finite."""
    sys.stdout.write(json.dumps(finite(value), allow_nan=False) + "\n")
