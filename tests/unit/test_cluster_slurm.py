"""Slurm: short forms of hosts, counts and ports; which ranks are told to be where, and which are not."""

from __future__ import annotations

import contextlib
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from paceline.errors import UsageError
from paceline.network.cluster.description import Cluster, ClusterTask, Slot
from paceline.network.cluster.slurm_hostlist import counts, hosts, ports
from paceline.network.cluster.sources.slurm import SOURCE

HOSTS = [
    ("pace[1-2]", ["pace1", "pace2"]),
    ("h[1,3]", ["h1", "h3"]),
    ("c[7001-7004,7010]", ["c7001", "c7002", "c7003", "c7004", "c7010"]),
    ("a[01-03,7],b1", ["a01", "a02", "a03", "a7", "b1"]),
    ("a[01-03]b[1-2]", ["a01b1", "a01b2", "a02b1", "a02b2", "a03b1", "a03b2"]),
    ("n[098-101]", ["n098", "n099", "n100", "n101"]),
    ("n[8-11]", ["n8", "n9", "n10", "n11"]),
    ("one", ["one"]),
    ("x,y,z", ["x", "y", "z"]),
    ("r[1-2]n[0-1].site.org,login-1", ["r1n0.site.org", "r1n1.site.org", "r2n0.site.org", "r2n1.site.org", "login-1"]),
    ("gpu-[00,02]-ib", ["gpu-00-ib", "gpu-02-ib"]),
    ("n[000]", ["n000"]),
]


class TestHosts:
    @pytest.mark.parametrize(("text", "names"), HOSTS)
    def test_expanded(self, text: str, names: list[str]) -> None:
        assert hosts(text, "LIST") == names

    @pytest.mark.parametrize(
        ("text", "why"),
        [
            ("", "LIST: cannot read '' at ''"),
            ("a,,b", "LIST: cannot read 'a,,b' at ',b'; it should look like"),
            ("a,", "LIST: cannot read 'a,' at ''"),
            (",a", "cannot read ',a' at ',a'"),
            ("a[1-2", r"cannot read 'a\[1-2' at '\[1-2'"),
            ("a1-2]", r"at '\]'"),
            ("a[1-[2-3]]", r"cannot read .* at '\[1-\[2-3\]\]'"),
            ("a b", "at ' b'"),
            ("a[]", r"cannot read '' in 'a\[\]'; it should be a number or a range as 01-03"),
            ("a[1,]", "cannot read '' in"),
            ("a[1-2-3]", "cannot read '1-2-3' in"),
            ("a[x-z]", "cannot read 'x-z' in"),
            ("a[٣]", "cannot read '٣' in"),
            ("a[-3]", "cannot read '-3' in"),
            ("a[3-1]", r"the range 3-1 in 'a\[3-1\]' runs backwards"),
            ("a[1-010]", r"the ends of the range 1-010 in .* have different zeros in front"),
            ("a[0-65536]", "stands for more than 65,536 hosts"),
            ("a[1-999999999999999999]", "stands for more than 65,536 hosts"),
            ("[0-999][0-999][0-999]", "stands for more than 65,536 hosts"),
            ("a[1-65536],b", "stands for more than 65,536 hosts"),
            ("a[1-9999999999999999999]", "cannot read '1-9999999999999999999'"),
        ],
    )
    def test_what_is_refused(self, text: str, why: str) -> None:
        with pytest.raises(UsageError, match=why):
            hosts(text, "LIST")

    def test_as_many_as_are_allowed(self) -> None:
        assert len(hosts("a[1-65536]", "LIST")) == 65_536


# a host list as plain data: names, each of them parts, each of which is a text or the numbers of a bracket
TEXT = some.from_regex(r"[a-z][a-z0-9.-]{0,3}", fullmatch=True)
SPAN = some.tuples(some.integers(0, 1200), some.integers(0, 12), some.integers(1, 4))
NAME = some.tuples(TEXT, some.lists(some.tuples(some.lists(SPAN, min_size=1, max_size=3), TEXT), max_size=2))


