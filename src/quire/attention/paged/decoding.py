"""Decodes blocks of codes to the queries' type, followed by uncoded blocks."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import cache

import mlx.core as mx
import numpy as np

from quire.attention.metadata import AttentionMetadata
from quire.attention.paged import cuda
from quire.attention.paged.portable_kernels import Codes
from quire.cache.formats.base import CodedArrays, LayerShape, PackedStore, WrittenBlocks
from quire.cache.formats.paging import block_rows
from quire.cache.formats.registry import make_store
from quire.core.arrays import Ints
from quire.core.kv_format import KVFormat
from quire.device.coding import VectorRotation
from quire.device.gpu_kernels import Kernel, kernel_text
from quire.device.verified import SoundKernels, disagreement

log = logging.getLogger("quire.attention")

_THREADS = 256
_TOLERANCE = 3e-3
"""Largest relative error: sums in another order may round to another 16-bit number."""
_ELEMENTS = 1 << 24
"""Most elements of keys, and of values, that MLX decodes at a time: 64 MB in float32, and a few
temporary copies. Results have the queries' type.
"""

Blocks = tuple[mx.array, mx.array]
"""Keys `[n, block_size, head_dim]` and values `[n, block_size, value_dim]`."""


class BlockDecoder:
    """Decodes the same blocks in each layer of a KV group.

    Args:
        ids: ids of the blocks.
    """

    def __init__(self, ids: Ints, metadata: AttentionMetadata) -> None:
        self._rows = block_rows(ids, metadata.spec.kv_heads)
        vector = max(metadata.spec.head_dim, metadata.spec.value_dim)
        self._some = max(1, _ELEMENTS // (metadata.block_size * vector))
        self._all_rows: mx.array | None = None

    def blocks(self, store: PackedStore, written: WrittenBlocks | None, dtype: mx.Dtype) -> Blocks:
        """Return the decoded blocks, then the uncoded ones, a row for each KV head."""
        kept = None if written is None else _kept_blocks(written)
        if not self._rows.size and kept is not None:
            return kept
        kind = _kind_served(store, dtype, kept)
        if kind is None:
            return self._by_operations(store, kept, dtype)
        if self._all_rows is None:
            self._all_rows = self._rows if kept is None else _with_kept(self._rows, len(kept[0]))
        return _by_kernel(store, kind, self._all_rows, kept=kept)

    def _by_operations(self, store: PackedStore, kept: Blocks | None, dtype: mx.Dtype) -> Blocks:
        keys: list[mx.array] = []
        values: list[mx.array] = []
        for start in range(0, self._rows.size, self._some):
            rows = self._rows[start : start + self._some, None]
            rows = mx.depends([rows], keys[-1:] + values[-1:])[0]
            of_keys, of_values = store.read(rows).decoded()
            keys.append(of_keys.astype(dtype))
            values.append(of_values.astype(dtype))
        if kept is not None:
            keys.append(kept[0])
            values.append(kept[1])
        return mx.concatenate(keys), mx.concatenate(values)


def _with_kept(rows: mx.array, count: int) -> mx.array:
    """Return rows in the kernel's form, with uncoded rows after them."""
    return mx.concatenate([rows, -1 - mx.arange(count, dtype=rows.dtype)])


def _kept_blocks(written: WrittenBlocks) -> Blocks:
    return written.keys.flatten(0, 1), written.values.flatten(0, 1)


@dataclass(frozen=True, slots=True)
class Kind:
    """Compile-time constants of the kernel.

    Attributes:
        key_scale, value_scale: scale of the inverse rotation, see `VectorRotation`; None without
            one.
        behind: whether uncoded blocks follow.
    """

    shape: cuda.Shape
    codes: Codes
    key_scale: float | None
    value_scale: float | None
    behind: bool

    @staticmethod
    def of(shape: LayerShape, arrays: CodedArrays, dtype: mx.Dtype, *, behind: bool) -> Kind:
        sizes = shape.head_dim, shape.value_dim, 1, 1, shape.block_size
        layout = arrays.layout
        return Kind(
            cuda.Shape(dtype, *sizes, capped=False, sinks=False),
            Codes.of(arrays),
            None if layout.key_rotation is None else layout.key_rotation.scale,
            value_scale=None if layout.value_rotation is None else layout.value_rotation.scale,
            behind=behind,
        )

    @property
    def defines(self) -> dict[str, int]:
        """The constants of the source."""
        sizes = {
            "K_DIM": self.shape.key_dim,
            "V_DIM": self.shape.value_dim,
            "BLOCK": self.shape.block_size,
            "THREADS": _THREADS,
        }
        return self.codes.defines() | sizes

    @property
    def inputs(self) -> list[str]:
        """The names of the kernel's inputs."""
        turns = {"key_signs": self.key_scale, "value_signs": self.value_scale}
        signs = [name for name, scale in turns.items() if scale is not None]
        kept = ["written_keys", "written_values"] if self.behind else []
        return [*self.codes.inputs(), *signs, *kept, "rows"]


_sound = SoundKernels(log, "Decoding of KV blocks", "slower MLX operations do")


