"""Which source an environment shows. Where there are several, the nearest to this process counts, and that is said."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from paceline.network.cluster import mpi, slurm, tf_config, torchrun
from paceline.network.cluster.description import Cluster


@dataclass(frozen=True)
class EnvironmentSource:
    """Somebody who starts processes and numbers them."""

    name: str
    rank: str  # the variable with this process's number
    present: Callable[[Mapping[str, str]], bool]
    seen: Callable[[Mapping[str, str]], Cluster | None]


# the innermost first: torchrun may be started by mpirun or srun, and mpirun by srun; variables are inherited;
# PMI's are last, since srun --mpi=pmi2 sets them besides its own
ENGINES = (
    EnvironmentSource(torchrun.NAME, torchrun.RANK, torchrun.present, torchrun.seen),
    EnvironmentSource(mpi.OPEN_MPI, mpi.OPEN_MPI_RANK, mpi.open_mpi_present, mpi.open_mpi),
    EnvironmentSource(slurm.NAME, slurm.RANK, slurm.present, slurm.seen),
    EnvironmentSource(mpi.MPICH, mpi.MPICH_RANK, mpi.mpich_present, mpi.mpich),
)


def seen(environment: Mapping[str, str]) -> Cluster | None:
    """The cluster that an environment describes; None: this process is alone.

    TF_CONFIG names the role of each task, so it counts before what engines say.
    """
    engines = [engine for engine in ENGINES if engine.present(environment)]
    named = tf_config.seen(environment)
    if named is not None:
        ignored = ", ".join(engine.name for engine in engines)
        return noted(named, f"TF_CONFIG counts; the variables of {ignored} are not read") if engines else named
    if not engines:
        return None
    first = engines[0]
    found = first.seen(environment)
    assert found is not None
    for other in engines[1:]:
        ours, theirs = environment.get(first.rank), environment.get(other.rank)
        if ours != theirs:
            told = f"{other.rank} is {theirs}" if theirs else f"{other.name} is there too"
            found = noted(found, f"{first.rank} counts, which is {ours}; {told} and is not read")
    return found


def noted(cluster: Cluster, note: str) -> Cluster:
    return replace(cluster, notes=(*cluster.notes, note))
