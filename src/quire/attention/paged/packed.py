"""Attention of single rows over page codes: the coded blocks, the row's own uncoded one, and both
joined.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import mlx.core as mx
import numpy as np

from quire.attention.backend import Scoring
from quire.attention.metadata import AttentionMetadata
from quire.attention.paged import cuda
from quire.attention.paged.cuda import Shape
from quire.attention.paged.portable_kernels import Codes
from quire.attention.paged.tiles import TILE_FIELDS, score_numbers
from quire.cache.formats.base import PackedStore
from quire.cache.formats.rotation import rotation
from quire.core.arrays import Ints
from quire.device.cuda.driver import card
from quire.device.gpu_kernels import Kernel

BLOCK_SIZE = 64


@dataclass(frozen=True, slots=True)
class PackedLaunch:
    """The rows of a step on the device: their coded keys and their uncoded ones.

    Attributes:
        tiles, own_tiles: see `tiles_of`.
        splits: thread blocks that share the coded keys of a tile.
    """

    tiles: mx.array
    own_tiles: mx.array
    table: mx.array
    tails: mx.array
    visible: mx.array
    count: int
    splits: int


def tiles_of(metadata: AttentionMetadata) -> Ints:
    """Return two tiles of each row, int32 `[2, n, TILE_FIELDS]`.

    The first is of its coded blocks, by the block table, the second of its own block as written, by
    a table of tails, one for each row. Rows of one sequence lie in one block.
    """
    count = metadata.rows
    own = metadata.keys // BLOCK_SIZE * BLOCK_SIZE  # where the row's own block starts
    tiles = np.zeros((2, count, TILE_FIELDS), np.int32)
    tiles[:, :, 0] = np.arange(count)
    tiles[:, :, 1] = 1
    tiles[0, :, 2] = metadata.first_visible
    tiles[0, :, 3] = own
    tiles[0, :, 4] = metadata.by_row(metadata.table_starts[:-1] - metadata.first_blocks)
    tiles[1, :, 2] = np.maximum(metadata.first_visible, own)
    tiles[1, :, 3] = metadata.last_visible + 1
    tiles[1, :, 4] = np.arange(count) - own // BLOCK_SIZE
    return tiles


def launch(metadata: AttentionMetadata, shape: Shape) -> PackedLaunch:
    """Prepare the arrays that `attend` needs for a step with one row per sequence."""
    assert metadata.tails is not None, "the format keeps no tails"
    visible = mx.array(np.stack([metadata.first_visible, metadata.last_visible], axis=1))
    table, tails = mx.array(metadata.block_table), mx.array(metadata.tails)
    count = metadata.rows
    tiles, own = map(mx.array, tiles_of(metadata))
    splits = shape.splits(count, card())
    return PackedLaunch(tiles, own, table, tails=tails, visible=visible, count=count, splits=splits)


def attend(
    q: mx.array, store: PackedStore, launch: PackedLaunch, scoring: Scoring, shape: Shape
) -> mx.array:
    """Attend for rows `[T, heads, key_dim]`; return `[T, heads, value_dim]`.

    Args:
        store: of the page format.
    """
    rows, heads = q.shape[:2]
    numbers = score_numbers(scoring.scale, scoring.softcap)
    sinks = numbers if scoring.sinks is None else scoring.sinks
    coded, own = (rows, heads, launch.splits), (rows, heads, 1)
    tables = launch.tiles, launch.own_tiles, launch.table, launch.tails, launch.visible
    found = _kernel(shape, Codes.of(store.coded()))(
        inputs=[q, *store.arrays(), *tables, numbers],
        grid=(rows * cuda.LANES, shape.blocks, launch.splits + 1),
        threadgroup=(cuda.LANES, 1, 1),
        output_shapes=[(*each, n) for each in (coded, own) for n in (shape.value_dim, 2)],
        output_dtypes=[mx.float32] * 4,
    )
    return _join_kernel(shape)(
        inputs=[*found, signs(shape.value_dim), sinks],
        grid=(rows * heads * cuda.LANES, 1, 1),
        threadgroup=(cuda.LANES, 1, 1),
        output_shapes=[(rows, heads, shape.value_dim)],
        output_dtypes=[q.dtype],
    )[0]


@cache
def signs(dim: int) -> mx.array:
    """Return the signs of the values' rotation."""
    return rotation(dim).signs


def head() -> str:
    """Return the declarations that precede `body`, after the constants."""
    parameters = ["const T* q", "const T* keys", "const T* values", "const int* tiles"]
    parameters += ["const int* table", "const int* visible", "const float* numbers"]
    parameters += ["float* partial", "float* stats"]
    lines = [
        "const float* sinks = nullptr; T* result = nullptr;",
        "const int split = 0, splits = 1;",
    ]
    own = f"__device__ __forceinline__ void own_block({', '.join(parameters)}) {{\n"
    text = "".join(map(cuda.source, ("tensor", "warps", "codes"))) + own
    return text + "\n".join([*lines, cuda.source("attend"), "}\n"])


def body(coded: str = "packed") -> str:
    """Return a kernel whose first thread blocks read rows' own blocks, the others coded blocks.

    Args:
        coded: the source that reads coded blocks.
    """
    own = ["q", "tail_keys", "tail_values", "own_tiles", "tails", "visible", "numbers"]
    own += ["own_partial", "own_stats"]
    lines = [f"if (blockIdx.z == 0) {{ own_block({', '.join(own)}); return; }}"]
    lines += ["const int split = blockIdx.z - 1, splits = gridDim.z - 1;", cuda.source(coded)]
    return "\n".join(lines)


def defines(shape: Shape, codes: Codes) -> dict[str, int]:
    """Return the constants of the kernel."""
    more = {"K_BITS": codes.key_bits, "V_BITS": codes.value_bits, "V_GROUP": codes.value_group}
    return shape.defines(1, split=True) | more


def shared_memory(shape: Shape, codes: Codes) -> int:
    """Return the bytes that the kernel lays out."""
    share = cuda.warps_together(shape.value_dim)
    keys = shape.key_dim // share * (8 * codes.key_bits + 4)
    groups = shape.value_dim // codes.value_group
    values = shape.value_dim // share * codes.value_bits // 8 + 4 * groups
    columns = -(-shape.part // 8)
    sums = 8 * columns * shape.value_dim // share * 4
    coded = 4 * max(keys + 64 * values, sums) + columns * (256 if share == 1 else 16384)
    return max(coded, cuda.shared_memory(shape, 1))


@cache
def _kernel(shape: Shape, codes: Codes) -> Kernel:
    parts = ("k_codes", "k_scales", "k_biases", "v_codes", "v_scales", "v_biases")
    inputs = ["q", *parts, "tail_keys", "tail_values", "tiles", "own_tiles", "table", "tails"]
    return cuda.compiled(
        "packed",
        [*inputs, "visible", "numbers"],
        ["partial", "stats", "own_partial", "own_stats"],
        shape=shape,
        defines=defines(shape, codes),
        head=head(),
        body=body(),
        shared=shared_memory(shape, codes),
    )


@cache
def _join_kernel(shape: Shape) -> Kernel:
    names = ("V_DIM", "HEADS", "SINKS")
    own = {name: n for name, n in shape.defines(1, split=True).items() if name in names}
    own["TURNED"] = 1
    inputs = ["partial", "stats", "own_partial", "own_stats", "signs", "sinks"]
    body = "const int splits = stats_shape[2];\n" + cuda.source("join")
    return cuda.compiled(
        "join",
        inputs,
        ["result"],
        shape=shape,
        defines=own,
        head=cuda.joining(turned=True),
        body=body,
        shared=0,
    )
