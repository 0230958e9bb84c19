"""Processes that compute one model together: each is a rank, and they exchange rows.

They use MLX's collectives over its ring of sockets. A process joins once, before it computes
anything.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile

import mlx.core as mx

from quire.core.errors import ModelError


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
        ranks share one.
        """
        if count < self.size:
            first = self.rank * count // self.size
            return range(first, first + 1)
        each = count // self.size
        return range(self.rank * each, (self.rank + 1) * each)


WHOLE = Part()


def join(part: Part, addresses: Sequence[str]) -> None:
    """Connect to the other ranks; return when all are there.

    Args:
        addresses: "host:port" of each rank.

    Raises:
        ModelError: MLX has no ring here, or the ranks do not reach each other.
    """
    with NamedTemporaryFile("w", suffix=".json", delete=False) as hosts:
        json.dump([[each] for each in addresses], hosts)
    os.environ["MLX_RANK"], os.environ["MLX_HOSTFILE"] = str(part.rank), hosts.name
    try:
        mx.distributed.init(strict=True, backend="ring")
    except RuntimeError as error:
        raise ModelError(f"the processes of the model do not reach each other: {error}") from error
    finally:
        Path(hosts.name).unlink()


def summed(x: mx.array) -> mx.array:
    """Return the sum of all ranks' arrays, the same bits on each."""
    return mx.distributed.all_sum(x)


def gathered(x: mx.array) -> mx.array:
    """Concatenate the ranks' columns: `[R, own columns]` -> `[R, all columns]`, the same bits on
    each rank.
    """
    return mx.distributed.all_gather(x.T).T
