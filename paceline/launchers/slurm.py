"""`--on slurm`: an sbatch script in the run directory, whose step runs the same command in every task.

After the loss of a node, or near the time limit, the job is requeued; the same command then resumes from the run's
newest checkpoint. The tasks meet through a file in the run directory, which all nodes must share.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import PacelineError, UsageError
from paceline.launcher import Job, Launcher
from paceline.launchers import _slurm_follow, _slurm_resources
from paceline.launchers._child_process import in_this_python
from paceline.launchers._foreground import secret_file
from paceline.launchers._slurm_resources import Gpus, Request
from paceline.network.cluster.placement import POLICIES, roles

# keys of --engine that become an option of sbatch under the same name
PASSED = ("partition", "account", "qos", "time", "constraint", "reservation")
SCRIPT = "job.sbatch"
_SIGNAL = "USR1@60"


@dataclass(frozen=True)
class JobShape:
    """How the tasks are spread over the nodes; None: Slurm decides."""

    nodes: int | None
    per_node: int | None
    cpus: int
    gpus: Gpus
    kinds: tuple[str, ...]  # of the tasks, node by node


class SlurmLauncher(Launcher):
    """An sbatch job whose step runs the tasks; requeued before its time limit, and followed to its end."""

    name = "slurm"
    keys = {key: f"as sbatch --{key} takes it" for key in PASSED} | {
        "nodes": "number of nodes; default: Slurm decides",
        "tasks-per-node": "tasks on each node; default: evenly over the nodes",
        "placement": "roles of the tasks, node by node: ps,worker,… or pack, spread, ps-per-node",
        "memory": "of each task, such as 4G; default: a share of the smallest node",
        "cpus": "of each task; default: --threads",
        "gpus": "of each task that trains, such as 2 or a100:2; default: 1 where --device is a GPU",
        "ports": "ports to reserve on each node (srun --resv-ports)",
        "signal": "USR1@60: signal and seconds before the time limit for a last checkpoint, or no",
        "requeue": "requeue the job after the loss of a node or near its time limit, yes or no; default: yes",
        "requeues": "requeues in a row without a newer checkpoint; default: 3",
        "restarts": "restarts of the step inside the job after a task was killed; default: 3",
        "array": "a sweep, one job for each value: lr=0.1,0.2,0.4",
        "wait": "follow the job to its end, yes or no; default: yes",
        "extra": "further options of sbatch, separated by ;",
    }

    def launch(self, job: Job) -> int:
        for command in ("sbatch", "scontrol", "sinfo"):
            if shutil.which(command) is None:
                raise UsageError(
                    f"--on slurm needs {command}, which is missing here: submit from a login node of the cluster, or "
                    "install it (apt-get install slurm-wlm); --dry-run shows the script without Slurm"
                )
        text = script(job)
        path = job.directory / SCRIPT
        (job.directory / "logs").mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
        secret_file(job)
        job.meeting_file()
        done = subprocess.run(["sbatch", "--parsable", str(path)], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise UsageError(f"sbatch refuses the job: {_slurm_follow.cause(done.stderr)}; its script is {path}")
        number = done.stdout.strip().partition(";")[0]
        job.say(f"Slurm job {number} is submitted ({path})")
        if not job.truth("wait", True):
            job.say(f"not waiting; follow it with: squeue -j {number}; end it in order with: scancel -s INT {number}")
            return 0
        output = job.directory / "logs" / f"slurm-{number}.out"
        return _slurm_follow.follow(number, None if "array" in job.options else output, job.say)

    def shown(self, job: Job) -> str:
        return f"# sbatch --parsable {shlex.quote(str(job.directory / SCRIPT))}\n{script(job)}"


def script(job: Job) -> str:
    """The whole batch script. The secret is in a file that only the user can read."""
    shape, array = _shape(job), _array(job)
    lines = ["#!/bin/bash", *_options(job, shape, array), ""]
    lines += [f"export PACELINE_PLACEMENT={','.join(shape.kinds)}"]
    lines += [f"export PACELINE_SECRET_FILE={_quoted(job.directory / 'secret')}"]
    lines += [f"export PACELINE_MEET={_quoted(job.directory / 'hub')}" + ("-$SLURM_ARRAY_TASK_ID" if array else "")]
    words, own = [_quoted(word) for word in in_this_python(job.command)], _quoted(job.directory)
    if array:  # each job of the sweep has a directory inside the common one, and its value as one more word
        own = f"{_quoted(job.directory / job.name)}-$SLURM_ARRAY_TASK_ID"
        words = [own if word == _quoted(job.directory) else word for word in words]
        words += ['"${choices[$SLURM_ARRAY_TASK_ID]}"']
        lines += [f"choices=({shlex.join(array)})"]
    body = _slurm_follow.BODY.format(
        step=" ".join(["srun", *_step(job, shape), "bash", "-c", '"$task"', "task", *words]),
        gpus=shape.gpus.task,
        job="${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID" if array else "$SLURM_JOB_ID",
        run=own,
        requeues=job.number("requeues", 3),
        requeue="yes" if job.truth("requeue", True) else "no",
        restarts=job.number("restarts", 3),
        trap=" ".join(["trap", "last_checkpoint", _signal(job)[0]]) if _signal(job) else ": # no signal is asked for",
    )
    return "\n".join([*lines, body])


def _options(job: Job, shape: JobShape, array: Sequence[str]) -> list[str]:
    """The #SBATCH lines."""
    logs = str(job.directory / "logs").replace("%", "%%")
    found = [f"--job-name={re.sub(r'[^A-Za-z0-9_.-]', '-', job.name)}"]
    found += [f"--output={_quoted(logs + ('/slurm-%A_%a.out' if array else '/slurm-%j.out'))}", "--open-mode=append"]
    found += [f"--chdir={_quoted(Path.cwd())}"]
    found += [f"--{key}={_word(job, key)}" for key in PASSED if key in job.options]
    found += [f"--array=0-{len(array) - 1}"] if array else []
    found += [f"--nodes={shape.nodes}"] if shape.nodes else []
    found += [f"--ntasks={len(job.tasks)}"]
    found += [f"--ntasks-per-node={shape.per_node}"] if shape.per_node else []
    found += [f"--cpus-per-task={shape.cpus}"]
    memory = _memory(job, shape)
    found += [memory.option] if memory.option else []
    found += [shape.gpus.option] if shape.gpus.option else []
    found += ["--requeue" if job.truth("requeue", True) else "--no-requeue"]
    found += [f"--signal=B:{'@'.join(_signal(job))}"] if _signal(job) else []
    found += [line.strip() for line in job.options.get("extra", "").split(";") if line.strip()]
    return [*(f"#SBATCH {option}" for option in found), f"# memory: {memory.reason}"]


