"""The variables of mpirun: Open MPI (also by PMIx) and MPICH (by PMI). Neither tells on which hosts other ranks run."""

from __future__ import annotations

from collections.abc import Mapping

from paceline.errors import UsageError
from paceline.network.cluster.description import Cluster, ClusterTask, Slot
from paceline.network.cluster.detect import EnvironmentSource, Variables, any_set


def _open_mpi(given: Variables) -> Cluster:
    local = ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")
    given.need("OMPI_COMM_WORLD_RANK|PMIX_RANK", "OMPI_COMM_WORLD_SIZE", *local)
    return _ranks(given, ("OMPI_COMM_WORLD_RANK", "PMIX_RANK"), "OMPI_COMM_WORLD_SIZE", *local)


def _mpich(given: Variables) -> Cluster:
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


_in_open_mpi = any_set("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
# mpirun may be started by srun
OPEN_MPI = EnvironmentSource(
    "Open MPI", "OMPI_COMM_WORLD_RANK", 20, _in_open_mpi, _open_mpi, _open_mpi_job, ends_all=True
)
# after Slurm: srun --mpi=pmi2 sets PMI's variables besides its own
MPICH = EnvironmentSource("MPICH", "PMI_RANK", 40, any_set("PMI_RANK", "PMI_SIZE"), _mpich, ends_all=True)
