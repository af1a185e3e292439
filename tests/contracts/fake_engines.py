"""Programs and modules that stand in for engines: each runs the command of a job with one task and reports its end.

The function of an engine has the name of its launcher. It writes programs into a folder of PATH, or modules into a
folder of sys.path. A launcher without a function here is tested with the engine that is installed.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from beds.commands import need


def mpi(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _shell(
        folder / "mpirun",
        '[ "$1" = --version ] && { echo "mpirun (Open MPI) 5.0.8"; exit; }\n'
        'while [ "$1" != /bin/sh ]; do shift; done\nexec "$@"',
    )


def torchrun(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _shell(folder / "python", 'while [ "$1" != --no-python ]; do shift; done; shift\nexec "$@"')
    monkeypatch.setattr(sys, "executable", str(folder / "python"))  # torchrun is a module of this interpreter


def hosts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _shell(folder / "ssh", 'for last in "$@"; do :; done\nexec sh -c "$last"')


def slurm(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A controller with one node; sbatch runs the script to its end before it answers."""
    need({"bash": "bash", "cat": "coreutils", "rm": "coreutils", "sleep": "coreutils"}, "a job script of Slurm")
    _shell(folder / "srun", 'while [ "$1" != bash ]; do shift; done\nexec "$@"')
    _shell(folder / "sbatch", f'SLURM_JOB_ID=7 bash "$2" >/dev/null 2>&1\necho $? >{folder}/code\necho 7')
    _shell(folder / "sinfo", "echo 'n1|main|4|8000|1'")
    _shell(
        folder / "scontrol",
        '[ "$2" = partition ] && { echo "PartitionName=main Default=YES"; exit; }\n'
        f"read -r code <{folder}/code\n"
        '[ "$code" = 0 ] && state=COMPLETED || state=FAILED\n'
        'echo "JobId=7 JobName=x JobState=$state Reason=None Restarts=0 ExitCode=$code:0 NodeList=n1"',
    )
    _shell(folder / "scancel", ":")


def kubernetes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`apply` runs the command of the job's pod; `get` reports its end."""
    _python(
        folder / "kubectl",
        f"""
import json, subprocess, sys
sys.path[:] = {sys.path!r}
import yaml
code = {str(folder / "code")!r}
if "apply" in sys.argv:
    [job] = [one for one in yaml.safe_load_all(sys.stdin) if one["kind"] == "Job"]
    [container] = job["spec"]["template"]["spec"]["containers"]
    open(code, "w").write(str(subprocess.call(container["command"])))
elif "get" in sys.argv and "pods" in sys.argv:
    state = {{"terminated": {{"exitCode": int(open(code).read())}}}}
    pod = {{"phase": "Failed", "containerStatuses": [{{"state": state}}]}}
    print(json.dumps({{"items": [{{"metadata": {{"name": "chief"}}, "status": pod}}]}}))
elif "get" in sys.argv:
    end = "Failed" if int(open(code).read()) else "Complete"
    print(json.dumps({{"status": {{"conditions": [{{"type": end, "status": "True"}}]}}}}))
""",
    )


def ray(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Actors are objects of this process, and a call is done at once."""
    package = folder / "ray"
    (package / "util").mkdir(parents=True)
    (package / "__init__.py").write_text(
        """
from types import SimpleNamespace

cloudpickle = SimpleNamespace(register_pickle_by_value=lambda module: None)
exceptions = SimpleNamespace(
    RayError=type("RayError", (Exception,), {}),
    RayActorError=type("RayActorError", (Exception,), {}),
    RayTaskError=type("RayTaskError", (Exception,), {}),
)
is_initialized = lambda: True
wait = lambda asked, timeout: (asked, [])
get = lambda asked: asked[0]
kill = lambda actor, no_restart: actor.actor.stop()


class Actor:
    def __init__(self, of):
        self.actor = of()

    def __getattr__(self, name):
        return SimpleNamespace(remote=lambda *words: Answer(getattr(self.actor, name)(*words)))


class Answer(list):
    def __init__(self, value):
        super().__init__([value])

    __hash__ = object.__hash__


def remote(of):
    return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda: Actor(of)))
"""
    )
    (package / "util" / "__init__.py").write_text(
        """
from types import SimpleNamespace

placement_group = lambda bundles, strategy: SimpleNamespace(wait=lambda seconds: True)
remove_placement_group = lambda group: None
get_node_ip_address = lambda: "127.0.0.1"
"""
    )
    (package / "util" / "scheduling_strategies.py").write_text("PlacementGroupSchedulingStrategy = dict\n")
    _importable(folder, monkeypatch, "ray", "ray.util", "ray.util.scheduling_strategies")


def spark(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage runs its function in this process; its error is the text that Spark would pass on."""
    (folder / "pyspark.py").write_text(
        """
import itertools
from types import SimpleNamespace

__path__ = [str(__file__)]
cloudpickle = SimpleNamespace(register_pickle_by_value=lambda module: None)


class SparkConf:
    def setMaster(self, master):
        return self

    def set(self, key, value):
        return self


class BarrierTaskContext:
    get = classmethod(lambda cls: cls())
    partitionId = lambda self: 0
    getTaskInfos = lambda self: [SimpleNamespace(address="127.0.0.1:0")]
    allGather = lambda self, text: [text]
    resources = lambda self: {}


class SparkContext:
    applicationId = "app-0"

    def __init__(self, conf):
        pass

    def setLogLevel(self, level):
        pass

    def stop(self):
        pass

    def parallelize(self, parts, count):
        return self

    def barrier(self):
        return self

    def mapPartitions(self, of):
        return SimpleNamespace(collect=lambda: list(of(iter([0]))))
"""
    )
    monkeypatch.setenv("SPARK_HOME", str(folder / "spark"))
    _importable(folder, monkeypatch, "pyspark")


def _shell(path: Path, text: str) -> None:
    if not (path.parent / "sh").exists():  # PATH may hold no shell
        (path.parent / "sh").symlink_to("/bin/sh")
    path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    path.chmod(0o755)


def _python(path: Path, text: str) -> None:
    path.write_text(f"#!{sys.executable}\n{text}", encoding="utf-8")
    path.chmod(0o755)


def _importable(folder: Path, monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
    monkeypatch.syspath_prepend(str(folder))
    for name in modules:
        monkeypatch.delitem(sys.modules, name, raising=False)
