"""Codes KV blocks in one launch: keys by channel, values by token."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import mlx.core as mx
import numpy as np

from quire.device.coding import ChunkBlocks, Chunks, CodedChunks, VectorCoding
from quire.device.cuda.encoding import LONGEST, Encoder, Kind, coding_text
from quire.device.gpu_kernels import Kernel, cuda_kernel, kernel_text
from quire.device.verified import SoundKernels, disagreement

log = logging.getLogger("quire.device")

_THREADS = 128
_TOKENS = 64
_TYPES = {mx.float32: "float", mx.float16: "__half", mx.bfloat16: "__nv_bfloat16"}
_TOLERANCE = 3e-3
"""Largest relative error: sums in another order may round to another scale or code."""


@dataclass(frozen=True, slots=True)
class BlockKind:
    """Compile-time constants of the kernel.

    Attributes:
        key_dim: number of key channels.
        keys: coding of a channel's 64 tokens.
        values: coding of a token's values.
    """

    dtype: mx.Dtype
    key_dim: int
    keys: Kind
    values: Kind

    @property
    def defines(self) -> dict[str, object]:
        """The constants of the source."""
        return {
            "THREADS": _THREADS,
            "K_DIM": self.key_dim,
            "K_BITS": self.keys.bits,
            "K_FITS": self.keys.refits,
            "K_REACH": f"(float){self.keys.reach!r}",
            "V_DIM": self.values.dim,
            "V_CODING": self.values.constants,
            "V_SCALE": f"(float){self.values.scale!r}",
            "V_REACH": f"(float){self.values.reach!r}",
        }


class BlockEncoder:
    """Codes blocks. Each kind is checked once in a process against the codes of single vectors.

    Args:
        encoder: codes single vectors.
    """

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder
        self._sound = SoundKernels(log, "Encoding of KV blocks", "slower operations do")

    def code(self, chunks: Chunks, codings: Sequence[VectorCoding]) -> CodedChunks | None:
        """Code blocks as `Operations.code_blocks` does. Return None if unsupported."""
        tails = chunks.tails
        filled = len(tails) == 2 and len(chunks.blocks.full) > 0
        if not filled or not _made_for(tails, codings):
            return None
        keys, values = codings
        key_dim, value_dim = (each.shape[-1] for each in tails)
        kind = BlockKind(
            tails[0].dtype, key_dim, Kind.of(_TOKENS, keys), values=Kind.of(value_dim, values)
        )
        sound = self._sound.holds(kind, lambda: blocks_differ(kind, codings, self._encoder))
        return _coded(kind, chunks, values) if sound else None


def _made_for(tails: Sequence[mx.array], codings: Sequence[VectorCoding]) -> bool:
    keys, values = codings
    return (
        all(each.dtype == tails[0].dtype and each.shape[1] == _TOKENS for each in tails)
        and tails[0].dtype in _TYPES
        and keys.size == keys.group_size == _TOKENS
        and keys.rotation is None
        and values.size == tails[1].shape[-1] <= LONGEST
        and values.group_size % 32 == 0
        and values.rotation is not None
        and values.rotation.map.ndim == 1
        and keys.edges is None
        and values.edges is None
    )


def _coded(kind: BlockKind, chunks: Chunks, coding: VectorCoding) -> CodedChunks:
    """Code blocks by one launch.

    Args:
        coding: coding of values.
    """
    assert coding.rotation is not None, "values are rotated"
    vectors, blocks = chunks.vectors, chunks.blocks
    heads, full = vectors[0].shape[1], len(blocks.full)
    dims = kind.key_dim, kind.values.dim
    coded: list[tuple[int, ...]] = []
    for each, size in ((kind.keys, kind.key_dim), (kind.values, _TOKENS)):
        groups = each.size // each.group
        coded += [(full * heads, size, n) for n in (each.size * each.bits // 32, groups, groups)]
    key_parts = -(-kind.key_dim // _THREADS)
    # MLX writes to no array in place that a kernel of the same step reads: it would copy the tails,
    # and recorded steps, which know them by address, would be recorded anew.
    started = chunks.tails if blocks.tail_tokens.any() else vectors
    keys, values, *codes = _kernel(kind)(
        inputs=[*started, *vectors, coding.rotation.map, blocks.described],
        grid=(blocks.count * _THREADS, key_parts + _TOKENS // 16, heads),
        threadgroup=(_THREADS, 1, 1),
        output_shapes=[*((blocks.count, heads, _TOKENS, dim) for dim in dims), *coded],
        output_dtypes=[kind.dtype] * 2 + [mx.uint32, mx.float16, mx.float16] * 2,
    )
    return CodedChunks([keys, values], codes)


@cache
def _kernel(kind: BlockKind) -> Kernel:
    parts = ("words", "scales", "biases")
    return cuda_kernel(
        f"quire_blocks_{kind}",
        [
            "tail_keys",
            "tail_values",
            "fresh_keys",
            "fresh_values",
            "value_signs",
            "blocks",
        ],
        ["keys", "values", *(f"{of}_{part}" for of in "kv" for part in parts)],
        body=kernel_text("quire.device.cuda", "blocks.cuh"),
        header=header(kind),
    )


def header(kind: BlockKind) -> str:
    """Return the declarations that precede the kernel."""
    lines = [f"#define {name} {value}" for name, value in kind.defines.items()]
    return "\n".join([*lines, f"typedef {_TYPES[kind.dtype]} T;", coding_text()])


def blocks_differ(kind: BlockKind, codings: Sequence[VectorCoding], encoder: Encoder) -> str | None:
    """Return how codes of random blocks differ from those of single vectors; None if close
    enough.
    """
    heads, rows, dims = 2, 2 * _TOKENS + 30, (kind.key_dim, kind.values.dim)
    tails = [_normal((3 * heads, _TOKENS, dim), kind.dtype, dim) for dim in dims]
    vectors = [_normal((rows, heads, dim), kind.dtype, dim + 1) for dim in dims]
    # One that goes on into a third block, one that ends with a block; a row of others before each.
    chunks = [_Span(1, 2 * _TOKENS, 2, offset=5), _Span(2 * _TOKENS + 2, 24, 0, offset=40)]
    columns = np.array(
        [(each.row, each.count, each.tail, each.offset) for each in chunks], np.int32
    )
    spans, counts, owners, offsets = columns.T
    blocks = ChunkBlocks.of(spans, counts, owners, offsets=offsets, block_size=_TOKENS)
    found = _coded(kind, Chunks(tails, vectors, blocks), codings[1])
    expected: list[mx.array] = []
    for name, own, tail, fresh in zip(
        ("keys", "values"), found.written, tails, vectors, strict=True
    ):
        joined = mx.concatenate([each.blocks(tail, fresh) for each in chunks])
        if not mx.array_equal(own, joined).item():
            return f"{name} as written are not those that were given"
        expected.append(joined[mx.array(blocks.full)].flatten(0, 1))
    usual = encoder.encode([mx.contiguous(expected[0].swapaxes(1, 2)), expected[1]], codings)
    if usual is None:
        return "single vectors are coded by MLX's operations"
    for name, coding, n in zip(("keys", "values"), codings, (0, 3), strict=True):
        own, other = (_read(each[n : n + 3], coding) for each in (found.codes, usual))
        if (difference := disagreement(own, other, _TOLERANCE)) is not None:
            return f"codes of {name}: {difference}"
    return None


@dataclass(frozen=True, slots=True)
class _Span:
    """A random chunk for the check; see `ChunkBlocks.of`."""

    row: int
    count: int
    tail: int
    offset: int

    def blocks(self, tails: mx.array, vectors: mx.array) -> mx.array:
        """Return `[n, heads, 64, dim]`, with zeros after the chunk's end."""
        heads = vectors.shape[1]
        started = tails[self.tail * heads : (self.tail + 1) * heads, : self.offset]
        fresh = vectors[self.row : self.row + self.count].swapaxes(0, 1)
        after = -(self.offset + self.count) % _TOKENS
        joined = mx.pad(mx.concatenate([started, fresh], axis=1), [(0, 0), (0, after), (0, 0)])
        return mx.unflatten(joined, 1, (-1, _TOKENS)).swapaxes(0, 1)


def _read(parts: Sequence[mx.array], coding: VectorCoding) -> mx.array:
    """Decode affine codes."""
    words, scales, biases = parts
    scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
    return mx.dequantize(words, scales, biases, group_size=coding.group_size, bits=coding.bits)


def _normal(shape: tuple[int, ...], dtype: mx.Dtype, seed: int) -> mx.array:
    return (mx.random.normal(shape, key=mx.random.key(seed)) * 3 + 1).astype(dtype)
