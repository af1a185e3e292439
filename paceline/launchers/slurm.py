"""Slurm: an sbatch script in the run directory, whose step runs the same command in every task.

A lost node, or a time limit that comes near, puts the job into the queue again; the same command then goes on from the
run's newest checkpoint. The tasks meet through a file in the run directory, which all nodes have to see.
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
from paceline.launcher import Job
from paceline.launchers import _slurm_follow, _slurm_gpus, _slurm_memory
from paceline.launchers._child_process import in_this_python
from paceline.launchers._foreground import number, secret_file, truth
from paceline.launchers._slurm_gpus import Gpus
from paceline.network.cluster.placement import POLICIES, roles

# --engine keys that become an option of sbatch under the same name
PASSED = ("partition", "account", "qos", "time", "constraint", "reservation")
KEYS = (
    *PASSED,
    *("nodes", "tasks-per-node", "placement", "memory", "cpus", "gpus", "ports"),
    *("signal", "requeue", "requeues", "restarts", "array", "wait", "extra"),
)
SCRIPT = "job.sbatch"
_SIGNAL = "USR1@60"


@dataclass(frozen=True)
class JobShape:
    """How the tasks stand on the nodes; None: as Slurm likes."""

    nodes: int | None
    per_node: int | None
    cpus: int
    gpus: Gpus
    kinds: tuple[str, ...]  # of the tasks, node by node


def launch(job: Job) -> int:
    """Submit, follow to the end, give the exit code."""
    job.refuse_unknown(KEYS)
    for command in ("sbatch", "scontrol", "sinfo"):
        if shutil.which(command) is None:
            raise UsageError(
                f"--on slurm needs Slurm's commands, and {command} is missing here: submit from a login node of the "
                "cluster, or install them (apt-get install slurm-wlm); --dry-run shows the script without them"
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
    name = done.stdout.strip().partition(";")[0]
    job.say(f"Slurm job {name} is submitted ({path})")
    if not truth(job, "wait", True):
        job.say(f"it is not waited for; follow it with: squeue -j {name}; end it in order with: scancel -s INT {name}")
        return 0
    output = job.directory / "logs" / f"slurm-{name}.out"
    return _slurm_follow.follow(name, None if "array" in job.options else output, job.say)


def shown(job: Job) -> str:
    """What would be submitted, and how."""
    job.refuse_unknown(KEYS)
    return f"# sbatch --parsable {shlex.quote(str(job.directory / SCRIPT))}\n{script(job)}"


def script(job: Job) -> str:
    """The whole batch script; the secret is in a file that only the user may read."""
    shape, array = _shape(job), _array(job)
    lines = ["#!/bin/bash", *_options(job, shape, array), ""]
    lines += [f"export PACELINE_PLACEMENT={','.join(shape.kinds)}"]
    lines += [f"export PACELINE_SECRET_FILE={_quoted(job.directory / 'secret')}"]
    lines += [f"export PACELINE_MEET={_quoted(job.directory / 'hub')}" + ("-$SLURM_ARRAY_TASK_ID" if array else "")]
    words, own = [_quoted(word) for word in in_this_python(job.command)], _quoted(job.directory)
    if array:  # each of the sweep has a directory in the common one, and one word more
        own = f"{_quoted(job.directory / job.name)}-$SLURM_ARRAY_TASK_ID"
        words = [own if word == _quoted(job.directory) else word for word in words]
        words += ['"${choices[$SLURM_ARRAY_TASK_ID]}"']
        lines += [f"choices=({shlex.join(array)})"]
    body = _slurm_follow.BODY.format(
        step=" ".join(["srun", *_step(job, shape), "bash", "-c", '"$task"', "task", *words]),
        gpus=shape.gpus.task,
        job="${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID" if array else "$SLURM_JOB_ID",
        run=own,
        requeues=number(job, "requeues", 3),
        requeue="yes" if truth(job, "requeue", True) else "no",
        restarts=number(job, "restarts", 3),
        trap=" ".join(["trap", "last_checkpoint", _signal(job)[0]]) if _signal(job) else ": # no signal is asked for",
    )
    return "\n".join([*lines, body])


def _options(job: Job, shape: JobShape, array: Sequence[str]) -> list[str]:
    """The lines that sbatch reads."""
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
    found += ["--requeue" if truth(job, "requeue", True) else "--no-requeue"]
    found += [f"--signal=B:{'@'.join(_signal(job))}"] if _signal(job) else []
    found += [line.strip() for line in job.options.get("extra", "").split(";") if line.strip()]
    return [*(f"#SBATCH {option}" for option in found), f"# memory: {memory.reason}"]


def _step(job: Job, shape: JobShape) -> list[str]:
    """Options of srun: what it does not take over from sbatch; and one lost task does not end the others."""
    found = [f"--ntasks={len(job.tasks)}", f"--cpus-per-task={shape.cpus}"]
    found += ["--kill-on-bad-exit=0", "--wait=0", "--mpi=none"]
    if "ports" in job.options:
        found += [f"--resv-ports={_count(job, 'ports')}"]
    return [*found, shape.gpus.binding] if shape.gpus.binding else found


def _shape(job: Job) -> JobShape:
    tasks = len(job.tasks)
    nodes = _count(job, "nodes") if "nodes" in job.options else None
    per_node = _count(job, "tasks-per-node") if "tasks-per-node" in job.options else None
    if nodes is None and per_node is not None:
        nodes = -(-tasks // per_node)
    if nodes is not None:
        if nodes > tasks:
            raise UsageError(f"--engine nodes={nodes}: there are only {tasks} tasks ({', '.join(job.tasks)})")
        per_node = per_node or -(-tasks // nodes)
        if nodes * per_node < tasks:
            raise UsageError(
                f"--engine nodes={nodes} tasks-per-node={per_node}: there is room for {nodes * per_node} tasks, but "
                f"there are {tasks} ({', '.join(job.tasks)})"
            )
    kinds = _kinds(job, nodes, per_node)
    with_gpu = {"chief", "worker", *(["evaluator"] if job.evaluator_gpus else [])}
    wanted = job.options.get("gpus", str(job.gpus) if job.gpus else "")
    gpus = _slurm_gpus.asked(wanted, [kind in with_gpu for kind in kinds], per_node)
    return JobShape(nodes, per_node, _count(job, "cpus", job.threads), gpus, kinds)


def _kinds(job: Job, nodes: int | None, per_node: int | None) -> tuple[str, ...]:
    """The role of each seat, node by node: as the tasks stand, or by a policy, with an evaluator on the last seat."""
    kinds = [task.partition(":")[0] for task in job.tasks]
    policy = job.options.get("placement")
    if policy is None:
        return tuple(kinds)
    if policy in POLICIES and (nodes is None or per_node is None or nodes * per_node != len(kinds)):
        raise UsageError(
            f"--engine placement={policy} needs to know which tasks share a node: give nodes and tasks-per-node whose "
            f"product is the number of tasks, {len(kinds)}; or list the roles"
        )
    last = ["evaluator"] if policy in POLICIES and "evaluator" in kinds else []
    places = [(node, seat) for node in range(nodes or 1) for seat in range(per_node or len(kinds))][: len(kinds)]
    servers = kinds.count("server") + kinds.count("ps") if policy in POLICIES else None
    placed = roles(places[: len(places) - len(last)], policy, servers)
    found = [placed[place] for place in places[: len(places) - len(last)]] + last
    if sorted(found) != sorted("server" if kind == "ps" else kind for kind in kinds):
        raise UsageError(f"--engine placement={policy}: the roles should be those of {', '.join(job.tasks)}")
    return tuple(found)


def _memory(job: Job, shape: JobShape) -> _slurm_memory.Request:
    """As given, or else a share of the partition; where Slurm cannot be asked (--dry-run elsewhere) it says so."""
    if "memory" in job.options:
        return _slurm_memory.asked(_slurm_memory.parsed(job.options["memory"]), shape.per_node, shape.cpus)
    try:
        nodes = _slurm_follow.asked("sinfo", "-h", "-N", "-o", _slurm_memory.NODES)
        partitions = _slurm_follow.asked("scontrol", "show", "partition", "-o")
    except (OSError, PacelineError):
        return _slurm_memory.Request(None, "is computed where Slurm answers; here it does not")
    partition = _slurm_memory.partition(nodes, partitions, job.options.get("partition"))
    return _slurm_memory.share(partition, len(job.tasks), shape.per_node, shape.cpus)


def _array(job: Job) -> list[str]:
    """`array=lr=0.1,0.2`: the words that the jobs of a sweep get, one each."""
    text = job.options.get("array")
    if text is None:
        return []
    key, _, values = text.partition("=")
    found = [value.strip() for value in values.split(",")]
    if not key.strip() or not all(found):
        raise UsageError(
            f"--engine array={text}: it should be a hyper-parameter and its values, such as lr=0.1,0.2,0.4"
        )
    return [f"{key.strip()}={value}" for value in found]


def _signal(job: Job) -> tuple[str, ...]:
    """A signal's name, and how many seconds before the limit it comes; nothing where none is wanted."""
    text = job.options.get("signal", _SIGNAL)
    if text == "no":
        return ()
    match = re.fullmatch(r"(?:SIG)?(USR1|USR2|TERM|HUP)@([0-9]+)", text)
    if match is None:
        raise UsageError(
            f"--engine signal={text}: it should be a signal and how many seconds before the time limit it comes, such "
            "as USR1@120 (USR1, USR2, TERM or HUP), or no"
        )
    return match[1], match[2]


def _count(job: Job, key: str, default: int = 1) -> int:
    """A number of which there is at least one."""
    found = number(job, key, default)
    if found < 1:
        raise UsageError(f"--engine {key}= must be at least 1, not {found}")
    return found


def _word(job: Job, key: str) -> str:
    text = job.options[key]
    if not text or any(character.isspace() for character in text):
        raise UsageError(f"--engine {key}={text}: it should be one word, as sbatch --{key} takes it")
    return shlex.quote(text)


def _quoted(path: Path | str) -> str:
    return shlex.quote(str(path))
