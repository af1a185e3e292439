"""A real Slurm on hosts of its own: a controller, where users log in, and nodes that can lose their power.

    with cluster(nodes=2) as slurm:
        slurm.login.run(["srun", "-N2", "hostname"], env=slurm.environment)
        slurm.node("n2").power_cut()

Key, configuration, state, sockets and logs are in one temporary folder; what the machine has in /etc/slurm and
/etc/munge is neither read nor written. All daemons end with the hosts.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from beds.commands import need
from beds.hosts import Host, Running, need_hosts, several, until

_NEEDED = {
    **dict.fromkeys(("slurmctld", "slurmd", "sbatch", "srun", "scancel", "scontrol", "sinfo", "squeue"), "slurm-wlm"),
    "munged": "munge",
}
_PATH = "/usr/sbin:/sbin"
LOGIN = "login"
_FOLDER = "paceline-slurm-"  # and the process whose it is

# No cgroups, no systemd, no accounting; short waits, so that losses show within a test's patience. cred_expire is how
# long a requeued job has to wait. config_overrides: nodes may claim more processors and memory than there are.
_CONFIGURATION = """
ClusterName=paceline
SlurmctldHost={login}({address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
MpiDefault=none
MpiParams=ports=12000-12999
PropagateResourceLimitsExcept=MEMLOCK
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0,sched_min_interval=0
SlurmdParameters=config_overrides
ReturnToService=2
SlurmctldTimeout=10
MessageTimeout=3
TCPTimeout=1
SlurmdTimeout={patience}
InactiveLimit=0
KillWait=5
CompleteWait=0
MinJobAge=600
JobRequeue=1
OverTimeLimit=0
UnkillableStepTimeout=30
GresTypes=gpu
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO {partition}
"""


def need_slurm() -> None:
    """Skip the test, by name, where there is no Slurm."""
    need_hosts()
    need(_NEEDED, "Slurm")


@dataclass
class Slurm:
    """A Slurm that is up."""

    folder: Path
    hosts: Mapping[str, Host]
    environment: dict[str, str]
    _daemons: dict[str, Running] = field(default_factory=dict)

    @property
    def login(self) -> Host:
        return self.hosts[LOGIN]

    @property
    def nodes(self) -> list[str]:
        return [name for name in self.hosts if name != LOGIN]

    def ask(self, *words: str, timeout: float = 60) -> str:
        """What a command of Slurm's prints; it must succeed."""
        done = self.login.run(words, env=self.environment, timeout=timeout)
        assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"
        return done.stdout

    def states(self) -> dict[str, str]:
        """How each node stands: idle, allocated, down*, …"""
        done = self.login.run(["sinfo", "-h", "-N", "-o", "%N %T"], env=self.environment)
        return dict(line.split() for line in done.stdout.splitlines() if len(line.split()) == 2)

    def job(self, number: int | str) -> dict[str, str]:
        """What `scontrol show job` tells, by name."""
        text = self.ask("scontrol", "show", "job", "-o", str(number))
        return dict(re.findall(r"(\S+?)=(\S*)", text))

    def power_cut(self, node: str) -> None:
        self.hosts[node].power_cut()
        self._daemons.pop(node).wait()

    def power_on(self, node: str) -> None:
        self.hosts[node].power_on()
        self._start(node)

    def processes(self) -> dict[int, str]:
        """What runs on the nodes besides Slurm's own daemons."""
        own = {one.inner for one in self._daemons.values() if one.poll() is None}
        found = {pid: words for name in self.nodes for pid, words in self.hosts[name].processes().items()}
        return {pid: words for pid, words in found.items() if pid not in own and not words.startswith("nsenter")}

    def logs(self) -> str:
        return "\n".join(f"== {log.name}\n{log.read_text()[-3000:]}" for log in sorted(self.folder.glob("*.log")))

    def _up(self) -> None:
        for name in self.hosts:
            self._start(name)
        try:
            until(lambda: [*self.states().values()].count("idle") == len(self.nodes), 30, "all nodes are idle")
        except AssertionError as error:
            raise AssertionError(f"{error}: {self.states()}\n{self.logs()}") from None

    def _start(self, name: str) -> None:
        if name == LOGIN:
            key, socket = self.folder / "munge.key", self.folder / "munge.socket"
            words = ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={socket}"]
            words += [f"--pid-file={self.folder}/munged.pid", f"--seed-file={self.folder}/munged.seed"]
            self._daemon("munged", self.login, words)
            until(socket.exists, 10, "munged listens")
            self._daemon(LOGIN, self.login, ["slurmctld", "-D"])
        else:
            (self.folder / f"spool-{name}").mkdir(exist_ok=True)
            self._daemon(name, self.hosts[name], ["slurmd", "-D", "-N", name])

    def _daemon(self, name: str, host: Host, words: list[str]) -> None:
        with (self.folder / f"{name}.log").open("a") as log:
            self._daemons[name] = host.start(words, env=self.environment, stdout=log, stderr=subprocess.STDOUT)

    def _down(self) -> None:
        for daemon in self._daemons.values():
            daemon.kill()
            daemon.wait()


@contextmanager
def cluster(
    nodes: int = 2, cpus: int = 4, memory: int = 8000, gpus: int = 0, patience: int = 10, partition: str = ""
) -> Iterator[Slurm]:
    """Nodes n1, n2, … of a partition `main`, and a host `login`. `patience`: after which a silent node is down."""
    need_slurm()
    names = [f"n{number + 1}" for number in range(nodes)]
    _sweep()
    folder = Path(tempfile.mkdtemp(prefix=f"{_FOLDER}{os.getpid()}-"))
    try:
        folder.chmod(0o755)
        with several([LOGIN, *names]) as hosts:
            gres = f"Gres=gpu:{gpus}" if gpus else ""
            lines = [
                f"NodeName={name} NodeAddr={hosts[name].address} CPUs={cpus} RealMemory={memory} {gres} State=UNKNOWN"
                for name in names
            ]
            text = _CONFIGURATION.format(
                login=LOGIN, address=hosts[LOGIN].address, folder=folder, nodes="\n".join(lines), patience=patience,
                partition=partition,
            )  # fmt: skip
            (folder / "slurm.conf").write_text(text)
            (folder / "state").mkdir()
            # slurmd loads a plugin even if nothing uses it, and left to itself chooses one that may not start here
            (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
            _write_gpus(folder, gpus)
            key = folder / "munge.key"
            key.touch(mode=0o600)
            key.write_bytes(secrets.token_bytes(128))
            environment = {
                name: text for name, text in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_"))
            }
            environment |= {"SLURM_CONF": str(folder / "slurm.conf")}
            environment["PATH"] = f"{environment.get('PATH', '/usr/bin:/bin')}:{_PATH}"
            slurm = Slurm(folder, hosts, environment)
            try:
                slurm._up()
                yield slurm
            finally:
                slurm._down()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _sweep() -> None:
    """Remove the folders of tests that were killed: the kernel has ended their processes."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_FOLDER}*-*"):
        owner = folder.name.removeprefix(_FOLDER).partition("-")[0]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists():
            shutil.rmtree(folder, ignore_errors=True)


def _write_gpus(folder: Path, gpus: int) -> None:
    """Slurm wants a device file for each: copies of /dev/null."""
    lines = []
    for number in range(gpus):
        device = folder / f"gpu{number}"
        os.mknod(device, 0o20666, os.makedev(1, 3))
        lines.append(f"Name=gpu File={device}\n")
    (folder / "gres.conf").write_text("".join(lines))
