"""`--on torchrun`: torch's launcher. When a rank dies, torchrun restarts all of them.

Rank i is the i-th task. While an elastic job has fewer nodes than it may have, the ranks that exist share the tasks: a
run keeps its number of workers and servers, and can resume from its checkpoint. On several nodes the same command is
typed on each; the agents meet at `rdzv`. Ranks read the hub's address from the agents' store
(network/cluster/torchrun_store.py), so that needs no shared folder.
"""

from __future__ import annotations

import re
import shlex
import signal
import sys
from collections.abc import Mapping

from paceline.errors import UsageError
from paceline.launcher import Job, Launcher
from paceline.launchers._child_process import in_this_python
from paceline.launchers._foreground import as_script, followed, secret_file
from paceline.network.cluster.description import address

SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"  # the last one ends a run in order; role processes ignore it
RENDEZVOUS = "last_call_timeout=5,keep_alive_interval=2,keep_alive_max_attempt=3"  # a node silent for 6 s is dropped


class TorchrunLauncher(Launcher):
    """The ranks of torchrun, torch's own launcher, are the tasks."""

    name = "torchrun"
    keys = {
        "nnodes": "nodes, or a range such as 1:4; default: 1",
        "nproc-per-node": "tasks on each node; default: evenly",
        "max-restarts": "restarts of all ranks after a failure; default: 3",
        "rdzv": "HOST:PORT where the agents of several nodes meet, the same on each",
        "rdzv-id": "as torchrun takes it; default: the name of the run directory",
        "rdzv-conf": "as torchrun takes it; default: a node that is silent for 6 s is dropped",
        "local-addr": "as torchrun takes it",
        "extra": "further words for torchrun",
    }

    def launch(self, job: Job) -> int:
        command, environment = _command(job), _environment(job)
        secret_file(job)
        return followed(command, environment, signal.SIGUSR1)

    def shown(self, job: Job) -> str:
        return as_script(_environment(job), _command(job))

    def typed_on_every_node(self, options: Mapping[str, str]) -> bool:
        return "rdzv" in options


def _environment(job: Job) -> dict[str, str]:
    given = {
        "OMP_NUM_THREADS": str(job.threads),  # otherwise torchrun sets it and prints a long warning
        # the existing ranks share them; chief first: without an agents' store ranks know only the port of rank 0
        "PACELINE_TASKS": ",".join(sorted(job.tasks, key=lambda task: task != "chief")),
        "PACELINE_SECRET_FILE": str(job.directory / "secret"),
    }
    if ":" in job.options.get("nnodes", ""):
        # torch 2.13: with a shared store a node that joins a running job ends it for all after 60 s
        given["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    return given


def _command(job: Job) -> list[str]:
    options = job.options
    nodes = options.get("nnodes", "1")
    if not re.fullmatch(r"[1-9]\d{0,4}(:[1-9]\d{0,4})?", nodes):
        raise UsageError(f"--engine nnodes= must be a number of nodes or a range such as 1:4, not {nodes!r}")
    least, most = (int(word) for word in (nodes.split(":") * 2)[:2])
    if least > most:
        raise UsageError(f"--engine nnodes={nodes}: the smaller number of nodes comes first")
    words = [sys.executable, "-m", "torch.distributed.run"]
    if most == 1 and "rdzv" not in options:
        for key in {"rdzv-id", "rdzv-conf", "local-addr"} & options.keys():
            raise UsageError(f"--engine {key}= goes with rdzv=HOST:PORT, where the agents of several nodes meet")
        words += ["--standalone"]
    else:
        words += _rendezvous(job)
    words += ["--nnodes", nodes, "--nproc-per-node", str(_per_node(job, most))]
    words += ["--max-restarts", str(job.number("max-restarts", 3)), "--signals-to-handle", SIGNALS]
    return [*words, *shlex.split(options.get("extra", "")), "--no-python", *in_this_python(job.command)]


def _rendezvous(job: Job) -> list[str]:
    where = job.options.get("rdzv")
    if where is None:
        raise UsageError("several nodes need a meeting point: give --engine rdzv=HOST:PORT, the same on every node")
    _, port = address(where, "--engine rdzv=")
    if port is None:
        raise UsageError(f"--engine rdzv={where}: the port is missing; write HOST:PORT")
    words = ["--rdzv-backend", "c10d", "--rdzv-endpoint", where, "--rdzv-id", job.options.get("rdzv-id", job.name)]
    words += ["--rdzv-conf", job.options.get("rdzv-conf", RENDEZVOUS)]
    if "local-addr" in job.options:
        words += ["--local-addr", job.options["local-addr"]]
    return words


def _per_node(job: Job, nodes: int) -> int:
    tasks = len(job.tasks)
    if "nproc-per-node" in job.options:
        each = job.number("nproc-per-node", 1)
        if each * nodes != tasks:
            raise UsageError(
                f"--engine nproc-per-node={each}: {tasks} tasks are not {nodes} nodes with {each} processes each"
            )
        return each
    if tasks % nodes:
        raise UsageError(f"torchrun starts equally many tasks on each node: {tasks} tasks do not fit {nodes} nodes")
    return tasks // nodes
