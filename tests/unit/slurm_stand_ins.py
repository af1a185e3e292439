"""Stand-ins for Slurm's commands, and a job to submit."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.launcher import Job

FOUR = ("chief", "worker:0", "worker:1", "server:0")
SECRET = b"an unlikely secret of 32 bytes ."
# as sinfo and scontrol of Slurm 22.05 print it, shortened
NODES = "n1|main|4|8000|1\nn2|main|4|6000|1\nbig|wide|64|256000|2\nn1|small|4|8000|1\n"
PARTITIONS = """
PartitionName=main AllowGroups=ALL Default=YES Nodes=n[1-2] DefMemPerNode=UNLIMITED MaxMemPerNode=UNLIMITED
PartitionName=wide AllowGroups=ALL Default=NO Nodes=big DefMemPerNode=UNLIMITED MaxMemPerCPU=2000
PartitionName=small AllowGroups=ALL Default=NO Nodes=n1 DefMemPerCPU=1500 MaxMemPerNode=4000
""".strip()

Fake = Callable[[str, str], Path]


def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    """Put a shell script of this name on the path, where there are a few harmless commands, and none of Slurm's."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))

    def put(name: str, text: str) -> Path:
        path = folder / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        return path

    for name in ("cat", "seq", "rm", "touch", "wc"):  # scripts, not links: who writes here must not write elsewhere
        put(name, f'PATH=/usr/bin:/bin exec {name} "$@"')
    return lambda name, text: put(name, f"cd {tmp_path}\n{text}")


def answering(fake: Fake) -> None:
    """A Slurm that answers questions."""
    fake("sinfo", f"cat <<'.'\n{NODES}.")
    fake("scontrol", f"cat <<'.'\n{PARTITIONS}\n.")


def job(folder: Path, tasks: tuple[str, ...] = FOUR, threads: int = 1, gpus: int | str = 0, **options: str) -> Job:
    command = ("paceline", "train", "mnist-mlp", "--scheme", "async", "lr=0.1", "--dir", str(folder))
    given = {key.replace("_", "-"): value for key, value in options.items()}
    if isinstance(gpus, str):
        given, gpus = given | {"gpus": gpus}, 0
    return Job(command, tasks, folder, "mnist-mlp-async", given, threads, gpus, SECRET)


def ran(text: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A batch script's text, run by bash."""
    return subprocess.run(
        ["/bin/bash", "-c", text],
        env={"PATH": os.environ["PATH"], "SLURM_JOB_ID": "9"} | environment,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
