"""Attention of many rows of a sequence over plain blocks by Hopper's warpgroups: `prompts.cuh`."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import ClassVar

import mlx.core as mx

from quire.attention.paged.cuda import Shape, source
from quire.attention.paged.tiling import Tiling
from quire.device.cuda.boxes import memory_map
from quire.device.cuda.driver import Card
from quire.device.cuda.wgmma import multiplying
from quire.device.gpu_kernels import kernel_text

_DIMS = (64, 128, 256, 512)


@dataclass(frozen=True, slots=True)
class PromptTiles:
    """Constants and launch of `prompts.cuh`.

    Attributes:
        in_boxes: whether keys and values lie where the card can copy boxes of them by itself.
    """

    shape: Shape
    in_boxes: bool = True

    threads: ClassVar[int] = 3 * 128
    """Two warpgroups that multiply, and one that copies."""

    @property
    def share(self) -> int:
        """Number of warpgroups that have the same query vectors, because a value is long."""
        return 2 if self.shape.value_dim > 256 else 1

    @property
    def queries(self) -> int:
        """Number of query vectors of a tile."""
        return 128 // self.share

    @property
    def rows(self) -> int:
        """Number of rows of one sequence in a tile."""
        return self.queries // self.shape.part

    @property
    def keys(self) -> int:
        """Number of keys of a pass, limited by registers."""
        return 128 if self.shape.value_dim <= 128 else 64

    @property
    def stages(self) -> int:
        """Number of passes in shared memory."""
        return 1 if self.share > 1 else 2

    @property
    def box(self) -> int:
        """Number of keys of a block that the card copies at a time by itself; 0 if it does not."""
        found = gcd(self.keys, self.shape.block_size)
        return found if self.in_boxes and found % 8 == 0 else 0

    @property
    def maps(self) -> tuple[mx.array, mx.array]:
        """Maps of keys and of values for `copy_box`; of none if the card copies no boxes."""
        if not self.box:
            return mx.zeros((1,)), mx.zeros((1,))
        key_map, value_map = (
            memory_map(n, self.box) for n in (self.shape.key_dim, self.shape.value_dim)
        )
        return key_map, value_map

    @property
    def shared(self) -> int:
        """Bytes of shared memory that `prompts.cuh` lays out."""
        dims = self.shape.key_dim + self.shape.value_dim
        tiles = self.queries * self.shape.key_dim + self.stages * self.keys * dims
        weights = (64 * 64 * 2 + 2 * 64 * 4) * (self.share - 1)
        return 2 * tiles + weights + 4 * self.stages * 8

    @property
    def piece(self) -> int:
        """Bytes that a thread block stores for a tile whose keys several thread blocks share."""
        return (self.shape.value_dim // self.share // 8 + 1) * 2 * 128 * 16

    @property
    def defines(self) -> dict[str, int]:
        """The constants of the source, beside those of the shape."""
        registers = {"TAKEN": 232, "KEPT": 40}  # of a thread that multiplies, and that copies
        own = {"WARPGROUPS": 2, "SHARING": self.share, "KEYS": self.keys, "STAGES": self.stages}
        own["BOX"] = self.box
        return {**self.shape.defines(1, split=False), **own, **registers}

    @property
    def functions(self) -> str:
        """The functions that `prompts.cuh` calls."""
        own_dim = self.shape.value_dim // self.share
        return "".join(
            [
                source("tensor"),
                source("warps"),
                kernel_text("quire.device.cuda", "warpgroup.cuh"),
                multiplying(self.keys // self.share, in_registers=False),
                multiplying(own_dim, in_registers=self.share == 1, turned=True),
            ]
        )


def prompt_tiles(shape: Shape, card: Card, *, value_in_key: bool) -> PromptTiles | None:
    """Return how warpgroups attend for many rows of a sequence; None if they cannot."""
    if not card.warpgroups or value_in_key or shape.dtype != mx.bfloat16:
        return None
    tiles = PromptTiles(shape)
    served = {shape.key_dim, shape.value_dim} <= set(_DIMS) and tiles.shared <= card.shared
    return tiles if served else None


def tiling_of(shape: Shape, card: Card, *, value_in_key: bool) -> Tiling:
    """Return how rows of prompts over plain blocks are divided."""
    tiles = prompt_tiles(shape, card, value_in_key=value_in_key)
    if tiles is None:
        return Tiling(shape.rows(few=False), shape.blocks)
    return Tiling(tiles.rows, shape.blocks, at_once=card.multiprocessors)
