"""Machines that a model is split over, from a hosts file as `mlx.launch` reads it."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quire.core.errors import ModelError
from quire.core.limited_files import SETTINGS_BYTES, read_limited_text

LOCAL = ("127.0.0.1", "localhost")
"""Names of this machine, where processes are started without ssh."""
JACCL_RING = "jaccl-ring"
"""JACCL that connects each host to the next one only, and the last to the first."""
BACKENDS = ("ring", "nccl", "jaccl", JACCL_RING)
_KEYS = {"backend", "envs", "hosts"}
_HOST_KEYS = {"ssh", "ips", "rdma"}


@dataclass(frozen=True, slots=True)
class Host:
    """A process of a split model.

    Attributes:
        ssh: name that ssh knows its machine by.
        ips: addresses by which the others reach it.
        rdma: for JACCL only: this host's RDMA devices to each process, None for itself.
    """

    ssh: str
    ips: tuple[str, ...]
    rdma: tuple[str | tuple[str, ...] | None, ...] = ()


@dataclass(frozen=True, slots=True)
class Hosts:
    """All processes in the order of their ranks, the first of them on this machine.

    Attributes:
        backend: backend of MLX's collectives; "" lets the device choose.
        envs: environment variables of each process, "NAME=value".
    """

    hosts: tuple[Host, ...]
    backend: str = ""
    envs: tuple[str, ...] = ()

    @classmethod
    def local(cls, count: int) -> Hosts:
        """Return processes that all run on this machine."""
        return cls((Host(LOCAL[0], (LOCAL[0],)),) * count)

    def local_rank(self, rank: int) -> int:
        """Return a process's number among those of its machine."""
        return [each.ssh for each in self.hosts[:rank]].count(self.hosts[rank].ssh)

    def local_size(self, rank: int) -> int:
        """Return the number of processes on a process's machine, itself included."""
        return [each.ssh for each in self.hosts].count(self.hosts[rank].ssh)


def read_hosts(path: Path) -> Hosts:
    """Read a hosts file: a list of hosts, or an object with `hosts`, `backend` and `envs`.

    Raises:
        ModelError: it is no such file, or names something that is not known.
    """
    try:
        data = json.loads(read_limited_text(path, SETTINGS_BYTES))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ModelError(f"{path}: cannot be read as a hosts file: {reason}") from error
    whole = {"hosts": data} if isinstance(data, list) else data
    if not isinstance(whole, dict) or not isinstance(whole.get("hosts"), list):
        raise ModelError(f"{path}: a hosts file must be a list of hosts, or an object with 'hosts'")
    _known(path, whole, _KEYS)
    backend, envs = whole.get("backend") or "", whole.get("envs") or []
    if backend and backend not in BACKENDS:
        raise ModelError(f"{path}: backend {backend!r} is not one of {', '.join(BACKENDS)}")
    if not _texts(envs) or not all("=" in each for each in envs):
        raise ModelError(f"{path}: 'envs' is not a list of NAME=value")
    hosts = tuple(_host(path, each) for each in whole["hosts"])
    if len(hosts) < 2:
        raise ModelError(f"{path}: at least two hosts are needed; the file has {len(hosts)}")
    if backend.startswith("jaccl"):
        _check_rdma(path, hosts, backend)
    # The first host is this machine: its other entries need no ssh either.
    here = hosts[0].ssh
    hosts = tuple(replace(each, ssh=LOCAL[0]) if each.ssh == here else each for each in hosts)
    return Hosts(hosts, backend, tuple(envs))


def _host(path: Path, entry: Any) -> Host:
    if not isinstance(entry, dict) or not isinstance(entry.get("ssh"), str) or not entry["ssh"]:
        raise ModelError(
            f"{path}: each host needs 'ssh', its name for ssh, and 'ips', its addresses"
        )
    _known(path, entry, _HOST_KEYS)
    ips, rdma = entry.get("ips") or [], entry.get("rdma") or []
    if not _texts(ips) or not ips:
        raise ModelError(f"{path}: host {entry['ssh']!r} needs a list of addresses in 'ips'")
    if not isinstance(rdma, list) or not all(
        each is None or _text(each) or _texts(each) for each in rdma
    ):
        raise ModelError(f"{path}: 'rdma' of host {entry['ssh']!r} is not a list of devices")
    devices = (tuple(each) if isinstance(each, list) else each for each in rdma)
    return Host(entry["ssh"], tuple(ips), tuple(devices))


def _check_rdma(path: Path, hosts: tuple[Host, ...], backend: str) -> None:
    """Raise `ModelError` if a device that JACCL needs between two hosts is not named."""
    for own, host in enumerate(hosts):
        if len(host.rdma) != len(hosts):
            raise ModelError(
                f"{path}: 'rdma' of host {host.ssh!r} has {len(host.rdma)} entries, and {backend} "
                f"needs one for each of the {len(hosts)} hosts"
            )
        if host.rdma[own] is not None:
            raise ModelError(f"{path}: 'rdma' of host {host.ssh!r} must have null for itself")
        last = len(hosts) - 1
        for other, device in enumerate(host.rdma):
            near = abs(other - own) in (1, last)
            if device is None and other != own and (near or backend != JACCL_RING):
                raise ModelError(
                    f"{path}: 'rdma' of host {host.ssh!r} names no device to {hosts[other].ssh!r}"
                )


def _known(path: Path, entry: dict[str, Any], keys: set[str]) -> None:
    if unknown := entry.keys() - keys:
        raise ModelError(f"{path}: unknown key {min(unknown)!r}; known: {', '.join(sorted(keys))}")


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(_text(each) for each in value)
