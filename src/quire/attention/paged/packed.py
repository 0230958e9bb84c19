"""Single rows over page codes: the coded blocks, the row's own as written, and both joined."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import mlx.core as mx
import numpy as np

from quire.attention.backend import Scoring
from quire.attention.metadata import AttentionMetadata
from quire.attention.paged import cuda
from quire.attention.paged.cuda import Launch, Shape
from quire.attention.paged.tiles import TILE_FIELDS
from quire.cache.formats.rotation import rotation
from quire.device.gpu_kernels import Kernel

BLOCK_TOKENS = 64
BITS = (4, 8)


@dataclass(frozen=True, slots=True)
class PackedLaunch:
    """The rows of a step on the device: what they read coded, and what as written."""

    coded: Launch
    own: Launch


def launch(metadata: AttentionMetadata, shape: Shape) -> PackedLaunch:
    """One tile for each row; none of the sequences has more."""
    assert metadata.tails is not None, "the format keeps no tails"
    count = metadata.rows
    own = metadata.keys // BLOCK_TOKENS * BLOCK_TOKENS  # where the row's own block begins
    tiles = np.zeros((2, count, TILE_FIELDS), np.int32)
    tiles[:, :, 0] = np.arange(count)
    tiles[:, :, 1] = 1
    tiles[0, :, 2] = metadata.first_visible
    tiles[0, :, 3] = own
    tiles[0, :, 4] = metadata.table_starts[:-1] - metadata.first_blocks
    tiles[1, :, 2] = np.maximum(metadata.first_visible, own)
    tiles[1, :, 3] = metadata.last_visible + 1
    tiles[1, :, 4] = np.arange(count) - own // BLOCK_TOKENS
    visible = mx.array(np.stack([metadata.first_visible, metadata.last_visible], axis=1))
    table, tails = mx.array(metadata.block_table), mx.array(metadata.tails)
    splits = shape.splits(count)
    return PackedLaunch(
        Launch(mx.array(tiles[0]), table, visible, count, True, splits),
        Launch(mx.array(tiles[1]), tails, visible, count, True, 1),
    )


def attend(
    q: mx.array, arrays: list[mx.array], launch: PackedLaunch, scoring: Scoring, shape: Shape
) -> mx.array:
    """Rows `[T, heads, key_dim]`: `[T, heads, value_dim]`.

    Args:
        arrays: of a store of the page format: codes, scales and biases of keys, then of values,
            then tails.
    """
    *coded, tail_keys, tail_values = arrays
    rows, heads = q.shape[:2]
    numbers = cuda.numbers(scoring.scale, scoring.softcap)
    sinks = numbers if scoring.sinks is None else scoring.sinks
    found = (rows, heads, launch.coded.splits)
    bits = coded[0].shape[-1] * 32 // shape.block_tokens, coded[3].shape[-1] * 32 // shape.value_dim
    partial, stats = _coded_kernel(shape, *bits, shape.value_dim // coded[4].shape[-1])(
        inputs=[q, *coded, launch.coded.tiles, launch.coded.table, numbers],
        grid=cuda.grid(launch.coded, shape),
        threadgroup=(cuda.LANES, 1, 1),
        output_shapes=[(*found, shape.value_dim), (*found, 2)],
        output_dtypes=[mx.float32, mx.float32],
    )
    own = cuda.attend_split(q, tail_keys, tail_values, launch.own, scoring, shape)
    return _join_kernel(shape)(
        inputs=[partial, stats, *own, _signs(shape.value_dim), sinks],
        grid=(rows * heads * cuda.LANES, 1, 1),
        threadgroup=(cuda.LANES, 1, 1),
        output_shapes=[(rows, heads, shape.value_dim)],
        output_dtypes=[q.dtype],
    )[0]


@cache
def _signs(dim: int) -> mx.array:
    signs = rotation(dim).signs
    assert signs is not None, f"vectors of {dim} are rotated by a matrix"
    return signs


def defines(shape: Shape, key_bits: int, value_bits: int, value_group: int) -> dict[str, int]:
    """The constants of `packed.cuh`."""
    more = {"K_BITS": key_bits, "V_BITS": value_bits, "V_GROUP": value_group}
    return shape.defines(1, split=True) | more


def shared_memory(shape: Shape, key_bits: int, value_bits: int, value_group: int) -> int:
    """Bytes that `packed.cuh` lays out."""
    share = warps_together(shape.value_dim)
    columns = -(-shape.part // 8)
    keys = shape.key_dim // share * (8 * key_bits + 4)
    values = shape.value_dim // share * value_bits // 8 + 4 * shape.value_dim // value_group
    return 4 * (keys + 64 * values) + columns * (256 if share == 1 else 16384)


def warps_together(value_dim: int) -> int:
    """Warps that take a block together, each some of a vector's elements."""
    return max(1, value_dim // 128)


@cache
def _coded_kernel(shape: Shape, key_bits: int, value_bits: int, value_group: int) -> Kernel:
    inputs = [
        *("q", "k_codes", "k_scales", "k_biases", "v_codes", "v_scales", "v_biases"),
        *("tiles", "table", "numbers"),
    ]
    return cuda.compiled(
        "packed",
        inputs,
        ["partial", "stats"],
        shape,
        defines(shape, key_bits, value_bits, value_group),
        cuda.source("tensor") + cuda.source("codes"),
        cuda.source("packed"),
        shared_memory(shape, key_bits, value_bits, value_group),
    )


@cache
def _join_kernel(shape: Shape) -> Kernel:
    names = ("V_DIM", "HEADS", "SINKS")
    own = {name: n for name, n in shape.defines(1, split=True).items() if name in names}
    inputs = ["partial", "stats", "own_partial", "own_stats", "signs", "sinks"]
    return cuda.compiled("join", inputs, ["result"], shape, own, "", cuda.source("join"), 0)
