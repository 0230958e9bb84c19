"""Hosts files as `mlx.launch` reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.core.errors import ModelError
from quire.core.hosts import Host, Hosts, read_hosts

TWO = [{"ssh": "one", "ips": ["10.0.0.1"]}, {"ssh": "two", "ips": ["10.0.0.2", "10.1.0.2"]}]


def written(folder: Path, content: Any) -> Path:
    path = folder / "hosts.json"
    path.write_text(json.dumps(content))
    return path


def test_a_list_of_hosts(tmp_path: Path) -> None:
    assert read_hosts(written(tmp_path, TWO)) == Hosts(
        (Host("127.0.0.1", ("10.0.0.1",)), Host("two", ("10.0.0.2", "10.1.0.2")))
    )


def test_an_object_with_backend_and_environment(tmp_path: Path) -> None:
    links = ["rdma_en2", "rdma_en3"]
    hosts = [
        {"ssh": "a", "ips": ["1"], "rdma": [None, links]},
        {"ssh": "b", "ips": ["2"], "rdma": [links, None]},
    ]
    found = read_hosts(
        written(tmp_path, {"backend": "jaccl", "envs": ["MLX_METAL_FAST_SYNCH=1"], "hosts": hosts})
    )
    assert (found.backend, found.envs) == ("jaccl", ("MLX_METAL_FAST_SYNCH=1",))
    assert found.hosts[0].rdma == (None, ("rdma_en2", "rdma_en3"))


def test_processes_of_a_machine_are_counted(tmp_path: Path) -> None:
    found = read_hosts(written(tmp_path, [*TWO, TWO[0], TWO[1]]))
    assert [found.local_rank(rank) for rank in range(4)] == [0, 0, 1, 1]
    assert found.local_size(0) == 2
    assert found.hosts[2].ssh == "127.0.0.1"  # the first host's machine is this one


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ({"host": TWO}, "a list of hosts, or an object"),
        ({"hosts": TWO, "port": 1}, "unknown key 'port'"),
        ({"hosts": TWO, "backend": "mpi"}, "'mpi' is not one of"),
        ({"hosts": TWO, "envs": ["A"]}, "NAME=value"),
        (TWO[:1], "at least two hosts are needed; the file has 1"),
        ([TWO[0], {"ips": ["10.0.0.2"]}], "its name for ssh"),
        ([TWO[0], {"ssh": "two"}], "'two' needs a list of addresses"),
        ([TWO[0], TWO[1] | {"user": "me"}], "unknown key 'user'"),
        ([TWO[0], TWO[1] | {"rdma": "en2"}], "'rdma' of host 'two'"),
    ],
)
def test_other_content_is_refused_by_name(tmp_path: Path, content: Any, why: str) -> None:
    with pytest.raises(ModelError, match=why):
        read_hosts(written(tmp_path, content))


def meshed(*rdma: list[str | None], backend: str = "jaccl") -> dict[str, Any]:
    """Return a hosts file of hosts a, b and so on, with devices of RDMA."""
    hosts = [
        {"ssh": name, "ips": ["10.0.0.1"], "rdma": own}
        for name, own in zip("abcd", rdma, strict=False)
    ]
    return {"backend": backend, "hosts": hosts}


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ({"backend": "jaccl", "hosts": TWO}, "'one' has 0 entries, and jaccl needs one for each"),
        (meshed([None, "en2"], ["en2"]), "'b' has 1 entries"),
        (meshed([None, "en2"], ["en2", "en2"]), "'b' must have null for itself"),
        (meshed([None, None], ["en2", None]), "'a' names no device to 'b'"),
        (meshed([None, "en2", "en3"], ["en2", None, None], ["en3", "en2", None]), "'b' names no"),
    ],
)
def test_jaccl_needs_a_device_between_all_hosts(tmp_path: Path, content: Any, why: str) -> None:
    with pytest.raises(ModelError, match=why):
        read_hosts(written(tmp_path, content))


def test_a_ring_of_jaccl_needs_devices_to_neighbours_alone(tmp_path: Path) -> None:
    ring = [
        [None if abs(own - other) == 2 or own == other else "en2" for other in range(4)]
        for own in range(4)
    ]
    assert read_hosts(written(tmp_path, meshed(*ring, backend="jaccl-ring"))).backend
    with pytest.raises(ModelError, match="'a' names no device to 'c'"):
        read_hosts(written(tmp_path, meshed(*ring)))


def test_a_file_that_is_no_json_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("one two")
    with pytest.raises(ModelError, match="cannot be read as a hosts file"):
        read_hosts(path)