def written(name: tuple[str, list[tuple[list[tuple[int, int, int]], str]]]) -> str:
    text, brackets = name
    for spans, after in brackets:
        items = [
            f"{low:0{width}d}-{low + more:0{width}d}" if more else f"{low:0{width}d}" for low, more, width in spans
        ]
        text += f"[{','.join(items)}]{after}"
    return text


def naive(name: tuple[str, list[tuple[list[tuple[int, int, int]], str]]]) -> list[str]:
    """One place after the other, by hand."""
    text, brackets = name
    found = [text]
    for spans, after in brackets:
        numbers = []
        for low, more, width in spans:
            for number in range(low, low + more + 1):
                digits = str(number)
                while len(digits) < width:
                    digits = "0" + digits
                numbers.append(digits)
        found = [start + number + after for start in found for number in numbers]
    return found


@given(some.lists(NAME, min_size=1, max_size=4))
@settings(deadline=None, max_examples=60)
def test_a_compressed_list_is_what_it_stands_for(
    names: list[tuple[str, list[tuple[list[tuple[int, int, int]], str]]]],
) -> None:
    expected = list(itertools.chain.from_iterable(naive(name) for name in names))
    assert hosts(",".join(written(name) for name in names), "LIST") == expected


@given(some.text(alphabet="ab01-[],( x", max_size=12))
@settings(deadline=None)
def test_any_text_is_read_or_refused(text: str) -> None:
    for read in (hosts, counts, ports):
        with contextlib.suppress(UsageError):
            assert read(text, "LIST")


class TestNumbers:
    @pytest.mark.parametrize(
        ("text", "tasks"),
        [("2(x3),1", [2, 2, 2, 1]), ("2(x2)", [2, 2]), ("2,1", [2, 1]), ("4", [4]), ("1(x1),3", [1, 3])],
    )
    def test_counts(self, text: str, tasks: list[int]) -> None:
        assert counts(text, "COUNTS") == tasks

    @pytest.mark.parametrize(
        ("text", "why"),
        [
            ("2(x", r"COUNTS: cannot read '2\(x' in '2\(x'; it should look like 2\(x3\),1"),
            ("", "cannot read ''"),
            ("2(3)", "cannot read"),
            ("2(x0)", "counts nothing"),
            ("0", "counts nothing"),
            ("1(x65537)", "counts more than 65,536 tasks"),
            ("65536,1", "counts more than 65,536 tasks"),
        ],
    )
    def test_counts_that_are_refused(self, text: str, why: str) -> None:
        with pytest.raises(UsageError, match=why):
            counts(text, "COUNTS")

    @pytest.mark.parametrize(
        ("text", "numbers"),
        [
            ("12000", [12000]),
            ("12000-12003", [12000, 12001, 12002, 12003]),
            ("12000,12005-12006", [12000, 12005, 12006]),
            ("[12000-12001]", [12000, 12001]),
        ],
    )
    def test_ports(self, text: str, numbers: list[int]) -> None:
        assert ports(text, "PORTS") == numbers

    @pytest.mark.parametrize(
        ("text", "why"),
        [
            ("70000", "PORTS: '70000' holds no ports from 1 to 65535"),
            ("0-5", "holds no ports from 1 to 65535"),
            ("12000-99999999", "holds no ports"),
            ("x", "PORTS: cannot read 'x' in 'x'"),
            ("12005-12000", "runs backwards"),
            ("12000-12002,12001", "holds a port twice"),
        ],
    )
    def test_ports_that_are_refused(self, text: str, why: str) -> None:
        with pytest.raises(UsageError, match=why):
            ports(text, "PORTS")


