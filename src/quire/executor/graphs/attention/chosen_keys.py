"""The keys that an indexer chose for each row of a step, and their copies side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from quire.attention.paged.portable_kernels import Codes
from quire.device.gpu_kernels import in_device_memory
from quire.executor.graphs.attention import coded_kernels
from quire.executor.graphs.recorder import Buffer, Recorder
from quire.executor.graphs.source import generated_source, own_text

COPYING_THREADS = 128
TILE = "const int* tiles"
_BLOCKS = 512
"""Thread blocks that score, or copy, the keys of all rows together."""


@dataclass(frozen=True, slots=True)
class ChosenKeys:
    """The keys that each row of a step attends to.

    Attributes:
        keys: int32 `[rows, limit]`, ascending.
        tiles: a tile of attention for each row, over the copies of its keys.
        room: tokens that each row's copies have room for.
        block_size: tokens of a block of copies.
    """

    keys: Buffer
    tiles: Buffer
    limit: int
    room: int
    block_size: int

    def table(self, recorder: Recorder) -> int:
        """Return the address of the block table of the copies."""
        blocks = np.arange(recorder.max_rows * self.room // self.block_size, dtype=np.int32)
        return recorder.constant(in_device_memory(mx.array(blocks)))

    def copying(self, dim: int) -> str:
        """Return the source that copies plain keys of `dim` elements side by side."""
        parameters = ["const int* found", "const int* chosen", TILE, "const int* table"]
        parameters += ["const __nv_bfloat16* keys", "__nv_bfloat16* to"]
        return kernel_source("gather", parameters, self._constants(dim), threads=COPYING_THREADS)

    def decoding(self, codes: Codes, dim: int, *, turned: bool) -> str:
        """Return the source that copies coded keys side by side, in the model's coordinates; see
        `coded_kernels.gather`.
        """
        constants = self._constants(dim)
        return coded_kernels.gather(codes, constants, COPYING_THREADS, turned=turned)

    def _constants(self, dim: int) -> dict[str, int]:
        sizes = {"LIMIT": self.limit, "ROOM": self.room, "BLOCK": self.block_size}
        return {**sizes, "DIM": dim, "THREADS": COPYING_THREADS}


def blocks_of_row(max_rows: int) -> int:
    """Return how many thread blocks score, or copy, a row's keys in graphs of `max_rows` rows."""
    return max(1, _BLOCKS // max_rows)


def kernel_source(
    name: str, parameters: Sequence[str], constants: Mapping[str, int], threads: int
) -> str:
    """Return the source of a kernel; see `source.generated_source`."""
    body = own_text(f"{name}.cuh")
    return generated_source(parameters, [body], threads, constants=constants)