def _step(job: Job, shape: JobShape) -> list[str]:
    """Options of srun: those that it does not inherit from sbatch, and that a lost task does not end the others."""
    found = [f"--ntasks={len(job.tasks)}", f"--cpus-per-task={shape.cpus}"]
    found += ["--kill-on-bad-exit=0", "--wait=0", "--mpi=none"]
    if "ports" in job.options:
        found += [f"--resv-ports={job.number('ports', 1, least=1)}"]
    return [*found, shape.gpus.binding] if shape.gpus.binding else found


def _shape(job: Job) -> JobShape:
    tasks = len(job.tasks)
    nodes = job.number("nodes", 1, least=1) if "nodes" in job.options else None
    per_node = job.number("tasks-per-node", 1, least=1) if "tasks-per-node" in job.options else None
    if nodes is None and per_node is not None:
        nodes = -(-tasks // per_node)
    if nodes is not None:
        if nodes > tasks:
            raise UsageError(f"--engine nodes={nodes}: there are only {tasks} tasks ({', '.join(job.tasks)})")
        per_node = per_node or -(-tasks // nodes)
        if nodes * per_node < tasks:
            room = f"nodes={nodes} tasks-per-node={per_node}: there is room for {nodes * per_node} tasks"
            raise UsageError(f"--engine {room}, but there are {tasks} ({', '.join(job.tasks)})")
    kinds = _kinds(job, nodes, per_node)
    with_gpu = {"chief", "worker", *(["evaluator"] if job.evaluator_gpus else [])}
    wanted = job.options.get("gpus", str(job.gpus) if job.gpus else "")
    gpus = _slurm_resources.gpus(wanted, [kind in with_gpu for kind in kinds], per_node)
    return JobShape(nodes, per_node, job.number("cpus", job.threads, least=1), gpus, kinds)


def _kinds(job: Job, nodes: int | None, per_node: int | None) -> tuple[str, ...]:
    """The role of each slot, node by node: in the order of the tasks, or by a policy with an evaluator on the last."""
    kinds = [task.partition(":")[0] for task in job.tasks]
    policy = job.options.get("placement")
    if policy is None:
        return tuple(kinds)
    if policy in POLICIES and (nodes is None or per_node is None or nodes * per_node != len(kinds)):
        needed = f"give nodes and tasks-per-node whose product is the number of tasks, {len(kinds)}; or list the roles"
        raise UsageError(f"--engine placement={policy} must know which tasks share a node: {needed}")
    last = ["evaluator"] if policy in POLICIES and "evaluator" in kinds else []
    places = [(node, seat) for node in range(nodes or 1) for seat in range(per_node or len(kinds))][: len(kinds)]
    servers = kinds.count("server") if policy in POLICIES else None
    placed = roles(places[: len(places) - len(last)], policy, servers)
    found = [placed[place] for place in places[: len(places) - len(last)]] + last
    if sorted(found) != sorted(kinds):
        raise UsageError(f"--engine placement={policy}: the roles should be those of {', '.join(job.tasks)}")
    return tuple(found)


def _memory(job: Job, shape: JobShape) -> Request:
    """As given, or a share of the partition. Where Slurm does not answer (--dry-run elsewhere) the script says so."""
    given = job.size("memory", unit=2**20)
    if given is not None:
        return _slurm_resources.asked(given, shape.per_node, shape.cpus)
    try:
        nodes = _slurm_follow.asked("sinfo", "-h", "-N", "-o", _slurm_resources.NODES)
        partitions = _slurm_follow.asked("scontrol", "show", "partition", "-o")
    except (OSError, PacelineError):
        return Request(None, "is computed where Slurm answers; here it does not")
    partition = _slurm_resources.partition(nodes, partitions, job.options.get("partition"))
    return _slurm_resources.share(partition, len(job.tasks), shape.per_node, shape.cpus)


def _array(job: Job) -> list[str]:
    """`array=lr=0.1,0.2`: one word for each job of the sweep."""
    text = job.options.get("array")
    if text is None:
        return []
    key, _, values = text.partition("=")
    found = [value.strip() for value in values.split(",")]
    if not key.strip() or not all(found):
        raise UsageError(f"--engine array={text}: a hyper-parameter and its values are needed, such as lr=0.1,0.2,0.4")
    return [f"{key.strip()}={value}" for value in found]


def _signal(job: Job) -> tuple[str, ...]:
    """The name of a signal and the seconds before the time limit at which it is sent; empty: none."""
    text = job.options.get("signal", _SIGNAL)
    if text == "no":
        return ()
    match = re.fullmatch(r"(?:SIG)?(USR1|USR2|TERM|HUP)@([0-9]+)", text)
    if match is None:
        needed = "a signal (USR1, USR2, TERM or HUP) and the seconds before the time limit are needed"
        raise UsageError(f"--engine signal={text}: {needed}, such as USR1@120, or no")
    return match[1], match[2]


def _word(job: Job, key: str) -> str:
    text = job.options[key]
    if not text or any(character.isspace() for character in text):
        raise UsageError(f"--engine {key}={text}: one word is needed, as sbatch --{key} takes it")
    return shlex.quote(text)


def _quoted(path: Path | str) -> str:
    return shlex.quote(str(path))