# srun -N2 --ntasks-per-node=2 on the loopback cluster of two nodes
STEP = {
    "SLURM_JOB_ID": "71",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "2",
    "SLURM_NTASKS": "4",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_NNODES": "2",
    "SLURM_JOB_NODELIST": "pace[1-2]",
    "SLURM_STEP_NODELIST": "pace[1-2]",
    "SLURM_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_GTIDS": "2,3",
    "SLURMD_NODENAME": "pace2",
    "SLURM_STEP_RESV_PORTS": "12000-12001",
}


def step(**changed: str | None) -> Cluster:
    environment = {name: value for name, value in (STEP | changed).items() if value is not None}
    found = SOURCE.seen(environment)
    assert found is not None
    return found


def places(cluster: Cluster) -> list[tuple[str | None, int | None]]:
    return [(task.host, task.port) for task in cluster.tasks]


class TestStep:
    def test_two_nodes_are_told_by_the_ranks_of_one(self) -> None:
        cluster = step()
        assert places(cluster) == [("pace1", 12000), ("pace1", 12001), ("pace2", 12000), ("pace2", 12001)]
        assert cluster.me == ClusterTask("worker", 2, "pace2", 12000)
        assert cluster.chief == ClusterTask("worker", 0, "pace1", 12000)
        assert cluster.seat == Slot(1, 0, "pace2", 12000)
        assert cluster.complete
        assert cluster.source == "Slurm step 71.0"
        assert cluster.notes == ()

    def test_cyclic_placement_is_not_taken_for_blocks(self) -> None:
        """srun -N2 -n4 -m cyclic placed 3 + 1: rank 1 is on the second node, ranks 0, 2 and 3 on the first."""
        uneven = {"SLURM_STEP_TASKS_PER_NODE": "3,1", "SLURM_STEP_RESV_PORTS": "12000-12002"}
        expected = [("pace1", 12000), ("pace2", 12000), ("pace1", 12001), ("pace1", 12002)]
        first = step(**uneven, SLURM_NODEID="0", SLURM_LOCALID="1", SLURM_GTIDS="0,2,3")
        second = step(**uneven, SLURM_PROCID="1", SLURM_NODEID="1", SLURM_LOCALID="0", SLURM_GTIDS="1")
        assert places(first) == places(second) == expected
        assert first.seats == second.seats

    def test_of_three_nodes_only_the_own_one_is_told(self) -> None:
        cluster = step(
            SLURM_NTASKS="5",
            SLURM_STEP_NODELIST="c[7001-7003]",
            SLURM_STEP_TASKS_PER_NODE="2(x2),1",
            SLURM_GTIDS="1,4",
            SLURM_PROCID="4",
            SLURM_LOCALID="1",
        )
        unknown = (None, None)
        assert places(cluster) == [unknown, ("c7002", 12000), unknown, unknown, ("c7002", 12001)]
        assert not cluster.complete
        assert "worker:0, worker:2, worker:3: where they run is not told and must be exchanged" in cluster.missing[0]
        # but every seat has an address
        assert [(seat.host, seat.port) for seat in cluster.seats] == [
            *(("c7001", 12000), ("c7001", 12001), ("c7002", 12000), ("c7002", 12001), ("c7003", 12000))
        ]

    def test_without_the_ranks_of_the_node_only_this_process_is_told(self) -> None:
        cluster = step(SLURM_GTIDS=None)
        assert places(cluster) == [(None, None), (None, None), ("pace2", 12000), (None, None)]

    @pytest.mark.parametrize(("distribution", "known"), [("block", 3), ("cyclic", 3), ("arbitrary", 1), (None, 3)])
    def test_one_task_on_each_node(self, distribution: str | None, known: int) -> None:
        cluster = step(
            SLURM_NTASKS="3",
            SLURM_PROCID="1",
            SLURM_STEP_NODELIST="n[1-3]",
            SLURM_STEP_TASKS_PER_NODE="1(x3)",
            SLURM_GTIDS="1",
            SLURM_DISTRIBUTION=distribution,
        )
        assert sum(task.host is not None for task in cluster.tasks) == known
        assert cluster.me == ClusterTask("worker", 1, "n2", 12000)

    def test_one_task_on_each_node_in_another_order(self) -> None:
        cluster = step(
            SLURM_NTASKS="3", SLURM_STEP_NODELIST="n[1-3]", SLURM_STEP_TASKS_PER_NODE="1(x3)", SLURM_GTIDS="2"
        )
        assert places(cluster) == [(None, None), (None, None), ("n2", 12000)]

    def test_one_node(self) -> None:
        cluster = step(
            SLURM_NODEID="0",
            SLURM_LOCALID="2",
            SLURM_STEP_NODELIST="pace1",
            SLURM_STEP_TASKS_PER_NODE=None,
            SLURM_TASKS_PER_NODE=None,
            SLURM_GTIDS=None,
            SLURM_STEP_RESV_PORTS="5000,5002,5004-5005",
        )
        assert places(cluster) == [("pace1", 5000), ("pace1", 5002), ("pace1", 5004), ("pace1", 5005)]
        assert cluster.one_host

    def test_the_step_counts_and_not_the_job(self) -> None:
        cluster = step(SLURM_JOB_NODELIST="pace[1-9]", SLURM_TASKS_PER_NODE="7(x9)")
        assert {task.host for task in cluster.tasks} == {"pace1", "pace2"}

    def test_without_ports(self) -> None:
        cluster = step(SLURM_STEP_RESV_PORTS=None)
        assert places(cluster) == [("pace1", None), ("pace1", None), ("pace2", None), ("pace2", None)]
        assert cluster.notes == ("SLURM_STEP_RESV_PORTS is not set: srun --resv-ports=2 reserves ports",)

    def test_a_layout_that_does_not_fit_is_not_believed(self) -> None:
        """In a heterogeneous job ranks run through all groups, and a group's own list has only its own tasks."""
        cluster = step(SLURM_STEP_TASKS_PER_NODE="1", SLURM_STEP_NODELIST="pace2")
        assert places(cluster) == [(None, None), (None, None), ("pace2", None), (None, None)]
        assert cluster.notes == ("SLURM_STEP_TASKS_PER_NODE tells of 1 tasks, but there are 4",)
        assert cluster.seats == ()
        several = step(SLURM_STEP_TASKS_PER_NODE="4")
        assert several.notes == ("SLURM_STEP_TASKS_PER_NODE tells of 1 nodes, but SLURM_STEP_NODELIST of 2",)
        untold = step(SLURM_STEP_TASKS_PER_NODE=None, SLURM_TASKS_PER_NODE=None)
        assert untold.notes == ("SLURM_STEP_TASKS_PER_NODE is missing: how many tasks each node has is not told",)

    @pytest.mark.parametrize("name", ["SLURM_PROCID", "SLURM_NODEID", "SLURM_LOCALID"])
    def test_a_missing_variable_is_named(self, name: str) -> None:
        with pytest.raises(UsageError, match=f"^Slurm: {name} is missing in the environment$"):
            step(**{name: None})

    def test_all_missing_variables_are_named(self) -> None:
        with pytest.raises(UsageError) as caught:
            SOURCE.seen({"SLURM_STEP_ID": "0"})
        assert str(caught.value) == (
            "Slurm: SLURM_PROCID, SLURM_NTASKS or SLURM_STEP_NUM_TASKS, SLURM_NODEID, SLURM_LOCALID, "
            "SLURM_STEP_NODELIST or SLURM_JOB_NODELIST are missing in the environment"
        )

    @pytest.mark.parametrize(
        ("changed", "why"),
        [
            ({"SLURM_PROCID": "4"}, "Slurm: SLURM_PROCID is 4, but SLURM_NTASKS is 4"),
            ({"SLURM_PROCID": "-1"}, "SLURM_PROCID must be a whole number of at least 0, not '-1'"),
            ({"SLURM_NTASKS": "0"}, "SLURM_NTASKS must be a whole number of at least 1, not '0'"),
            ({"SLURM_NTASKS": "65537"}, "SLURM_NTASKS is 65,537; at most 65,536 tasks are allowed"),
            ({"SLURM_NODEID": "2"}, "SLURM_NODEID is 2, but SLURM_STEP_NODELIST has 2 nodes"),
            ({"SLURM_LOCALID": "2"}, "SLURM_LOCALID is 2, but node 1 has 2 tasks"),
            ({"SLURM_LOCALID": "1"}, r"SLURM_LOCALID is 1, but rank 2 is no. 0 on its node"),
            ({"SLURM_GTIDS": "2"}, "SLURM_GTIDS is '2'; it should be the 2 ranks of this node, with 2"),
            ({"SLURM_GTIDS": "0,1"}, "SLURM_GTIDS is '0,1'; it should be"),
            ({"SLURM_GTIDS": "2,2"}, "SLURM_GTIDS is '2,2'; it should be"),
            ({"SLURM_GTIDS": "2,x"}, "SLURM_GTIDS must be ranks with commas between, not '2,x'"),
            ({"SLURM_STEP_NODELIST": "pace[1"}, r"SLURM_STEP_NODELIST: cannot read 'pace\[1'"),
            ({"SLURM_STEP_NODELIST": "a,a"}, "SLURM_STEP_NODELIST names a node twice: a,a"),
            ({"SLURM_STEP_TASKS_PER_NODE": "two"}, "SLURM_STEP_TASKS_PER_NODE: cannot read 'two'"),
            (
                {"SLURM_STEP_RESV_PORTS": "12000"},
                "SLURM_STEP_RESV_PORTS holds 1 ports, but a node has 2 tasks; ask for them with srun --resv-ports=2",
            ),
            ({"SLURM_STEP_RESV_PORTS": "x"}, "SLURM_STEP_RESV_PORTS: cannot read 'x'"),
        ],
    )
    def test_what_is_refused(self, changed: dict[str, str], why: str) -> None:
        with pytest.raises(UsageError, match=why):
            step(**changed)


