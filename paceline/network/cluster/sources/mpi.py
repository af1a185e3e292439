"""The variables of mpirun: Open MPI (also by PMIx) and MPICH (by PMI). Neither tells on which hosts other ranks run."""

from __future__ import annotations

from collections.abc import Mapping

from paceline.errors import UsageError
from paceline.network.cluster.description import Cluster, ClusterTask, Slot
from paceline.network.cluster.environment import EnvironmentSource, Variables

OPEN_MPI, MPICH = "Open MPI", "MPICH"


def open_mpi_present(environment: Mapping[str, str]) -> bool:
    return any(environment.get(name) for name in ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"))


def mpich_present(environment: Mapping[str, str]) -> bool:
    return any(environment.get(name) for name in ("PMI_RANK", "PMI_SIZE"))


def open_mpi(environment: Mapping[str, str]) -> Cluster | None:
    """The ranks of an `mpirun` of Open MPI; None: not under Open MPI."""
    if not open_mpi_present(environment):
        return None
    given = Variables(OPEN_MPI, environment)
    names = ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")
    given.need("OMPI_COMM_WORLD_RANK|PMIX_RANK", "OMPI_COMM_WORLD_SIZE", *names)
    return _ranks(given, ("OMPI_COMM_WORLD_RANK", "PMIX_RANK"), "OMPI_COMM_WORLD_SIZE", *names)


def mpich(environment: Mapping[str, str]) -> Cluster | None:
    """The ranks of an `mpiexec` of MPICH; None: not under MPICH."""
    if not mpich_present(environment):
        return None
    given = Variables(MPICH, environment)
    given.need("PMI_RANK", "PMI_SIZE")
    return _ranks(given, ("PMI_RANK",), "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")


def _ranks(given: Variables, rank_names: tuple[str, ...], size_name: str, local_name: str, here_name: str) -> Cluster:
    size = given.size(size_name)
    rank = given.needed(*rank_names, below=(size_name, size))
    here = given.number(here_name, least=1)
    local = given.number(local_name, below=None if here is None else (here_name, here))
    if here is not None and here > size:
        raise UsageError(f"{given.source}: {here_name} is {here}, but {size_name} is {size}")
    host = given.text("PMIX_HOSTNAME")
    if here == size:  # all on this host
        host = host or "localhost"
        tasks = tuple(ClusterTask("worker", one, host) for one in range(size))
        seats = tuple(Slot(0, one, host) for one in range(size))
        seat = seats[rank if local is None else local]
        return Cluster(given.source, tasks, tasks[rank], False, seats, seat)
    alone = [ClusterTask("worker", one, host if one == rank else None) for one in range(size)]
    return Cluster(given.source, tuple(alone), alone[rank], by_role=False)


def _open_mpi_job(environment: Mapping[str, str]) -> str | None:
    space = environment.get("PMIX_NAMESPACE")
    return None if space is None else "mpi-" + "".join(letter if letter.isalnum() else "-" for letter in space)


# mpirun may be started by srun
OPEN_MPI_SOURCE = EnvironmentSource(
    OPEN_MPI, "OMPI_COMM_WORLD_RANK", 20, open_mpi_present, open_mpi, _open_mpi_job, ends_all=True
)
# after Slurm: srun --mpi=pmi2 sets PMI's variables besides its own
MPICH_SOURCE = EnvironmentSource(MPICH, "PMI_RANK", 40, mpich_present, mpich, ends_all=True)
