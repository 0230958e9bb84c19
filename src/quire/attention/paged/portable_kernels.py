"""The portable paged kernels: constants, geometry and launches."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import mlx.core as mx

from quire.attention.backend import Scoring
from quire.attention.paged.target import Target
from quire.attention.paged.tiles import TILE_FIELDS, score_numbers
from quire.cache.formats.base import CodedArrays
from quire.core.arrays import Ints
from quire.device.dtypes import from_host
from quire.device.gpu_kernels import Kernel, in_device_memory

LONGEST = 576
"""Most elements of a vector: what fits into registers and 32 KiB of threadgroup memory."""

_MOST_VECTORS = 8
_QUERY_ELEMENTS = 4096  # of a thread group's queries, in shared memory as float32
_MOST_SPLITS = 64
_GROUPS = 512
"""Thread groups that fill a device: a guess, not measured on Metal."""
_CONSTANT_BELOW = 8
"""Inputs with fewer elements are padded: on Metal, MLX puts them into another address space and
compiles the kernel again.
"""
_TABLE_PIECES = 8
"""A block table is padded to a multiple of the power of two below its length, divided by this: a
step's graph is kept for each length.
"""


@dataclass(frozen=True, slots=True)
class Codes:
    """Layout of coded blocks; see `portable_attend.h`."""

    key_bits: int
    key_group: int
    value_bits: int
    value_group: int
    by_channel: bool
    codebook: bool

    @staticmethod
    def of(arrays: CodedArrays) -> Codes:
        """Describe the codes in a store's blocks."""
        layout = arrays.layout
        key_bits, value_bits = layout.key_bits, layout.value_bits
        return Codes(
            key_bits,
            _vector_size(arrays.keys, key_bits) // arrays.keys[1].shape[-1],
            value_bits,
            value_group=_vector_size(arrays.values, value_bits) // arrays.values[1].shape[-1],
            by_channel=layout.by_channel,
            codebook=layout.codebook,
        )

    def inputs(self) -> list[str]:
        """Return the names of the arrays of keys, and of values."""
        last = "levels" if self.codebook else "biases"
        return [
            name for of in ("key", "value") for name in (f"{of}s", f"{of}_scales", f"{of}_{last}")
        ]

    def defines(self) -> dict[str, int]:
        """Return the constants of `portable_attend.h`."""
        return {
            "K_BITS": self.key_bits,
            "K_GROUP": self.key_group,
            "V_BITS": self.value_bits,
            "V_GROUP": self.value_group,
            "BY_CHANNEL": int(self.by_channel),
            "CODEBOOK": int(self.codebook),
        }


def coded_value_size(arrays: CodedArrays) -> int:
    """Return the elements of a coded value."""
    return _vector_size(arrays.values, arrays.layout.value_bits)


def _vector_size(parts: list[mx.array], bits: int) -> int:
    return parts[0].shape[-1] * 32 // bits


