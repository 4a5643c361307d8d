"""The CPUs that this process may use: affinity, physical cores, cgroup quotas; and threads to match."""

from __future__ import annotations

import functools
import math
import os
from pathlib import Path
from typing import NamedTuple

from w4conv.arguments import MAX_THREADS, count


class AllowedCpus(NamedTuple):
    """CPUs that this process may use: by affinity, the physical cores among them, and those that cgroups grant (or
    None)."""

    cpus: int
    cores: int
    quota: float | None

    @property
    def default_threads(self) -> int:
        """One for each core, as the second thread of a core adds no bandwidth; none that would wait for its quota."""
        return max(1, min(self.cores, int(self.quota) if self.quota is not None else self.cores))

    @property
    def most_threads(self) -> int:
        """More would take turns."""
        return min(self.cpus, math.ceil(self.quota) if self.quota is not None else self.cpus)

    def __str__(self) -> str:
        cores = "" if self.cores == self.cpus else f" on {self.cores} cores"
        quota = "no cgroup quota" if self.quota is None else f"a cgroup quota of {self.quota:g}"
        return f"{self.cpus} CPUs{cores} by affinity, {quota}"


@functools.cache
def allowed_cpus() -> AllowedCpus:
    root = Path("/")
    cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    return AllowedCpus(len(cpus), _cores(root, cpus), _cgroup_cpus(root))


def default_threads() -> int:
    """Threads to use unless told: physical cores that this process may run on, limited by the cgroup's CPU quota."""
    return allowed_cpus().default_threads


def thread_count(threads: int | None) -> int:
    """`threads` as given, from 1 to 1024, or as many as suit this process. Raises UsageError."""
    return count(threads, "threads", low=1, high=MAX_THREADS) if threads is not None else default_threads()


def _cores(root: Path, cpus: set[int]) -> int:
    """Sets of CPUs that share a core; a CPU of which the system does not tell is a core of its own."""
    found = set()
    for cpu in cpus:
        try:
            found.add((root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text())
        except OSError:
            found.add(str(cpu))
    return len(found)


def _cgroup_cpus(root: Path) -> float | None:
    """CPUs that the tightest quota of this process's cgroup and its parents grants, versions 1 and 2; None without."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    grants: list[float] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        unified = controllers == ""
        if not unified and "cpu" not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / ("" if unified else controllers)
        group = mount / path.lstrip("/")
        for folder in (group, *group.parents):
            if folder == mount.parent:
                break
            grants += _quota(folder, unified=unified)
    return min(grants, default=None)


def _quota(folder: Path, *, unified: bool) -> list[float]:
    try:
        if unified:
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
        return [int(quota) / int(period)] if quota not in ("max", "-1") and int(period) > 0 else []
    except (OSError, ValueError):
        return []
