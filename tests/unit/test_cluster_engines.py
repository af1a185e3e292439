"""MPI, torchrun, and which source counts where an environment shows several."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.errors import UsageError
from paceline.network.cluster.description import Cluster, ClusterTask, Slot
from paceline.network.cluster.detect import engines, seen
from paceline.network.cluster.sources import mpi, torchrun

Environment = dict[str, str]

# mpirun -n 4 on one machine
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "PMIX_RANK": "1",
    "PMIX_HOSTNAME": "pace1",
}
MPICH = {"PMI_RANK": "2", "PMI_SIZE": "3", "MPI_LOCALRANKID": "2", "MPI_LOCALNRANKS": "3"}
# torchrun --standalone --nproc-per-node=2
TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "0",
    "GROUP_WORLD_SIZE": "1",
    "MASTER_ADDR": "pace1",
    "MASTER_PORT": "29777",
    "TORCHELASTIC_RUN_ID": "j1",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
SLURM = {
    "SLURM_JOB_ID": "71",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "0",
    "SLURM_NTASKS": "1",
    "SLURM_NODEID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_NODELIST": "pace1",
    "SLURM_STEP_TASKS_PER_NODE": "1",
    "SLURM_STEP_RESV_PORTS": "12000",
}
TF_CONFIG = {"TF_CONFIG": '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}}'}


def changed(environment: Environment, **values: str | None) -> Environment:
    return {name: value for name, value in (environment | values).items() if value is not None}


def hosts(cluster: Cluster | None) -> list[str | None]:
    assert cluster is not None
    return [task.host for task in cluster.tasks]


class TestMpi:
    def test_all_on_one_host(self) -> None:
        cluster = mpi.OPEN_MPI.seen(OPEN_MPI)
        assert cluster is not None
        assert hosts(cluster) == ["pace1"] * 4
        assert cluster.me == ClusterTask("worker", 1, "pace1")
        assert cluster.seat == Slot(0, 1, "pace1")
        assert not cluster.complete  # no ports
        assert cluster.source == "Open MPI"

    def test_on_several_only_the_own_host_is_told(self) -> None:
        cluster = mpi.OPEN_MPI.seen(changed(OPEN_MPI, OMPI_COMM_WORLD_LOCAL_SIZE="2"))
        assert hosts(cluster) == [None, "pace1", None, None]
        assert cluster is not None
        assert cluster.seats == ()
        assert "worker:0, worker:2, worker:3: where they run is not told" in cluster.missing[0]

    def test_without_a_host_name_one_host_is_this_one(self) -> None:
        assert hosts(mpi.OPEN_MPI.seen(changed(OPEN_MPI, PMIX_HOSTNAME=None))) == ["localhost"] * 4

    def test_pmix_tells_the_rank_too(self) -> None:
        cluster = mpi.OPEN_MPI.seen(changed(OPEN_MPI, OMPI_COMM_WORLD_RANK=None))
        assert cluster is not None
        assert cluster.me == ClusterTask("worker", 1, "pace1")

    def test_mpich(self) -> None:
        cluster = mpi.MPICH.seen(MPICH)
        assert cluster is not None
        assert cluster.me == ClusterTask("worker", 2, "localhost")
        assert cluster.seat == Slot(0, 2, "localhost")
        unsaid = mpi.MPICH.seen(changed(MPICH, MPI_LOCALRANKID=None))
        assert unsaid == cluster
        assert hosts(mpi.MPICH.seen({"PMI_RANK": "0", "PMI_SIZE": "2"})) == [None, None]

    def test_absent(self) -> None:
        assert mpi.OPEN_MPI.seen({"PMIX_RANK": "0"}) is None
        assert mpi.MPICH.seen({}) is None

    @pytest.mark.parametrize(
        ("values", "why"),
        [
            (
                {"OMPI_COMM_WORLD_RANK": None, "PMIX_RANK": None},
                "^Open MPI: OMPI_COMM_WORLD_RANK or PMIX_RANK is missing in the environment$",
            ),
            ({"OMPI_COMM_WORLD_SIZE": None}, "^Open MPI: OMPI_COMM_WORLD_SIZE is missing in the environment$"),
            (
                {"OMPI_COMM_WORLD_LOCAL_RANK": None, "OMPI_COMM_WORLD_LOCAL_SIZE": " "},
                "OMPI_COMM_WORLD_LOCAL_RANK, OMPI_COMM_WORLD_LOCAL_SIZE are missing",
            ),
            ({"OMPI_COMM_WORLD_RANK": "4"}, "OMPI_COMM_WORLD_RANK is 4, but OMPI_COMM_WORLD_SIZE is 4"),
            ({"OMPI_COMM_WORLD_RANK": "x"}, "OMPI_COMM_WORLD_RANK must be a whole number of at least 0, not 'x'"),
            ({"OMPI_COMM_WORLD_SIZE": "99999999"}, "OMPI_COMM_WORLD_SIZE is 99,999,999; at most 65,536 tasks"),
            ({"OMPI_COMM_WORLD_LOCAL_SIZE": "5"}, "OMPI_COMM_WORLD_LOCAL_SIZE is 5, but OMPI_COMM_WORLD_SIZE is 4"),
            ({"OMPI_COMM_WORLD_LOCAL_RANK": "4"}, "LOCAL_RANK is 4, but OMPI_COMM_WORLD_LOCAL_SIZE is 4"),
        ],
    )
    def test_what_is_refused(self, values: dict[str, Any], why: str) -> None:
        with pytest.raises(UsageError, match=why):
            mpi.OPEN_MPI.seen(changed(OPEN_MPI, **values))

    def test_what_is_refused_of_mpich(self) -> None:
        with pytest.raises(UsageError, match="MPICH: PMI_RANK is missing"):
            mpi.MPICH.seen({"PMI_SIZE": "2"})
        with pytest.raises(UsageError, match="MPICH: PMI_SIZE is missing"):
            mpi.MPICH.seen({"PMI_RANK": "2"})


class TestTorchrun:
    def test_one_node(self) -> None:
        cluster = torchrun.SOURCE.seen(TORCHRUN)
        assert cluster is not None
        assert cluster.tasks == (ClusterTask("worker", 0, "localhost"), ClusterTask("worker", 1, "localhost"))
        assert cluster.me == cluster.tasks[1]
        assert cluster.seats == (Slot(0, 0, "localhost"), Slot(0, 1, "localhost"))
        assert cluster.meeting == "pace1:29777"

    def test_the_agent_listens_at_the_port_and_no_task_can(self) -> None:
        with_agent = torchrun.SOURCE.seen(TORCHRUN)
        without = torchrun.SOURCE.seen(changed(TORCHRUN, TORCHELASTIC_USE_AGENT_STORE=None))
        assert with_agent is not None
        assert with_agent.chief.port is None
        assert without is not None
        assert without.chief == ClusterTask("worker", 0, "pace1", 29777)
        assert without.me == ClusterTask("worker", 1, "pace1")

    @pytest.mark.parametrize(
        ("node", "rank", "local", "here", "seat"), [(0, 0, 0, 1, (0, 0)), (1, 1, 0, 2, (1, 0)), (1, 2, 1, 2, (1, 1))]
    )
    def test_two_nodes_with_one_and_two(
        self, node: int, rank: int, local: int, here: int, seat: tuple[int, int]
    ) -> None:
        numbers = {"GROUP_RANK": node, "RANK": rank, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": here}
        told = {name: str(value) for name, value in numbers.items()}
        cluster = torchrun.SOURCE.seen(TORCHRUN | told | {"WORLD_SIZE": "3", "GROUP_WORLD_SIZE": "2"})
        assert cluster is not None
        assert [(one.node, one.local) for one in cluster.seats] == [(0, 0), (1, 0), (1, 1)]
        assert cluster.seat == Slot(*seat)
        assert hosts(cluster) == [None] * 3

    def test_a_process_on_each_node(self) -> None:
        alone = {
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "WORLD_SIZE": "3",
            "GROUP_WORLD_SIZE": "3",
            "GROUP_RANK": "1",
        }
        cluster = torchrun.SOURCE.seen(TORCHRUN | alone)
        assert cluster is not None
        assert cluster.seats == (Slot(0, 0), Slot(1, 0), Slot(2, 0))

    def test_three_nodes_are_not_guessed(self) -> None:
        cluster = torchrun.SOURCE.seen(TORCHRUN | {"WORLD_SIZE": "6", "GROUP_WORLD_SIZE": "3"})
        assert cluster is not None
        assert cluster.seats == ()
        assert cluster.notes == ("how many processes other nodes have is not told",)

    def test_env_alone_as_some_operators_set_it(self) -> None:
        env = {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}
        cluster = torchrun.SOURCE.seen(env)
        assert cluster is not None
        assert cluster.tasks == (
            ClusterTask("worker", 0, "job-master-0", 23456),
            ClusterTask("worker", 1),
            ClusterTask("worker", 2),
        )
        assert cluster.notes == (
            "LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK are missing: which processes share a node is not told",
        )

    def test_ipv6(self) -> None:
        cluster = torchrun.SOURCE.seen(TORCHRUN | {"MASTER_ADDR": "fd00::2"})
        assert cluster is not None
        assert cluster.meeting == "[fd00::2]:29777"

    @pytest.mark.parametrize("environment", [{}, {"RANK": "gold"}, {"MASTER_ADDR": "a", "WORLD_SIZE": "4"}])
    def test_absent(self, environment: Environment) -> None:
        """Job scripts often export MASTER_ADDR and WORLD_SIZE for their tasks; only a rank makes one of them."""
        assert torchrun.SOURCE.seen(environment) is None

    @pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
    def test_a_missing_variable_is_named(self, name: str) -> None:
        with pytest.raises(UsageError, match=f"^torchrun: {name} is missing in the environment$"):
            torchrun.SOURCE.seen(changed(TORCHRUN, **{name: None}))

    @pytest.mark.parametrize("name", ["LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"])
    def test_what_can_be_missing_is_named_too(self, name: str) -> None:
        cluster = torchrun.SOURCE.seen(changed(TORCHRUN, **{name: None}))
        assert cluster is not None
        assert cluster.notes == (f"{name} is missing: which processes share a node is not told",)

    @pytest.mark.parametrize(
        ("values", "why"),
        [
            ({"RANK": "2"}, "torchrun: RANK is 2, but WORLD_SIZE is 2"),
            ({"LOCAL_RANK": "2"}, "LOCAL_RANK is 2, but LOCAL_WORLD_SIZE is 2"),
            ({"LOCAL_WORLD_SIZE": "3"}, "LOCAL_WORLD_SIZE is 3, but WORLD_SIZE is 2"),
            ({"WORLD_SIZE": "4", "GROUP_RANK": "1"}, "GROUP_RANK is 1, but GROUP_WORLD_SIZE is 1"),
            ({"MASTER_PORT": "0"}, "MASTER_ADDR and MASTER_PORT: the port of 'pace1:0' must be a number"),
            ({"MASTER_ADDR": "a b"}, "MASTER_ADDR and MASTER_PORT: 'a b:29777' is not an address"),
            (
                {"LOCAL_RANK": "0"},
                "RANK 1 would be process 1 of node 0, but LOCAL_RANK is 0 and GROUP_RANK is 0",
            ),
        ],
    )
    def test_what_is_refused(self, values: Environment, why: str) -> None:
        with pytest.raises(UsageError, match=why):
            torchrun.SOURCE.seen(TORCHRUN | values)


class TestDetect:
    @pytest.mark.parametrize(
        ("environment", "source"),
        [
            (TF_CONFIG, "TF_CONFIG"),
            (SLURM, "Slurm step 71.0"),
            (OPEN_MPI, "Open MPI"),
            (MPICH, "MPICH"),
            (TORCHRUN, "torchrun"),
        ],
    )
    def test_each_alone(self, environment: Environment, source: str) -> None:
        cluster = seen({"PATH": "/bin", "HOME": "/root", **environment})
        assert cluster is not None
        assert cluster.source == source
        assert not any("not read" in note for note in cluster.notes)

    def test_the_innermost_counts_first(self) -> None:
        assert [engine.name for engine in engines()] == ["torchrun", "Open MPI", "Slurm", "MPICH"]

    @pytest.mark.parametrize(
        ("environment", "names"),
        [
            ({"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "2", "SLURM_RESTART_COUNT": "1"}, ["slurm-7.2.1"]),
            ({"SLURM_JOB_ID": "7", "PMIX_NAMESPACE": "prte-a@1"}, ["mpi-prte-a-1", "slurm-7.0.0"]),
            ({"RANK": "0"}, []),
        ],
    )
    def test_a_job_has_one_name_in_all_its_tasks(self, environment: Environment, names: list[str]) -> None:
        assert [name for engine in engines() if (name := engine.job(environment))] == names

    def test_nothing(self) -> None:
        assert seen({"PATH": "/bin", "TF_CONFIG": "{}"}) is None

    def test_tf_config_counts_before_engines(self) -> None:
        cluster = seen(TF_CONFIG | SLURM | TORCHRUN)
        assert cluster is not None
        assert cluster.me == ClusterTask("worker", 0, "a", 1)
        assert cluster.notes == ("TF_CONFIG counts; the variables of torchrun, Slurm are not read",)

    def test_a_tf_config_without_a_cluster_does_not(self) -> None:
        cluster = seen({"TF_CONFIG": "{}"} | SLURM)
        assert cluster is not None
        assert cluster.source == "Slurm step 71.0"

    def test_an_engine_inside_another_counts(self) -> None:
        cluster = seen(SLURM | OPEN_MPI)
        assert cluster is not None
        assert cluster.source == "Open MPI"
        assert cluster.notes[-1] == "OMPI_COMM_WORLD_RANK counts, which is 1; SLURM_PROCID is 0 and is not read"
        inner = seen(SLURM | OPEN_MPI | TORCHRUN)
        assert inner is not None
        assert inner.source == "torchrun"

    def test_two_that_agree_are_not_worth_a_word(self) -> None:
        """srun --mpi=pmi2 sets both."""
        cluster = seen(SLURM | {"PMI_RANK": "0", "PMI_SIZE": "1"})
        assert cluster is not None
        assert cluster.source == "Slurm step 71.0"
        assert cluster.notes == ()

    def test_what_does_not_count_is_not_read(self) -> None:
        """A broken variable of an engine that is not asked breaks nothing."""
        cluster = seen(TORCHRUN | {"SLURM_JOB_ID": "71"})
        assert cluster is not None
        assert cluster.notes == ("RANK counts, which is 1; Slurm is there too and is not read",)
