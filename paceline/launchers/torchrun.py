"""`--on torchrun`: torch's own launcher. When a rank dies, torchrun begins all of them again.

Rank i is the i-th task. While an elastic job has fewer nodes than it may have, the ranks that are there share the
tasks: a run has the same workers and servers throughout, and can go on from its checkpoint. On several nodes the same
command is typed on each; the agents meet at `rdzv`. Ranks learn of the hub by the agents' store (`cluster/meeting.py`),
so no shared folder is needed for that.
"""

from __future__ import annotations

import re
import shlex
import signal
import sys

from paceline.errors import UsageError
from paceline.launcher import Job
from paceline.launchers._child_process import in_this_python
from paceline.launchers._foreground import as_script, followed, number, secret_file
from paceline.network.cluster.description import address

KEYS = ("nnodes", "nproc-per-node", "max-restarts", "rdzv", "rdzv-id", "rdzv-conf", "local-addr", "extra")
SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"  # the last one ends a run in order, and no role hears it
RENDEZVOUS = "last_call_timeout=5,keep_alive_interval=2,keep_alive_max_attempt=3"  # silent for 6 s: left out


def launch(job: Job) -> int:
    """Run torchrun in the foreground."""
    command, environment = _command(job), _environment(job)
    secret_file(job)
    return followed(command, environment, signal.SIGUSR1)


def shown(job: Job) -> str:
    return as_script(_environment(job), _command(job))


def _environment(job: Job) -> dict[str, str]:
    given = {
        "OMP_NUM_THREADS": str(job.threads),  # otherwise torchrun sets it, and says so at length
        "PACELINE_TASKS": ",".join(_chief_first(job)),  # shared by the ranks that there are
        "PACELINE_SECRET_FILE": str(job.directory / "secret"),
    }
    if ":" in job.options.get("nnodes", ""):
        # torch 2.13: with a shared store a node that joins a running job ends it for all after 60 s
        given["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    return given


def _chief_first(job: Job) -> list[str]:
    """Where the agents keep no store, the port that torchrun tells to all is rank 0's."""
    return sorted(job.tasks, key=lambda task: task != "chief")


def _command(job: Job) -> list[str]:
    job.refuse_unknown(KEYS)
    options = job.options
    nodes = options.get("nnodes", "1")
    if not re.fullmatch(r"[1-9]\d{0,4}(:[1-9]\d{0,4})?", nodes):
        raise UsageError(f"--engine nnodes= must be a number of nodes or a range such as 1:4, not {nodes!r}")
    least, most = (int(word) for word in (nodes.split(":") * 2)[:2])
    if least > most:
        raise UsageError(f"--engine nnodes={nodes}: the least number of nodes comes first")
    words = [sys.executable, "-m", "torch.distributed.run"]
    if most == 1 and "rdzv" not in options:
        _refuse_alone(job)
        words += ["--standalone"]
    else:
        words += _rendezvous(job)
    words += ["--nnodes", nodes, "--nproc-per-node", str(_per_node(job, most))]
    words += ["--max-restarts", str(number(job, "max-restarts", 3)), "--signals-to-handle", SIGNALS]
    return [*words, *shlex.split(options.get("extra", "")), "--no-python", *in_this_python(job.command)]


def _refuse_alone(job: Job) -> None:
    for key in ("rdzv-id", "rdzv-conf", "local-addr"):
        if key in job.options:
            raise UsageError(f"--engine {key}= goes with rdzv=HOST:PORT, where the agents of several nodes meet")


def _rendezvous(job: Job) -> list[str]:
    where = job.options.get("rdzv")
    if where is None:
        raise UsageError("several nodes have to meet somewhere: give --engine rdzv=HOST:PORT, the same on every node")
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
        each = number(job, "nproc-per-node", 1)
        if each * nodes != tasks:
            raise UsageError(
                f"{tasks} tasks are not {nodes} nodes with {each} processes each (--engine nproc-per-node=)"
            )
        return each
    if tasks % nodes:
        raise UsageError(
            f"torchrun starts as many processes on every node: {tasks} tasks cannot be shared by {nodes} nodes"
        )
    return tasks // nodes
