"""Processes that compute one model together: each is a rank, and they exchange rows.

They use MLX's collectives. A process joins once, before it computes anything.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from quire.core.errors import ModelError
from quire.core.hosts import JACCL_RING
from quire.device.machine import computes_on_cuda


@dataclass(frozen=True, slots=True)
class Part:
    """A rank and the number of ranks.

    Attributes:
        rank: from 0.
        size: number of ranks.
    """

    rank: int = 0
    size: int = 1

    def within(self, count: int) -> range:
        """Return this rank's part of `count` things. If there are fewer things than ranks, several
        ranks share one. The first rank has the most, since it plans for all.
        """
        if count < self.size:
            first = self.rank * count // self.size
            return range(first, first + 1)
        first, last = (-(-rank * count // self.size) for rank in (self.rank, self.rank + 1))
        return range(first, last)


WHOLE = Part()


Addresses = Sequence[Sequence[str]]
"""For each rank, "host:port" by which others reach it, one for each of its network's links."""


class Collectives(Protocol):
    """Collective operations: all ranks call them in the same order."""

    def summed(self, x: mx.array) -> mx.array:
        """Return the sum of all ranks' arrays, the same bits on each."""
        ...

    def gathered(self, x: mx.array) -> mx.array:
        """Return the ranks' arrays one after the other, along the first axis."""
        ...


class MLXCollectives:
    """The collectives of one of MLX's backends."""

    def __init__(self, group: mx.distributed.Group) -> None:
        self._group = group

    def summed(self, x: mx.array) -> mx.array:
        return mx.distributed.all_sum(x, group=self._group)

    def gathered(self, x: mx.array) -> mx.array:
        return mx.distributed.all_gather(x, group=self._group)


_collectives: Collectives | None = None


def use_collectives(collectives: Collectives) -> None:
    """Compute with other ranks by these from now on."""
    global _collectives
    _collectives = collectives


def collectives() -> Collectives:
    """Return the collectives of the ranks that this process has joined."""
    assert _collectives is not None, "this process has not joined others"
    return _collectives


class RankOperations:
    """The operations of models split over ranks."""

    def summed(self, x: mx.array, part: Part) -> mx.array:
        """Return the sum of all ranks' arrays, the same bits on each."""
        return collectives().summed(x)

    def gathered(self, x: mx.array, part: Part) -> mx.array:
        """Concatenate the ranks' columns: `[R, own columns]` -> `[R, all columns]`."""
        return collectives().gathered(x.T).T


def agreed(value: int, part: Part) -> int:
    """Return the smallest of the ranks' numbers. All ranks call it at the same point."""
    if part.size == 1:
        return value
    found = collectives().gathered(mx.array([value], mx.int32))
    return int(np.array(found).min())


def chosen_backend(asked: str = "") -> str:
    """Return the name of MLX's backend of collectives: the configured one, or the device's
    default.
    """
    return asked or ("nccl" if computes_on_cuda() else "ring")


def join(part: Part, addresses: Addresses, backend: str = "", rdma: Sequence[Any] = ()) -> None:
    """Connect to the other ranks; return when all are there.

    Args:
        backend: see `chosen_backend`.
        rdma: devices between each two ranks, for JACCL.

    Raises:
        ModelError: MLX lacks the backend, or the ranks do not reach each other.
    """
    first, _, port = addresses[0][0].rpartition(":")
    os.environ.update(
        {
            "MLX_RANK": str(part.rank),
            "MLX_WORLD_SIZE": str(part.size),
            "NCCL_HOST_IP": first,
            "NCCL_PORT": port,
            "MLX_JACCL_COORDINATOR": addresses[0][0],
        }
    )
    name = chosen_backend(backend)
    if name == JACCL_RING:
        os.environ["MLX_JACCL_RING"] = "1"
    with TemporaryDirectory() as folder:
        for variable, content in (("MLX_HOSTFILE", addresses), ("MLX_IBV_DEVICES", rdma)):
            path = Path(folder) / variable
            path.write_text(json.dumps(content))
            os.environ[variable] = str(path)
        by_mlx = "jaccl" if name == JACCL_RING else name
        try:
            use_collectives(MLXCollectives(mx.distributed.init(strict=True, backend=by_mlx)))
        except (RuntimeError, ValueError) as error:
            raise ModelError(
                f"the processes of the split model cannot connect over {name}: {error}"
            ) from error
