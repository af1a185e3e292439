"""Roles of numbered tasks: by a list, by a policy; whatever order the tasks come in."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from paceline.errors import UsageError
from paceline.network.cluster import tf_config
from paceline.network.cluster.description import Cluster, ClusterTask
from paceline.network.cluster.placement import POLICIES, Place, placed, roles
from paceline.network.cluster.sources import mpi, slurm

# three nodes with 2, 3 and 1 tasks
PLACES: list[Place] = [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (2, 0)]


def short(found: dict[Place, str]) -> str:
    return "".join(found[place][0] for place in sorted(found))


@pytest.mark.parametrize(
    ("placement", "servers", "expected"),
    [
        ("pack", None, "scwwww"),
        ("pack", 0, "cwwwww"),
        ("pack", 3, "ssscww"),
        ("spread", None, "scwwww"),
        ("spread", 2, "scswww"),
        ("spread", 3, "scswws"),
        ("spread", 4, "ssscws"),
        ("spread", 5, "sssscs"),
        ("ps-per-node", None, "scswws"),
        ("ps-per-node", 3, "scswws"),
        ("ps,worker,worker,ps,worker,worker", None, "scwsww"),
        ("worker,worker,ps,server,chief,evaluator", None, "wwssce"),
        (" ps , worker,worker,worker,worker,worker", None, "scwwww"),
    ],
)
def test_who_is_what(placement: str, servers: int | None, expected: str) -> None:
    assert short(roles(reversed(PLACES), placement, servers)) == expected


@pytest.mark.parametrize(
    ("placement", "servers", "why"),
    [
        ("ps,worker", None, r"there are more tasks \(6\) than roles \(2\): 4 would have none"),
        ("worker", None, r"there are more tasks \(6\) than roles \(1\): 5 would have none"),
        (
            "ps," * 3 + "worker," * 4 + "worker",
            None,
            r"there are more roles \(8\) than tasks \(6\): 2 would have no task",
        ),
        ("ps,ps,ps,ps,ps,ps", None, "the placement names no worker"),
        ("chief,chief,ps,ps,ps,ps", None, "the placement names 2 chiefs; there can be one"),
        ("evaluator,evaluator,worker,ps,ps,ps", None, "the placement names 2 evaluators; there can be one"),
        ("ps,wroker", None, "no role 'wroker'; did you mean 'worker'"),
        ("ps,,worker", None, "no role ''; there are: chief, evaluator, ps, server, worker"),
        ("spred", None, "no placement 'spred'; did you mean 'spread'"),
        ("", None, "no placement ''; there are: pack, ps,worker,…, ps-per-node, spread"),
        ("ps,worker", 1, "says itself how many servers there are; omit --servers"),
        ("pack", -1, "the number of servers must be at least 0, not -1"),
        ("pack", 6, "pack: 6 servers among 6 tasks leave no worker"),
        ("spread", 9, "spread: 9 servers among 6 tasks leave no worker"),
        ("ps-per-node", 2, "ps-per-node gives 3 servers to 3 nodes, not 2"),
    ],
)
def test_what_is_refused(placement: str, servers: int | None, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        roles(PLACES, placement, servers)


def test_a_task_on_each_node_leaves_no_worker() -> None:
    with pytest.raises(UsageError, match="ps-per-node: 2 servers among 2 tasks leave no worker"):
        roles([(0, 0), (1, 0)], "ps-per-node")


NODES = some.lists(some.integers(1, 5), min_size=1, max_size=5)


def places(counts: list[int]) -> list[Place]:
    return [(node, local) for node, count in enumerate(counts) for local in range(count)]


@given(NODES, some.sampled_from(sorted(POLICIES)), some.none() | some.integers(0, 12), some.randoms())
@settings(deadline=None)
def test_a_policy_gives_what_was_asked(counts: list[int], policy: str, servers: int | None, chance: object) -> None:
    every = places(counts)
    if policy == "ps-per-node":
        servers = None
    asked = len(counts) if policy == "ps-per-node" else 1 if servers is None else servers
    mixed = list(every)
    chance.shuffle(mixed)  # type: ignore[attr-defined]
    if asked >= len(every):
        with pytest.raises(UsageError, match="leave no worker"):
            roles(mixed, policy, servers)
        return
    found = roles(mixed, policy, servers)
    assert found.keys() == set(every)  # every task has one role
    assert found == roles(every, policy, servers)  # whatever the order
    kinds = Counter(found.values())
    assert kinds["chief"] == 1
    assert kinds["server"] == asked
    assert kinds["worker"] == len(every) - asked - 1
    assert min(place for place in every if found[place] != "server") == next(p for p in every if found[p] == "chief")
    per_node = Counter(node for (node, _), kind in found.items() if kind == "server")
    if policy == "pack":
        assert [place for place in every if found[place] == "server"] == every[:asked]
    else:  # nobody has two more than somebody who could still take one
        room = [per_node[node] for node, count in enumerate(counts) if per_node[node] < count]
        assert not room or max(per_node.values(), default=0) <= min(room) + 1


@given(NODES, some.randoms(), some.data())
@settings(deadline=None)
def test_a_list_is_followed_node_by_node(counts: list[int], chance: object, data: some.DataObject) -> None:
    every = places(counts)
    words = data.draw(some.lists(some.sampled_from(["ps", "worker"]), min_size=len(every), max_size=len(every)))
    mixed = list(every)
    chance.shuffle(mixed)  # type: ignore[attr-defined]
    if "worker" not in words:
        with pytest.raises(UsageError, match="no worker"):
            roles(mixed, ",".join(words))
        return
    found = roles(mixed, ",".join(words))
    assert [found[place] == "server" for place in every] == [word == "ps" for word in words]
    assert [place for place in every if found[place] == "chief"] == [every[words.index("worker")]]


# srun -m cyclic placed ranks 0, 2, 3 on the first node and rank 1 on the second
STEP = {
    "SLURM_STEP_ID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_NODELIST": "pace[1-2]",
    "SLURM_STEP_TASKS_PER_NODE": "3,1",
    "SLURM_STEP_RESV_PORTS": "12000-12002",
}
TASKS = [("0", "0", "0"), ("2", "0", "1"), ("3", "0", "2"), ("1", "1", "0")]


def on_slurm(rank: str, node: str, local: str, **more: str) -> Cluster:
    mine = {"SLURM_PROCID": rank, "SLURM_NODEID": node, "SLURM_LOCALID": local}
    cluster = slurm.SOURCE.seen(STEP | mine | more)
    assert cluster is not None
    return cluster


class TestPlaced:
    def test_all_tasks_of_a_step_agree_without_a_word_between_them(self) -> None:
        """None of them knows where all the ranks are, and none needs to."""
        found = [placed(on_slurm(*task), "ps-per-node") for task in TASKS]
        assert len({cluster.tasks for cluster in found}) == 1
        assert [str(cluster.me) for cluster in found] == ["server:0", "chief:0", "worker:0", "server:1"]
        assert found[0].tasks == (
            ClusterTask("chief", 0, "pace1", 12001),
            ClusterTask("worker", 0, "pace1", 12002),
            ClusterTask("server", 0, "pace1", 12000),
            ClusterTask("server", 1, "pace2", 12000),
        )
        assert all(cluster.complete for cluster in found)

    def test_in_a_batch_script_nobody_is_meant(self) -> None:
        script = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "a[1-2]", "SLURM_TASKS_PER_NODE": "2(x2)"}
        cluster = slurm.SOURCE.seen(script)
        assert cluster is not None
        found = placed(cluster, "ps,worker,ps,worker")
        assert found.me is None
        assert [task.host for task in found.of("server")] == ["a1", "a2"]

    def test_on_one_host(self) -> None:
        cluster = mpi.MPICH.seen({"PMI_RANK": "1", "PMI_SIZE": "3", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "3"})
        assert cluster is not None
        assert placed(cluster, "spread", 2).me == ClusterTask("server", 1, "localhost")

    def test_roles_that_are_named_are_not_given_again(self) -> None:
        text = '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}}'
        cluster = tf_config.seen({"TF_CONFIG": text})
        assert cluster is not None
        with pytest.raises(UsageError, match="TF_CONFIG names the role of every task"):
            placed(cluster, "pack")
        with pytest.raises(UsageError, match="names the role of every task"):
            placed(placed(on_slurm(*TASKS[0]), "pack"), "pack")

    def test_nodes_that_are_not_told(self) -> None:
        cluster = mpi.MPICH.seen({"PMI_RANK": "1", "PMI_SIZE": "3"})
        assert cluster is not None
        with pytest.raises(UsageError, match="MPICH does not tell which tasks share a node; --placement needs to know"):
            placed(cluster, "pack")
