"""The paged kernels on CUDA's tensor cores, for blocks of bfloat16 or float16."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import mlx.core as mx

from quire.attention.backend import Scoring
from quire.attention.paged.tiles import score_numbers
from quire.device.cuda.driver import Card
from quire.device.gpu_kernels import Kernel, cuda_kernel, kernel_text

LANES = 128  # threads of a thread block
_QUERIES = 16  # query vectors of a product on tensor cores
_KEYS = 64  # keys that a thread block takes at a time
_SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Allowed numbers of splits. They are few, because the kernel that merges splits is compiled for
each.
"""
_RESIDENT = 3
"""Thread blocks of single rows that a multiprocessor runs at a time where that is the compiler's
choice.
"""

VALUE_DIMS = (64, 128, 256, 512)
"""Sizes of values that kernels over coded blocks take."""
TYPES = {mx.bfloat16: "__nv_bfloat16", mx.float16: "__half"}


@dataclass(frozen=True, slots=True)
class Shape:
    """Compile-time constants of the kernels for one kind of layer.

    Attributes:
        key_dim, value_dim: elements of a vector.
        group: query heads for each of the KV heads.
    """

    dtype: mx.Dtype
    key_dim: int
    value_dim: int
    kv_heads: int
    group: int
    block_size: int
    capped: bool
    sinks: bool

    @property
    def part(self) -> int:
        """Number of query heads of one row in a tile."""
        return max(n for n in range(1, _QUERIES + 1) if self.group % n == 0)

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group

    @property
    def blocks(self) -> int:
        """Number of thread blocks that share the heads of a tile."""
        return self.kv_heads * (self.group // self.part)

    @property
    def many_tiles(self) -> int:
        """Number of 16 query vectors in a tile of a sequence with many rows, limited by
        registers.
        """
        return 4 if self.value_dim <= 128 else 2

    def rows(self, *, few: bool) -> int:
        """Return how many rows of one sequence a tile holds."""
        return (1 if few else self.many_tiles) * _QUERIES // self.part

    def splits(self, tiles: int, card: Card) -> int:
        """Number of thread blocks that share the keys of each tile.

        It does not depend on the number of keys: blocks without work return at once. It is the
        number that the card runs at a time, so that none waits. For vectors of up to 128, of
        which three or four fit, it is higher: that costs little, and balances rows with few and
        many keys. See `benchmarks/gpu/attention.py`.
        """
        return max(n for n in _SPLITS if n <= max(1, self.tiles_at_once(card) // tiles))

    def tiles_at_once(self, card: Card) -> int:
        """Return the number of tiles of single rows whose thread blocks a card runs at a time."""
        return max(1, card.multiprocessors * (self.resident or 5) // self.blocks)

    @property
    def resident(self) -> int | None:
        """Number of thread blocks of single rows that a multiprocessor should hold.

        None leaves it to the compiler, because vectors of up to 128 need few registers. With more
        than eight query heads in a tile a third block would get too few.
        """
        return None if self.value_dim <= 128 else 3 if self.part <= 8 else 2

    def splits_at_once(self, card: Card) -> int:
        """Return the most splits of one row whose thread blocks a card runs at a time."""
        return max(1, card.multiprocessors * (self.resident or _RESIDENT) // self.blocks)

    def defines(self, tiles: int, *, split: bool) -> dict[str, int]:
        """Return the constants of the kernel's source."""
        return {
            "K_DIM": self.key_dim,
            "V_DIM": self.value_dim,
            "GROUP": self.group,
            "PART": self.part,
            "PARTS": self.group // self.part,
            "KV_HEADS": self.kv_heads,
            "HEADS": self.heads,
            "BLOCK": self.block_size,
            "TILES": tiles,
            "SPLIT": int(split),
            "SINKS": int(self.sinks),
            "CAPPED": int(self.capped),
            "BF16": int(self.dtype == mx.bfloat16),
            # Registers suffice to load ahead for short vectors only.
            "AHEAD": int(tiles == 1 and self.key_dim <= 128 and self.value_dim <= 128),
        }


def attend(
    q: mx.array,
    keys: mx.array,
    values: mx.array,
    launch: Launch,
    scoring: Scoring,
    shape: Shape,
) -> mx.array:
    """Attend for rows `[T, heads, key_dim]` of a part; return `[T, heads, value_dim]`.

    Args:
        keys, values: `[blocks * kv_heads, block_size, -]`.
    """
    rows, heads = q.shape[:2]
    out = (rows, heads, shape.value_dim)
    if not launch.few:
        return _attend_kernel(shape, few=False)(
            inputs=_inputs(q, keys, values, launch=launch, scoring=scoring),
            grid=grid(launch, shape),
            threadgroup=(LANES, 1, 1),
            output_shapes=[out],
            output_dtypes=[q.dtype],
        )[0]
    partial, stats = attend_split(q, keys, values, launch=launch, scoring=scoring, shape=shape)
    sinks = stats if scoring.sinks is None else scoring.sinks
    return _combine_kernel(shape)(
        inputs=[partial, stats, sinks],
        grid=(rows * heads * LANES, 1, 1),
        threadgroup=(LANES, 1, 1),
        output_shapes=[out],
        output_dtypes=[q.dtype],
    )[0]


def attend_split(
    q: mx.array,
    keys: mx.array,
    values: mx.array,
    launch: Launch,
    scoring: Scoring,
    shape: Shape,
) -> list[mx.array]:
    """Compute the partial results of each split, float32.

    Returns:
        Weighted sums `[T, heads, splits, value_dim]`, and the largest score and the sum of weights
        `[T, heads, splits, 2]`.
    """
    found = (*q.shape[:2], launch.splits)
    return _attend_kernel(shape, few=True)(
        inputs=_inputs(q, keys, values, launch=launch, scoring=scoring),
        grid=grid(launch, shape),
        threadgroup=(LANES, 1, 1),
        output_shapes=[(*found, shape.value_dim), (*found, 2)],
        output_dtypes=[mx.float32, mx.float32],
    )


def grid(launch: Launch, shape: Shape) -> tuple[int, int, int]:
    """Return the threads of a launch."""
    return launch.count * LANES, shape.blocks, launch.splits


def _inputs(
    q: mx.array, keys: mx.array, values: mx.array, launch: Launch, scoring: Scoring
) -> list[mx.array]:
    constants = score_numbers(scoring.scale, scoring.softcap)
    sinks = constants if scoring.sinks is None else scoring.sinks
    return [q, keys, values, launch.tiles, launch.table, launch.visible, constants, sinks]


def shape_of(
    head_dim: int,
    value_dim: int,
    kv_heads: int,
    heads: int,
    block_size: int,
    *,
    capped: bool,
    sinks: bool,
) -> Shape:
    """Return the shape of a layer's attention over bfloat16."""
    return Shape(
        mx.bfloat16,
        head_dim,
        value_dim,
        kv_heads=kv_heads,
        group=heads // kv_heads,
        block_size=block_size,
        capped=capped,
        sinks=sinks,
    )


@dataclass(frozen=True, slots=True)
class Launch:
    """A part's arrays on the device.

    Attributes:
        count: number of tiles.
        few: see `tiles.Part`.
        splits: see `Shape.splits`; 1 for many rows.
    """

    tiles: mx.array
    table: mx.array
    visible: mx.array
    count: int
    few: bool
    splits: int


@cache
def _attend_kernel(shape: Shape, *, few: bool) -> Kernel:
    tiles = 1 if few else shape.many_tiles
    defines = shape.defines(tiles, split=few)
    missing = "T* result = nullptr;" if few else "float *partial = nullptr, *stats = nullptr;"
    missing += "const int split = blockIdx.z, splits = gridDim.z;\n"
    return compiled(
        "attend",
        ["q", "keys", "values", "tiles", "table", "visible", "numbers", "sinks"],
        ["partial", "stats"] if few else ["result"],
        shape=shape,
        defines=defines,
        head=source("tensor"),
        body=missing + source("attend"),
        shared=shared_memory(shape, tiles),
    )


@cache
def _combine_kernel(shape: Shape) -> Kernel:
    names = ("V_DIM", "HEADS", "SINKS")
    defines = {name: n for name, n in shape.defines(1, split=True).items() if name in names}
    inputs = ["partial", "stats", "sinks"]
    body = "const int splits = stats_shape[2], count = splits;\n" + source("combine")
    return compiled(
        "combine",
        inputs,
        ["result"],
        shape=shape,
        defines=defines,
        head=source("splits"),
        body=body,
        shared=0,
    )


def takes(key_dim: int, value_dim: int) -> bool:
    """Whether kernels over plain blocks take keys and values of these sizes."""
    short = value_dim <= 128 and value_dim % 16 == 0
    whole = key_dim % (16 * warps_together(value_dim)) == 0
    return whole and (short or value_dim in VALUE_DIMS)


def single_memory(shape: Shape) -> int:
    """Return the bytes that `single.cuh` lays out."""
    share, columns = warps_together(shape.value_dim), -(-shape.part // 8)
    # Pieces of eight elements change places within eight of them.
    keys, values = (-(-n // share // 64) * 64 for n in (shape.key_dim, shape.value_dim))
    vectors = 32 * 2 * (keys + values)
    return 4 * vectors + columns * (256 if share == 1 else 8192)


def warps_together(value_dim: int) -> int:
    """Return how many warps share a run of keys, each with some of a vector's elements."""
    return max(1, value_dim // 128)


def shared_memory(shape: Shape, tiles: int) -> int:
    """Return the bytes that `attend.cuh` lays out."""
    queries = tiles * _QUERIES
    halves = queries * (-(-shape.key_dim // 32) * 32 + 8) + 2 * queries * (_KEYS + 8)
    return 2 * halves + 4 * 12 * queries


def header(dtype: mx.Dtype, defines: dict[str, int]) -> str:
    """Return the declarations that precede a kernel's source."""
    lines = ["#include <cuda_bf16.h>", "#include <cuda_fp16.h>"]
    lines += [f"#define {name} {value}" for name, value in defines.items()]
    return "\n".join([*lines, f"typedef {TYPES[dtype]} T;", ""])


def compiled(
    name: str,
    inputs: list[str],
    outputs: list[str],
    shape: Shape,
    defines: dict[str, int],
    head: str,
    body: str,
    shared: int,
) -> Kernel:
    """Return a kernel that MLX compiles at its first call."""
    own = "_".join(str(n) for n in defines.values())
    return cuda_kernel(
        f"quire_{name}_{own}_{'bf16' if shape.dtype == mx.bfloat16 else 'f16'}",
        inputs,
        outputs,
        body=body,
        header=header(shape.dtype, defines) + head,
        shared_memory=shared,
    )


def joining(*, turned: bool) -> str:
    """Return the functions of kernels that join splits.

    Args:
        turned: whether sums of coded values are rotated back.
    """
    turning = kernel_text("quire.device.cuda", "coding.cuh") + source("turn") if turned else ""
    return source("splits") + turning


def source(name: str) -> str:
    """Return a file of `sources/`, as it is compiled."""
    text = kernel_text("quire.attention.paged", f"{name}.cuh")
    return kernel_text("quire.device.cuda", "lanes.cuh") + text if name == "warps" else text