# in the script itself SLURM_PROCID is set too, SLURM_STEP_* are not
BATCH = {
    "SLURM_JOB_ID": "71",
    "SLURM_PROCID": "0",
    "SLURM_NODEID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_JOB_NODELIST": "pace[1-2]",
    "SLURM_TASKS_PER_NODE": "2(x2)",
}


class TestBatchScript:
    def test_it_is_no_task(self) -> None:
        cluster = SOURCE.seen(BATCH)
        assert cluster is not None
        assert cluster.me is None
        assert len(cluster.tasks) == 4
        assert [seat.host for seat in cluster.seats] == ["pace1", "pace1", "pace2", "pace2"]
        assert cluster.source == "Slurm job 71"
        assert "start the tasks with srun" in cluster.notes[0]

    def test_a_layout_that_does_not_fit(self) -> None:
        cluster = SOURCE.seen(BATCH | {"SLURM_NTASKS": "5"})
        assert cluster is not None
        assert len(cluster.tasks) == 5
        assert cluster.notes[0] == "SLURM_TASKS_PER_NODE tells of 4 tasks, but there are 5"

    def test_on_one_node_the_host_is_told(self) -> None:
        cluster = SOURCE.seen(BATCH | {"SLURM_JOB_NODELIST": "pace1", "SLURM_TASKS_PER_NODE": "4"})
        assert cluster is not None
        assert {task.host for task in cluster.tasks} == {"pace1"}

    def test_what_is_missing_is_named(self) -> None:
        with pytest.raises(UsageError, match=r"SLURM_JOB_NODELIST or SLURM_NODELIST, .* are missing"):
            SOURCE.seen({"SLURM_JOB_ID": "71"})


def test_outside_of_slurm() -> None:
    assert SOURCE.seen({"SLURM_CONF": "/etc/slurm.conf", "PATH": "/bin"}) is None
