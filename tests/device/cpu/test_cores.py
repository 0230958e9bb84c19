"""The number of threads to start, on machines that are described by files of /sys and /proc."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.device.cpu.cores import usable_cores


def machine(root: Path, cpus: int, **files: str) -> Path:
    """Return a root whose `/sys` lists processors, and holds files given as `a__b=text` for
    `a/b`.
    """
    written = {"sys/devices/system/cpu/present": f"0-{cpus - 1}\n", **files}
    for place, text in written.items():
        path = root / place.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def of_cpu(numbers: range, name: str, text: str) -> dict[str, str]:
    return {f"sys/devices/system/cpu/cpu{n}/{name}": text.format(n=n) for n in numbers}


def test_every_core_is_used(tmp_path: Path) -> None:
    cores = usable_cores(range(4), machine(tmp_path, 4))
    assert (cores.count, cores.why) == (4, "all cores")


def test_hardware_threads_of_a_core_count_once(tmp_path: Path) -> None:
    files: dict[str, str] = {}
    for core in range(4):
        for cpu in (core, core + 4):
            files |= of_cpu(range(cpu, cpu + 1), "topology/core_cpus_list", f"{core},{core + 4}\n")
    assert usable_cores(range(8), machine(tmp_path, 8, **files)).count == 4
    assert usable_cores({0, 4, 1}, tmp_path).count == 2


def test_affinity_limits_threads(tmp_path: Path) -> None:
    cores = usable_cores({2, 5}, machine(tmp_path, 16))
    assert (cores.count, cores.why) == (2, "all cores that this process may run on")


def test_efficiency_cores_are_left_out(tmp_path: Path) -> None:
    intel = machine(tmp_path / "intel", 12, sys__devices__cpu_core__cpus="0-3\n")
    assert usable_cores(range(12), intel).count == 4
    assert usable_cores(range(4, 12), intel).count == 8, "where there are no others, they serve"
    capacities = of_cpu(range(4), "cpu_capacity", "430\n") | of_cpu(
        range(4, 8), "cpu_capacity", "1024\n"
    )
    arm = machine(tmp_path / "arm", 8, **capacities)
    assert (usable_cores(range(8), arm).count, usable_cores(range(8), arm).why) == (
        4,
        "performance cores",
    )


@pytest.mark.parametrize(
    ("files", "count"),
    [
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/cpu.max": "250000 100000\n"}, 2),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "max 100000\n"}, 8),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"}, 1),
        (
            {
                "proc/self/cgroup": "3:cpu,cpuacct:/x\n1:memory:/x\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "300000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            3,
        ),
        ({"proc/self/cgroup": "3:cpu:/\n", "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n"}, 8),
    ],
)
def test_quotas_of_control_groups_limit_threads(
    tmp_path: Path, files: dict[str, str], count: int
) -> None:
    cores = usable_cores(range(8), machine(tmp_path, 8, **files))
    assert cores.count == count
    assert ("quota" in cores.why) == (count < 8)


def test_a_machine_that_says_nothing_has_the_processors_it_names(tmp_path: Path) -> None:
    assert usable_cores(range(3), tmp_path).count == 3
