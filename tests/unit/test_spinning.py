"""How many cores a process has, and when it spins: read from trees of files like the kernel's."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.processes.memory import cores
from paceline.processes.memory.spinning import LONG, OFTEN, Spinning

MS = 1_000_000


class Machine:
    """A /proc, and control groups mounted beside it."""

    def __init__(self, root: Path) -> None:
        self.proc, self.groups = root / "proc", root / "cgroup"
        (self.proc / "self").mkdir(parents=True)
        self.mounts: list[str] = []
        self.lines: list[str] = []

    def mount(self, kind: str, options: str, folder: str = "", root: str = "/") -> Path:
        place = self.groups / folder
        place.mkdir(parents=True, exist_ok=True)
        self.mounts.append(f"32 31 0:29 {root} {place} rw,relatime shared:9 - {kind} {kind} {options}")
        return place

    def cores(self, affinity: int = 16) -> float:
        (self.proc / "self" / "mountinfo").write_text("\n".join(["21 1 8:1 / / rw - ext4 /dev/vda rw", *self.mounts]))
        (self.proc / "self" / "cgroup").write_text("\n".join(self.lines) + "\n")
        return cores.available(self.proc, affinity)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def write(place: Path, **files: str) -> None:
    place.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (place / name.replace("__", ".")).write_text(text)


class TestCores:
    def test_affinity_alone(self, machine: Machine) -> None:
        assert machine.cores(affinity=3) == 3

    def test_this_process_has_at_least_a_part_of_a_core(self) -> None:
        assert cores.available() > 0

    def test_without_files_only_affinity_counts(self, tmp_path: Path) -> None:
        assert cores.available(tmp_path / "none", 5) == 5

    @pytest.mark.parametrize(("text", "expected"), [("max 100000", 16), ("250000 100000", 2.5), ("9900000 100000", 16)])
    def test_a_quota_of_version_2(self, machine: Machine, text: str, expected: float) -> None:
        mounted = machine.mount("cgroup2", "rw,nsdelegate")
        machine.lines = ["0::/user/job"]
        write(mounted / "user" / "job", cpu__max=text)
        assert machine.cores() == expected

    def test_a_parent_may_allow_less(self, machine: Machine) -> None:
        mounted = machine.mount("cgroup2", "rw")
        machine.lines = ["0::/user/job"]
        write(mounted / "user" / "job", cpu__max="800000 100000")
        write(mounted / "user", cpu__max="150000 50000")
        assert machine.cores() == 3

    @pytest.mark.parametrize(("quota", "expected"), [("-1", 16), ("400000", 4)])
    def test_a_quota_of_version_1(self, machine: Machine, quota: str, expected: float) -> None:
        machine.mount("cgroup", "rw,memory", "memory")
        mounted = machine.mount("cgroup", "rw,cpu,cpuacct", "cpu,cpuacct")
        machine.lines = ["5:memory:/", "3:cpu,cpuacct:/docker/abc", "0::/"]
        write(mounted / "docker", cpu__cfs_quota_us=quota, cpu__cfs_period_us="100000")
        assert machine.cores() == expected

    def test_a_container_sees_its_own_group_at_the_mount(self, machine: Machine) -> None:
        mounted = machine.mount("cgroup", "rw,cpu", "cpu", root="/docker/abc")
        machine.lines = ["3:cpu:/docker/abc"]
        write(mounted, cpu__cfs_quota_us="200000", cpu__cfs_period_us="100000")
        assert machine.cores() == 2

    def test_a_group_outside_of_the_mount_counts_as_the_mounted_one(self, machine: Machine) -> None:
        mounted = machine.mount("cgroup2", "rw", root="/pod")
        machine.lines = ["0::/../other"]
        write(mounted, cpu__max="100000 100000")
        assert machine.cores() == 1

    def test_cpuset_and_other_controllers_are_no_quota(self, machine: Machine) -> None:
        mounted = machine.mount("cgroup", "rw,cpuset", "cpuset")
        machine.lines = ["3:cpuset:/"]
        write(mounted, cpu__cfs_quota_us="100000", cpu__cfs_period_us="100000")
        assert machine.cores() == 16


class Kernel:
    """The file in which the kernel counts how long a thread has waited for a core."""

    def __init__(self, file: Path) -> None:
        self.file, self.delay = file, 0
        self.tell(0)

    def tell(self, more: int) -> None:
        self.delay += more
        self.file.write_text(f"123456 {self.delay} 77\n")


class TestSpinning:
    def test_each_that_computes_needs_a_core(self) -> None:
        assert Spinning.for_processes(2, 2).nanoseconds == LONG
        assert Spinning.for_processes(1.5, 2).nanoseconds == 0

    def test_short_waits_are_spun_through(self, tmp_path: Path) -> None:
        spinning = Spinning(LONG, tmp_path / "none")
        for number in range(50):
            spinning.waited(LONG // 2, number * MS)
        assert spinning.nanoseconds == LONG

    def test_who_usually_waits_long_sleeps_until_waits_are_short_again(self, tmp_path: Path) -> None:
        spinning = Spinning(LONG, tmp_path / "none")
        for number in range(50):
            spinning.waited(100 * LONG, number * MS)
        assert spinning.nanoseconds == 0
        for number in range(50):
            spinning.waited(LONG // 10, number * MS)
        assert spinning.nanoseconds == LONG

    def test_one_long_wait_changes_nothing(self, tmp_path: Path) -> None:
        spinning = Spinning(LONG, tmp_path / "none")
        spinning.waited(10_000 * LONG, MS)
        assert spinning.nanoseconds == LONG

    def test_who_has_to_wait_for_a_core_sleeps_as_long_as_it_is_so(self, tmp_path: Path) -> None:
        kernel = Kernel(tmp_path / "schedstat")
        spinning, now = Spinning(LONG, kernel.file), OFTEN
        spinning.waited(1000, now)
        for delayed, spins in ((OFTEN // 2, False), (OFTEN // 4, False), (OFTEN // 100, True), (OFTEN, False)):
            kernel.tell(delayed)
            now += OFTEN
            spinning.waited(1000, now)
            assert (spinning.nanoseconds > 0) == spins

    def test_the_kernel_is_not_asked_at_every_wait(self, tmp_path: Path) -> None:
        kernel = Kernel(tmp_path / "schedstat")
        spinning = Spinning(LONG, kernel.file)
        spinning.waited(1000, OFTEN)
        kernel.tell(OFTEN)
        spinning.waited(1000, OFTEN + OFTEN // 2)
        assert spinning.nanoseconds == LONG

    def test_who_never_spins_never_begins_to(self) -> None:
        spinning = Spinning(0)
        spinning.waited(0, OFTEN)
        assert spinning.nanoseconds == 0