def _kind_served(store: PackedStore, dtype: mx.Dtype, kept: Blocks | None) -> Kind | None:
    """Return the kind of kernel that decodes a store; None if none does. Checks new kinds."""
    shape, arrays = store.shape, store.coded()
    layout = arrays.layout
    by_token = [shape.value_dim] if layout.by_channel else [shape.head_dim, shape.value_dim]
    made_for = (
        not shape.value_in_key
        and dtype in cuda.TYPES
        and all(dim in cuda.VALUE_DIMS for dim in by_token)
        and shape.head_dim % 64 == 0
        and shape.block_size % 32 == 0
        and all(each.map.ndim == 1 for each in _rotations(arrays))
        and (kept is None or kept[0].dtype == kept[1].dtype == dtype)
    )
    if not made_for:
        return None
    behind = kept is not None
    kind = Kind.of(shape, arrays, dtype, behind=behind)
    agrees = _sound.holds(kind, lambda: decoding_differs(shape, store.format, dtype, behind=behind))
    return kind if agrees else None


def _rotations(arrays: CodedArrays) -> list[VectorRotation]:
    """Return the rotations of keys and of values, if any."""
    layout = arrays.layout
    return [each for each in (layout.key_rotation, layout.value_rotation) if each is not None]


def decoding_differs(
    shape: LayerShape, format: KVFormat, dtype: mx.Dtype, *, behind: bool
) -> str | None:
    """Return how decoded random codes differ from MLX's result; None if close enough.

    Args:
        behind: whether uncoded blocks follow.
    """
    store = random_blocks(replace(shape, kv_heads=1), format, 3)
    rows = mx.array([2, 0], mx.int32)
    keys, values = (each.astype(dtype) for each in store.read(rows[:, None]).decoded())
    kept: Blocks | None = None
    if behind:
        kept = keys[:1] + 1, values[:1] + 1
        rows = _with_kept(rows, 1)
        keys, values = mx.concatenate([keys, kept[0]]), mx.concatenate([values, kept[1]])
    kind = Kind.of(store.shape, store.coded(), dtype, behind=behind)
    found = _by_kernel(store, kind, rows, kept=kept)
    for name, own, usual in zip(("keys", "values"), found, (keys, values), strict=True):
        if (difference := disagreement(own, usual, _TOLERANCE)) is not None:
            return f"{name} of {format.name}: {difference}"
    return None


def random_blocks(shape: LayerShape, format: KVFormat, count: int) -> PackedStore:
    """Return a store of some blocks of random codes."""
    store = make_store(shape, format).packed
    assert store is not None, "blocks hold codes"
    store.resize(count, ())
    rng = np.random.default_rng(0)
    contents = [_random(rng, each) for arrays in store.block_arrays for each in arrays]
    store.restore(np.arange(count, dtype=np.int32), contents)
    return store


def _random(rng: np.random.Generator, like: mx.array) -> mx.array:
    if like.dtype == mx.uint32:
        return mx.array(rng.integers(0, 1 << 32, like.shape, dtype=np.uint32))
    return mx.array(rng.standard_normal(like.shape)).astype(like.dtype)


def _by_kernel(store: PackedStore, kind: Kind, rows: mx.array, kept: Blocks | None) -> Blocks:
    """Return rows of the store, decoded by the kernel; row -1 - n is uncoded row n."""
    shape, arrays, dtype = store.shape, store.coded(), kind.shape.dtype
    turns = [each.map for each in _rotations(arrays)]
    count, tokens = len(rows), shape.block_size
    keys, values = _kernel(kind)(
        inputs=[*arrays.keys, *arrays.values, *turns, *(kept or ()), rows],
        grid=(count * _THREADS, 2, 1),
        threadgroup=(_THREADS, 1, 1),
        output_shapes=[(count, tokens, dim) for dim in (shape.head_dim, shape.value_dim)],
        output_dtypes=[dtype, dtype],
    )
    return keys, values


@cache
def _kernel(kind: Kind) -> Kernel:
    return cuda.compiled(
        "decode",
        kind.inputs,
        ["decoded_keys", "decoded_values"],
        shape=kind.shape,
        defines=kind.defines,
        head=head(),
        body=body(kind),
        shared=0,
    )


def head() -> str:
    """Return the declarations that precede `body`, after the constants."""
    coding = kernel_text("quire.device.cuda", "coding.cuh")
    return coding + "".join(map(cuda.source, ("elements", "decode", "copy")))


def body(kind: Kind) -> str:
    """Return the kernel's body. Absent inputs are null pointers."""
    given = {"key_signs": "float", "value_signs": "float"}
    given |= {"written_keys": "T", "written_values": "T"}
    missing = [name for name in given if name not in kind.inputs]
    scales = {"key_rotation_scale": kind.key_scale, "value_rotation_scale": kind.value_scale}
    lines = [f"const {given[name]}* {name} = nullptr;" for name in missing]
    lines += [f"const float {name} = (float){scale or 0.0!r};" for name, scale in scales.items()]
    return "\n".join([*lines, cuda.source("decode_blocks")])
