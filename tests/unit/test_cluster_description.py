"""What a cluster is: who is the chief, which addresses are refused, what counts as known."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from paceline.errors import UsageError
from paceline.network.cluster.description import Cluster, ClusterTask, address, is_host, shown

A, B, C = ClusterTask("worker", 0, "a", 1), ClusterTask("worker", 1, "b", 1), ClusterTask("server", 0, "c", 1)


class TestCluster:
    def test_worker_0_is_the_chief_where_none_is_named(self) -> None:
        cluster = Cluster("test", (A, B, C))
        assert cluster.chief == A
        assert [cluster.role(task) for task in cluster.tasks] == ["chief", "worker", "server"]
        assert [cluster.rank(task) for task in cluster.tasks] == [0, 1, None]

    def test_a_named_chief_is_before_the_workers(self) -> None:
        chief = ClusterTask("chief", 0, "d", 1)
        cluster = Cluster("test", (A, B, chief))
        assert cluster.chief == chief
        assert cluster.training == (chief, A, B)
        assert cluster.role(A) == "worker"
        assert cluster.rank(A) == 1

    def test_complete_is_to_know_every_host_and_port(self) -> None:
        assert Cluster("test", (A, B, C)).complete
        assert not Cluster("test", (A, ClusterTask("worker", 1, "b"))).complete
        assert not Cluster("test", (A, ClusterTask("worker", 1, None, 5))).complete
        assert Cluster("test", (A, ClusterTask("evaluator", 0))).complete  # nobody calls it

    def test_it_says_what_is_missing(self) -> None:
        cluster = Cluster("test", (A, ClusterTask("worker", 1), ClusterTask("server", 0, "c")))
        assert cluster.missing == (
            "hosts of worker:1: where they run is not told and must be exchanged by rendezvous",
            "ports of worker:1, server:0: each has to choose one and to tell the others",
        )
        assert Cluster("test", (A, B)).missing == ()

    def test_a_thousand_missing_ports_are_no_thousand_names(self) -> None:
        cluster = Cluster("test", tuple(ClusterTask("worker", index, "a") for index in range(1007)))
        assert "worker:6 and 1,000 more: each" in cluster.missing[0]
        assert "worker:7" not in cluster.missing[0]

    def test_one_host(self) -> None:
        assert Cluster("test", (A, ClusterTask("worker", 1, "A.", 2))).one_host
        assert Cluster(
            "test", (ClusterTask("chief", 0, "localhost", 1), ClusterTask("worker", 0, "127.0.0.1", 2))
        ).one_host
        assert not Cluster("test", (A, B)).one_host
        assert not Cluster("test", (A, ClusterTask("worker", 1))).one_host

    def test_the_evaluator_may_be_outside(self) -> None:
        me = ClusterTask("evaluator", 0)
        assert Cluster("test", (A,), me).me == me

    @pytest.mark.parametrize(
        ("tasks", "why"),
        [
            ((), "test: the cluster has neither a chief nor a worker"),
            ((C,), "neither a chief nor a worker"),
            ((ClusterTask("chief", 0), ClusterTask("chief", 1)), "there can be one chief, not 2"),
            ((A, ClusterTask("evaluator", 0), ClusterTask("evaluator", 1)), "there can be one evaluator, not 2"),
            ((A, ClusterTask("worker", 1, "a", 1)), "worker:0 and worker:1 have the same address a:1"),
            ((A, ClusterTask("server", 0, "A", 1)), "worker:0 and server:0 have the same address A:1"),
            ((A, ClusterTask("evaluator", 0, "a", 1)), "worker:0 and evaluator:0 have the same address"),
        ],
    )
    def test_what_is_refused(self, tasks: tuple[ClusterTask, ...], why: str) -> None:
        with pytest.raises(UsageError, match=why):
            Cluster("test", tasks)

    def test_the_same_host_without_ports_is_no_clash(self) -> None:
        assert len(Cluster("test", (ClusterTask("worker", 0, "a"), ClusterTask("worker", 1, "a"))).tasks) == 2


class TestAddresses:
    @pytest.mark.parametrize(
        ("text", "host", "port"),
        [
            ("a:2222", "a", 2222),
            ("a", "a", None),
            ("10.0.0.1:1", "10.0.0.1", 1),
            ("ps-0.ps.default.svc.cluster.local:65535", "ps-0.ps.default.svc.cluster.local", 65535),
            ("[::1]:2222", "::1", 2222),
            ("[fd00::2]", "fd00::2", None),
            ("fd00::2", "fd00::2", None),
            ("node_7:80", "node_7", 80),
        ],
    )
    def test_read(self, text: str, host: str, port: int | None) -> None:
        assert address(text, "here") == (host, port)

    @pytest.mark.parametrize("text", ["a:", "a:0", "a:65536", "a:x", "a:-1", "a:+1", "a:٣", "a:1e3", "a:0000080"])
    def test_bad_ports(self, text: str) -> None:
        with pytest.raises(UsageError, match=r"here: the port of .* must be a number from 1 to 65535"):
            address(text, "here")

    @pytest.mark.parametrize(
        "text",
        ["", ":2222", "grpc://a:2222", "a b:1", "[::1", "[::1]2222", "[a]:1", "300.1.1.1:1", "-a:1", "a..b", "a/b:1"],
    )
    def test_bad_hosts(self, text: str) -> None:
        with pytest.raises(UsageError, match=r"here: .* is not an address; write host:port, or \[address\]:port"):
            address(text, "here")

    def test_a_number_is_no_address(self) -> None:
        with pytest.raises(UsageError, match='here: 2222 is not an address; write it as "host:port"'):
            address(2222, "here")

    def test_a_name_has_an_end(self) -> None:
        assert is_host("a" * 253)
        assert not is_host("a" * 254)

    @given(
        some.one_of(some.ip_addresses().map(str), some.from_regex(r"[a-z]([a-z0-9-]{0,9}[a-z0-9])?", fullmatch=True)),
        some.none() | some.integers(1, 65535),
    )
    @settings(deadline=None)
    def test_what_is_shown_can_be_read(self, host: str, port: int | None) -> None:
        text = shown(ClusterTask("worker", 0, host, port))
        assert address(text.removesuffix(":?"), "here") == (host, port)

    def test_what_is_not_known_is_shown_so(self) -> None:
        assert shown(ClusterTask("worker", 0)) == "?:?"
