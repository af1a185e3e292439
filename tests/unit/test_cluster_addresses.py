"""The address of this host: by interface, by subnet, by a site's rule; loopback for one host."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.errors import UsageError
from paceline.network.cluster.addresses import Interface, called, interfaces, own_address, site_rule
from paceline.network.cluster.description import Cluster, ClusterTask, Slot

LO = Interface("lo", "127.0.0.1")
ETH0 = Interface("eth0", "192.168.7.4", default=True)
ETH1 = Interface("eth1", "10.9.0.4")
IB0 = Interface("ib0", "10.1.3.4", infiniband=True)
IB1 = Interface("ib1", "10.2.3.4", infiniband=True)
DOWN = Interface("eth2", None)
ALL = [ETH0, ETH1, DOWN, IB0, LO]


class TestInterface:
    @pytest.mark.parametrize(
        ("known", "wanted", "infiniband", "address"),
        [
            (ALL, "ib0", True, "10.1.3.4"),
            (ALL, "eth1", False, "10.9.0.4"),
            (ALL, "lo", True, "127.0.0.1"),
            (ALL, "10.1.0.0/16", True, "10.1.3.4"),
            (ALL, "10.1.3.9/16", True, "10.1.3.4"),  # an address in it names the subnet as well
            (ALL, "10.0.0.0/8", False, "10.9.0.4"),
            (ALL, "127.0.0.0/8", True, "127.0.0.1"),
            (ALL, None, True, "10.1.3.4"),  # InfiniBand where there is some
            (ALL, None, False, "192.168.7.4"),  # else the way to everywhere
            ([ETH1, LO], None, True, "10.9.0.4"),  # the only one
            ([ETH1, DOWN, LO], None, True, "10.9.0.4"),
            ([ETH0, IB0, IB1], None, True, "192.168.7.4"),
            ([ETH1, IB0], None, False, "10.9.0.4"),
        ],
    )
    def test_chosen(self, known: list[Interface], wanted: str | None, infiniband: bool, address: str) -> None:
        assert own_address(known, wanted, infiniband=infiniband) == address

    def test_one_host_is_loopback_unless_something_is_wanted(self) -> None:
        assert own_address(ALL, one_host=True) == "127.0.0.1"
        assert own_address([], one_host=True) == "127.0.0.1"
        assert own_address(ALL, "eth0", one_host=True) == "192.168.7.4"

    @pytest.mark.parametrize(
        ("known", "wanted", "infiniband", "why"),
        [
            (ALL, "ib1", True, "no network interface 'ib1'; did you mean 'ib0'"),
            (ALL, "eth2", True, "network interface eth2 has no IPv4 address"),
            (ALL, "ib0", False, "--interface ib0 is InfiniBand, which --no-ib excludes"),
            (ALL, "10.1.0.0/16", False, r"only InfiniBand is in 10.1.0.0/16 \(ib0 \(10.1.3.4\)\), which --no-ib"),
            (
                ALL,
                "172.16.0.0/12",
                True,
                r"no network interface in 172.16.0.0/12; there are: eth0 \(192.168.7.4\), eth1",
            ),
            (
                ALL,
                "10.0.0.0/8",
                True,
                r"several network interfaces are in 10.0.0.0/8: eth1 \(10.9.0.4\), ib0 .* name one",
            ),
            (ALL, "10.1.0.0/33", True, "--interface 10.1.0.0/33: not an IPv4 subnet as 10.1.0.0/16"),
            (ALL, "fd00::/64", True, "--interface fd00::/64: not an IPv4 subnet"),
            (
                [LO, DOWN],
                None,
                True,
                r"no network interface with an address; there are: lo \(127.0.0.1\), eth2 \(no addr",
            ),
            ([], None, True, "no network interface with an address; there are: none"),
            (
                [ETH1, IB0, IB1],
                None,
                True,
                "several network interfaces could be meant: eth1 .*; name one with --interface",
            ),
        ],
    )
    def test_what_is_refused(self, known: list[Interface], wanted: str | None, infiniband: bool, why: str) -> None:
        with pytest.raises(UsageError, match=why):
            own_address(known, wanted, infiniband=infiniband)


class TestSystem:
    def test_loopback_is_there(self) -> None:
        assert Interface("lo", "127.0.0.1") in interfaces()

    def test_what_the_system_tells(self, tmp_path: Path) -> None:
        """Flags, type and the default route are read from files; the kernel knows no address of such names."""
        for name, flags, kind in [("tst0", "0x1003", "1"), ("tst1", "0x1002", "1"), ("tstib", "0x1003", "32")]:
            (tmp_path / name).mkdir()
            (tmp_path / name / "flags").write_text(f"{flags}\n")
            (tmp_path / name / "type").write_text(f"{kind}\n")
        (tmp_path / "bonding_masters").write_text("\n")  # a file among the folders
        routes = tmp_path / "route"
        routes.write_text(
            "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\n"
            "tstib\t0000010A\t00000000\t0001\t0\t0\t0\t0000FFFF\n"
            "tst0\t00000000\t010200C0\t0003\t0\t0\t0\t00000000\n"
        )
        assert interfaces(tmp_path, routes) == [
            Interface("tst0", None, default=True),
            Interface("tstib", None, infiniband=True),
        ]

    def test_a_system_without_these_files(self, tmp_path: Path) -> None:
        assert interfaces(tmp_path / "absent", tmp_path / "absent") == []


RULE = """
from os.path import join

