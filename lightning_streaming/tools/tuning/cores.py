"""How many processors this process may use: fewer than the machine has, in a container or under a scheduler."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil
from pathlib import Path, PurePosixPath

from lightning_streaming.tools.options import usable_cpus

_GROUPS = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")


def usable_cores() -> int:
    """Processors that this process may run on, or as many as its control groups let it use up, if that is less."""
    return min([usable_cpus(), *quotas(_GROUPS, _MEMBERSHIP)])


def quotas(groups: Path, membership: Path) -> Iterator[int]:
    """Processors that each limit of a process's control groups allows, rounded up; none where there are no limits.

    Args:
        groups: Where control groups are mounted.
        membership: The file that says which ones the process is in.
    """
    for line in _read(membership).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        mounted = groups / "cpu" if controllers else groups
        for parent in (PurePosixPath(path), *PurePosixPath(path).parents):
            found = _quota_of(mounted / str(parent).lstrip("/"))
            if found is not None:
                yield found


def _quota_of(group: Path) -> int | None:
    """Processors of one group: version 2 has ``200000 100000`` in one file, for 2; version 1 has two files."""
    numbers = _read(group / "cpu.max").split() or [
        *_read(group / "cpu.cfs_quota_us").split(),
        *_read(group / "cpu.cfs_period_us").split(),
    ]
    if len(numbers) != 2 or not all(number.isdecimal() for number in numbers):  # max, or -1: no limit
        return None
    quota, period = map(int, numbers)
    return max(1, ceil(quota / period)) if period else None


def _read(path: Path) -> str:
    """A file's text; empty where there is none, as on other systems than Linux."""
    return path.read_text() if path.is_file() else ""
