"""How many cores this process may use: its affinity, and the CPU quota of its control groups and their parents."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath


def available(proc: Path = Path("/proc"), affinity: int | None = None) -> float:
    """The number of cores; a fraction where a quota allows one. `affinity`: cores that the scheduler may choose."""
    cores = float(len(os.sched_getaffinity(0)) if affinity is None else affinity)
    return min([cores, *_quotas(proc)])


def _quotas(proc: Path) -> Iterator[float]:
    """Cores by each quota that limits this process. What cannot be read limits nothing."""
    with suppress(OSError, ValueError):
        mounts = list(_mounts((proc / "self" / "mountinfo").read_text()))
        for line in (proc / "self" / "cgroup").read_text().splitlines():
            number, controllers, path = line.split(":", 2)
            unified = number == "0" and not controllers
            if not unified and "cpu" not in controllers.split(","):
                continue
            for kind, options, root, folder in mounts:
                if kind == ("cgroup2" if unified else "cgroup") and (unified or "cpu" in options):
                    for place in _upwards(folder, root, path):
                        quota = _of_version_2(place) if unified else _of_version_1(place)
                        if quota is not None:
                            yield quota


def _mounts(table: str) -> Iterator[tuple[str, list[str], str, Path]]:
    """Of every mounted file system: its kind, its options, which part of it is mounted, and where."""
    for line in table.splitlines():
        before, _, after = line.partition(" - ")
        fields, (kind, _, options) = before.split(), after.split(maxsplit=2)
        yield kind, options.split(","), fields[3], Path(fields[4])


def _upwards(folder: Path, root: str, path: str) -> Iterator[Path]:
    """The folders of a group and of its parents. `root`: the group that is mounted at `folder`; in a container that is
    the container's own, and groups above it cannot be seen."""
    group = PurePosixPath(path)
    inside = group.relative_to(root) if group.is_relative_to(root) else PurePosixPath()
    yield folder / inside
    for parent in inside.parents:
        yield folder / parent


def _of_version_2(place: Path) -> float | None:
    with suppress(OSError, ValueError, ZeroDivisionError):
        quota, period = (place / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    return None


def _of_version_1(place: Path) -> float | None:
    with suppress(OSError, ValueError, ZeroDivisionError):
        quota = int((place / "cpu.cfs_quota_us").read_text())
        return None if quota <= 0 else quota / int((place / "cpu.cfs_period_us").read_text())
    return None