@dataclass(frozen=True, slots=True)
class Shape:
    """Compile-time constants of the kernels for one kind of layer.

    Attributes:
        dtype: type of the result.
        value_stride: elements from one value to the next; more than `value_dim` if values are parts
            of keys.
        group: query heads for each of the KV heads.
        several: whether any sequence has more than one row.
    """

    dtype: mx.Dtype
    key_dim: int
    value_dim: int
    value_stride: int
    kv_heads: int
    group: int
    block_size: int
    capped: bool
    sinks: bool
    several: bool

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group

    @property
    def parts(self) -> int:
        """Number of thread groups that share the query heads of a KV head."""
        most = max(1, min(_MOST_VECTORS, _QUERY_ELEMENTS // self.key_dim))
        return -(-self.group // most)

    @property
    def part(self) -> int:
        """Number of query heads of a thread group."""
        return -(-self.group // self.parts)

    @property
    def rows(self) -> int:
        """Number of rows of one sequence in a tile."""
        most = min(_MOST_VECTORS, _QUERY_ELEMENTS // self.key_dim)
        return max(1, most // self.part) if self.several else 1

    @property
    def threads(self) -> int:
        """Number of threads of a thread group."""
        return 64 if self.value_dim <= 64 else 128

    def splits(self, tiles: int) -> int:
        """Number of thread groups that share the keys of each tile.

        It does not depend on the number of keys: groups without work return at once.
        """
        wanted = _GROUPS // (tiles * self.kv_heads * self.parts)
        return min(_MOST_SPLITS, 1 << max(0, wanted - 1).bit_length())

    def defines(self, codes: Codes | None, *, turned: bool = False) -> dict[str, int]:
        """Return the constants of `portable_attend.h`."""
        vectors = self.rows * self.part
        elements = -(-self.value_dim // self.threads)  # of a value, for each thread
        if codes is not None:
            elements = 1 << (elements - 1).bit_length()
        own = {
            "K_DIM": self.key_dim,
            "V_DIM": self.value_dim,
            "V_STRIDE": self.value_stride,
            "KV_HEADS": self.kv_heads,
            "GROUP": self.group,
            "HEADS": self.heads,
            "PART": self.part,
            "PARTS": self.parts,
            "VECTORS": vectors,
            "BLOCK": self.block_size,
            "THREADS": self.threads,
            "TURNS": -(-vectors // (self.threads // 32)),
            "OWN": elements,
            "SLICES": 1 if codes is None else self.threads // 64,
            "CAPPED": int(self.capped),
            "CODED": int(codes is not None),
            "TURNED": int(turned),
        }
        return own | (codes.defines() if codes is not None else {"CODEBOOK": 0})

    def merge_defines(self, *, tail: bool, turned: bool) -> dict[str, int]:
        """Return the constants of `portable_merge.h`."""
        names = ("V_DIM", "HEADS", "THREADS", "OWN")
        own = {name: n for name, n in self.defines(codes=None).items() if name in names}
        flags = {"SINKS": self.sinks, "TAIL": tail, "TURNED": turned}
        return own | {name: int(flag) for name, flag in flags.items()}


@dataclass(frozen=True, slots=True)
class Launch:
    """Tiles on the device.

    Attributes:
        count: number of tiles.
        rows: T.
        splits: see `Shape.splits`.
    """

    tiles: mx.array
    table: mx.array
    visible: mx.array
    count: int
    rows: int
    splits: int

    @staticmethod
    def of(
        tiles: Ints | array[int], table: Ints, visible: Ints | array[int], splits: int
    ) -> Launch:
        """Copy a launch's arrays to the device. Tiles and visible keys are flat."""
        return Launch(
            _moved(tiles),
            _moved(table, _padded(len(table))),
            _moved(visible),
            count=len(tiles) // TILE_FIELDS,
            rows=len(visible) // 2,
            splits=splits,
        )


def _padded(length: int) -> int:
    """Return the length to which a block table is padded."""
    piece = max(_CONSTANT_BELOW, (1 << length.bit_length()) // 2 // _TABLE_PIECES)
    return -(-length // piece) * piece


def _moved(numbers: Ints | array[int], length: int = _CONSTANT_BELOW) -> mx.array:
    """Copy numbers `[n]` to the device, with zeros up to `length`."""
    missing = length - len(numbers)
    if missing > 0:
        numbers = array("i", numbers.tobytes() + bytes(4 * missing))
    return from_host(numbers)


def attend(
    target: Target,
    q: mx.array,
    blocks: Sequence[mx.array],
    launch: Launch,
    scoring: Scoring,
    shape: Shape,
    codes: Codes | None = None,
    signs: mx.array | None = None,
) -> list[mx.array]:
    """Compute the partial results of each split, float32.

    Args:
        q: `[T, heads, key_dim]`.
        blocks: keys and values; where they are coded, the parts of both, see `CodedArrays`.
        signs: `[key_dim]`, which turn queries to the coordinates of coded keys.

    Returns:
        Weighted sums `[T, heads, splits, value_dim]`, and the largest score and the sum of weights
        `[T, heads, splits, 2]`.
    """
    found = (launch.rows, shape.heads, launch.splits)
    types = tuple(each.dtype for each in (q, *blocks))
    numbers = score_numbers(scoring.scale, scoring.softcap)
    extra = [] if signs is None else [signs]
    return _attend_kernel(target, shape, codes, types=types, turned=bool(extra))(
        inputs=[q, *blocks, launch.tiles, launch.table, launch.visible, numbers, *extra],
        grid=(launch.count * shape.threads, shape.kv_heads * shape.parts, launch.splits),
        threadgroup=(shape.threads, 1, 1),
        output_shapes=[(*found, shape.value_dim), (*found, 2)],
        output_dtypes=[mx.float32, mx.float32],
    )


def merge(
    target: Target,
    found: list[mx.array],
    tail: list[mx.array],
    sinks: mx.array | None,
    shape: Shape,
    signs: mx.array | None = None,
) -> list[mx.array]:
    """Combine the results of splits: `[T, heads, value_dim]`.

    Args:
        tail: what `attend` found in the rows' own blocks as written, with one split; its share of
            the result comes apart then. Else empty.
        signs: `[value_dim]`, which turn sums of coded values to the model's coordinates.
    """
    rows, heads, splits, _ = found[0].shape
    outputs = 2 if tail else 1
    extra = [each for each in (sinks, signs) if each is not None]
    types = tuple(each.dtype for each in extra)
    return _merge_kernel(target, shape, types, tail=bool(tail), turned=signs is not None)(
        inputs=[*found, *tail, _sizes(splits), *extra],
        grid=(rows * heads * shape.threads, 1, 1),
        threadgroup=(shape.threads, 1, 1),
        output_shapes=[(rows, heads, shape.value_dim)] * outputs,
        output_dtypes=[shape.dtype] * outputs,
    )


@cache
def _sizes(splits: int) -> mx.array:
    return in_device_memory(mx.array([splits], mx.int32))


@cache
def _attend_kernel(
    target: Target,
    shape: Shape,
    codes: Codes | None,
    types: tuple[mx.Dtype, ...],
    *,
    turned: bool,
) -> Kernel:
    blocks = ["keys", "values"] if codes is None else codes.inputs()
    return target.kernel(
        "attend",
        ["q", *blocks, "tiles", "table", "visible", "numbers", *(["signs"] if turned else [])],
        ["partial", "stats"],
        given=types,
        dtype=mx.float32,
        defines=shape.defines(codes, turned=turned),
    )


@cache
def _merge_kernel(
    target: Target, shape: Shape, types: tuple[mx.Dtype, ...], *, tail: bool, turned: bool
) -> Kernel:
    extra = [*(["sinks"] if shape.sinks else []), *(["signs"] if turned else [])]
    inputs = ["partial", "stats", *(["tail_partial", "tail_stats"] if tail else []), "sizes"]
    return target.kernel(
        "merge",
        [*inputs, *extra],
        ["result", "tail_result"] if tail else ["result"],
        given=types,
        dtype=shape.dtype,
        defines=shape.merge_defines(tail=tail, turned=turned),
    )
