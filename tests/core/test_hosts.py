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
    rdma = [None, ["rdma_en2", "rdma_en3"]]
    hosts = [{"ssh": "a", "ips": ["1"], "rdma": rdma}, {"ssh": "b", "ips": ["2"], "rdma": rdma}]
    found = read_hosts(
        written(tmp_path, {"backend": "jaccl", "envs": ["MLX_METAL_FAST_SYNCH=1"], "hosts": hosts})
    )
    assert (found.backend, found.envs) == ("jaccl", ("MLX_METAL_FAST_SYNCH=1",))
    assert found.hosts[1].rdma == (None, ("rdma_en2", "rdma_en3"))


def test_processes_of_a_machine_are_counted(tmp_path: Path) -> None:
    found = read_hosts(written(tmp_path, [*TWO, TWO[0], TWO[1]]))
    assert [found.place(rank) for rank in range(4)] == [0, 0, 1, 1]
    assert found.beside(0) == 2
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


def test_a_file_that_is_no_json_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("one two")
    with pytest.raises(ModelError, match="cannot be read as a hosts file"):
        read_hosts(path)
