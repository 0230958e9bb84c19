"""Counts the cores that this process may use, from Linux's files."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Cores:
    """The number of cores for a kernel's threads.

    Attributes:
        count: number of threads to start, at least 1.
        why: the reason for the number, for messages.
    """

    count: int
    why: str


def usable_cores(cpus: Collection[int] | None = None, root: Path = Path("/")) -> Cores:
    """Count the fast cores that affinity and cgroup quotas leave to this process.

    Two hardware threads of a core share its arithmetic units, so a core counts once. Efficiency
    cores of a hybrid processor are left out: the threads of a product wait for the slowest.

    Args:
        cpus: numbers of the processors that this process may run on; None asks the system.
        root: of the file system that holds `/sys` and `/proc`.
    """
    allowed = set(_affinity() if cpus is None else cpus)
    system = root / "sys/devices/system/cpu"
    fast = allowed & _fast(allowed, root) or allowed
    cores = {_core(system, cpu) for cpu in fast}
    count, why = len(cores), "all cores"
    if len(fast) < len(allowed):
        why = "performance cores"
    installed = _listed(system / "present")
    if installed and len(allowed) < len(installed):
        why = f"{why} that this process may run on"
    quota = _quota(root)
    if quota is not None and quota < count:
        count, why = max(1, int(quota)), f"the cgroup's quota of {quota:g} processors"
    return Cores(max(1, count), why)


def _affinity() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _core(system: Path, cpu: int) -> frozenset[int]:
    """Return the processors that share a core with `cpu`."""
    topology = system / f"cpu{cpu}" / "topology"
    return frozenset(
        _listed(topology / "core_cpus_list") or _listed(topology / "thread_siblings_list") or {cpu}
    )


def _fast(cpus: Collection[int], root: Path) -> set[int]:
    """Return the processors of performance cores; all of them if cores are equal."""
    # Intel's hybrid processors list theirs; Arm's say what a core can do, of 1,024.
    if listed := _listed(root / "sys/devices/cpu_core/cpus"):
        return listed
    system = root / "sys/devices/system/cpu"
    capacities = {cpu: _number(system / f"cpu{cpu}" / "cpu_capacity") or 0.0 for cpu in cpus}
    most = max(capacities.values(), default=0.0)
    return {cpu for cpu, capacity in capacities.items() if capacity >= _ALIKE * most}


_ALIKE = 0.75
"""Fraction of the fastest core's capacity from which a core counts as fast."""


def _quota(root: Path) -> float | None:
    """Return how many processors control groups grant; None for no limit."""
    found = [
        limit
        for line in _text(root / "proc/self/cgroup").splitlines()
        for limit in _group_quotas(root / "sys/fs/cgroup", line)
    ]
    return min(found, default=None)


def _group_quotas(cgroups: Path, line: str) -> list[float]:
    """Return the quotas of a line of /proc/self/cgroup, and of the group's parents."""
    _, controllers, place = line.split(":", 2)
    if not controllers:  # version 2
        return [
            int(quota) / int(period)
            for folder in _upwards(cgroups, place)
            for quota, period in [(_text(folder / "cpu.max").split() or ["max", "1"])]
            if quota != "max"
        ]
    if "cpu" not in controllers.split(","):
        return []
    found = []
    for folder in _upwards(cgroups / "cpu", place):
        quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
        if quota is not None and quota > 0 and period:
            found.append(quota / period)
    return found


def _upwards(top: Path, place: str) -> list[Path]:
    """Yield a group's folder and its parents. In a container only the top may exist."""
    folder = top / place.strip("/")
    return [folder, *(each for each in folder.parents if each == top or top in each.parents)]


def _listed(path: Path) -> set[int]:
    """Read a list such as "0-3,8" as numbers; empty if there is no such file."""
    found: set[int] = set()
    for part in _text(path).strip().split(","):
        first, _, last = part.partition("-")
        if first:
            found.update(range(int(first), int(last or first) + 1))
    return found


def _number(path: Path) -> float | None:
    text = _text(path).strip()
    return float(text) if text else None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