numbers = {"a": "10.1.0.1"}


def over_ib(host):
    return numbers[host]


def suffix(host):
    return f"{host}-ib"


def nothing(host):
    return None


def spaced(host):
    return "a b"
"""


@pytest.fixture
def rules(tmp_path: Path) -> str:
    path = tmp_path / "site_rules_for_test.py"
    path.write_text(RULE)
    return str(path)


class TestSiteRule:
    def test_a_function_of_a_file(self, rules: str) -> None:
        assert site_rule(f"{rules}:over_ib")("a") == "10.1.0.1"

    def test_a_function_of_a_module(self, rules: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.syspath_prepend(str(Path(rules).parent))
        assert site_rule("site_rules_for_test:suffix")("a") == "a-ib"

    @pytest.mark.parametrize(
        ("name", "why"),
        [
            ("over_ip", "no rule from host to address in .*py 'over_ip'; did you mean 'over_ib'"),
            ("numbers", "no rule from host to address in .* 'numbers'"),
        ],
    )
    def test_a_function_that_is_not_there(self, rules: str, name: str, why: str) -> None:
        with pytest.raises(UsageError, match=why):
            site_rule(f"{rules}:{name}")

    @pytest.mark.parametrize("text", ["rule", ":rule", "rule.py:"])
    def test_what_is_no_reference(self, text: str) -> None:
        with pytest.raises(UsageError, match=r"write (file.py:NAME or )?package.module:"):
            site_rule(text)

    def test_a_file_that_is_not_there(self) -> None:
        with pytest.raises(UsageError, match=r"no file 'absent.py' for the rule from host to address"):
            site_rule("absent.py:rule")

    @pytest.mark.parametrize(
        ("name", "why"),
        [
            ("nothing", "nothing gave None for 'b'; it must give an address or a host name"),
            ("spaced", "spaced gave 'a b' for 'b'; it must give"),
            ("over_ib", r"cannot read the address of b by .*over_ib: KeyError: 'b'"),
        ],
    )
    def test_answers_are_checked(self, rules: str, name: str, why: str) -> None:
        with pytest.raises(UsageError, match=why):
            site_rule(f"{rules}:{name}")("b")


class TestCalled:
    def test_every_host_by_the_rule_asked_once(self) -> None:
        asked = []

        def rule(host: str) -> str:
            asked.append(host)
            return f"{host}-ib"

        tasks = (
            ClusterTask("worker", 0, "a", 1),
            ClusterTask("worker", 1, "a", 2),
            ClusterTask("worker", 2),
            ClusterTask("server", 0, "b", 1),
        )
        seats = (Slot(0, 0, "a", 1), Slot(0, 1, "a", 2))
        found = called(Cluster("test", tasks, tasks[1], seats=seats, seat=seats[1]), rule)
        assert asked == ["a", "b"]
        assert [task.host for task in found.tasks] == ["a-ib", "a-ib", None, "b-ib"]
        assert found.me == ClusterTask("worker", 1, "a-ib", 2)
        assert found.seat == Slot(0, 1, "a-ib", 2) == found.seats[1]

    def test_an_evaluator_outside_stays_outside(self) -> None:
        cluster = Cluster("test", (ClusterTask("worker", 0, "a", 1),), ClusterTask("evaluator", 0))
        assert called(cluster, str.upper).me == ClusterTask("evaluator", 0)

    def test_a_rule_may_not_put_two_in_one_place(self) -> None:
        cluster = Cluster("test", (ClusterTask("worker", 0, "a", 1), ClusterTask("worker", 1, "b", 1)))
        with pytest.raises(UsageError, match="worker:0 and worker:1 have the same address c:1"):
            called(cluster, lambda host: "c")
