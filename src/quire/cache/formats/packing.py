"""Integer codes in the layout of `mx.quantize`, and affine coding with scales of our own choice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import mlx.core as mx
import numpy as np

from quire.device.coding import VectorCoding, VectorRotation
from quire.device.device import current_device, fused

SCALE = mx.float16
"""Type of scales and biases. bfloat16 has a third more error at 8 bits and saves nothing."""

F16_MAX = 65504.0
"""Largest finite float16."""
_LOADING = {2: 1.494, 3: 2.051}
"""By bits, half the quantiser's range in standard deviations that suits a Gaussian (Max, 1960).
From 4 bits on, the range of the 64 elements themselves is used, which is about as good.
"""

_REFITS = 2
"""Rounds of least squares over a group's codes, which refit its scale and bias."""


@dataclass(frozen=True, slots=True)
class Affine:
    """The layout of affine codes."""

    group_size: int
    bits: int

    def decode(self, parts: list[mx.array]) -> mx.array:
        """Return the coded numbers, float32."""
        codes, scales, biases = parts
        scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
        if current_device().dequantizes_fast:
            return mx.dequantize(codes, scales, biases, group_size=self.group_size, bits=self.bits)
        words = codes if self.bits == 8 else spread(codes, self.bits)
        grouped = words.view(mx.uint8).reshape(*scales.shape, self.group_size)
        numbers = grouped.astype(mx.float32) * scales[..., None] + biases[..., None]
        return numbers.reshape(*codes.shape[:-1], -1)

    def product(self, x: mx.array, parts: list[mx.array], *, transpose: bool) -> mx.array:
        """Return x times the coded matrix, or its transpose, directly from the codes."""
        codes, scales, biases = parts
        codes, bits = (codes, self.bits) if transpose else _quick(codes, self.bits)
        return mx.quantized_matmul(
            x,
            codes,
            scales,
            biases,
            transpose=transpose,
            group_size=self.group_size,
            bits=bits,
        )


def multiplies_codes(rows: int) -> bool:
    """Return whether so many rows should be multiplied by codes, or by decoded numbers."""
    return rows <= current_device().code_rows


def affine_parts(n: int, layout: Affine) -> list[tuple[int, mx.Dtype]]:
    """Return (elements, type) of the codes, scales and biases of n numbers."""
    groups = n // layout.group_size
    return [(n * layout.bits // 32, mx.uint32), (groups, SCALE), (groups, SCALE)]


def pack(codes: mx.array, bits: int) -> mx.array:
    """Pack codes `[..., n]` below `2**bits`, 32 divides n: uint32 `[..., n * bits / 32]`."""
    *lead, n = codes.shape
    eights = codes.reshape(*lead, n // 8, 8).astype(mx.uint64)
    return joined(eights << shifts(bits), bits)


def joined(shifted: mx.array, bits: int) -> mx.array:
    """Join codes that are shifted into place, uint64 `[..., n / 8, 8]`, as `pack` does."""
    *lead, eighths, _ = shifted.shape
    words = mx.sum(shifted, axis=-1, keepdims=True)
    # Eight codes of b bits are b bytes, lowest bits first.
    used = words.view(mx.uint8)[..., :bits]
    return mx.contiguous(used.reshape(*lead, eighths * bits)).view(mx.uint32)


@cache
def shifts(bits: int) -> mx.array:
    """Return the bit positions of eight adjacent codes in a word, `[8]`."""
    return mx.array(np.arange(8, dtype=np.uint64) * bits)


_LOOKED_UP = {2: 4, 3: 4, 4: 2}
"""Number of codes per table lookup, by bits; tables have 256 or 4,096 entries."""


def byte_table(values: Sequence[int]) -> mx.array:
    """Build the table for `as_bytes`: one entry for each run of a few codes."""
    bits = (len(values) - 1).bit_length()
    count = _LOOKED_UP[bits]
    runs = np.arange(2 ** (bits * count), dtype=np.uint32)
    table = np.zeros_like(runs)
    for place in range(count):
        codes = runs >> np.uint32(bits * place) & np.uint32(2**bits - 1)
        table |= (np.array(values)[codes] & 255).astype(np.uint32) << np.uint32(8 * place)
    return mx.array(table.astype(np.uint16) if count == 2 else table)


def as_bytes(words: mx.array, bits: int, table: mx.array) -> mx.array:
    """Return codes of 2 to 4 bits, `[..., n * bits / 32]`, as bytes by a table, `[..., n / 4]`."""
    some = words.view(mx.uint8)
    if bits == 3:
        # Eight codes are three bytes; padded to a word, two runs of four.
        padded = mx.pad(some.reshape(-1, 3), [(0, 0), (0, 1)]).view(mx.uint32)
        some = padded >> mx.array([0, 12], dtype=mx.uint32) & 4095
    # Not `table[some]`: gathering takes ten times as long on a CPU.
    read = mx.take_along_axis(table, some.reshape(-1), axis=0)
    return read.view(mx.uint32).reshape(*words.shape[:-1], -1)


def spread(words: mx.array, bits: int) -> mx.array:
    """Return the codes of 2 to 6 bits, `[..., n * bits / 32]`, as bytes, `[..., n / 4]`."""
    eights = words.view(mx.uint8).reshape(-1, bits)
    padded = mx.pad(eights, [(0, 0), (0, 8 - bits)]).view(mx.uint64)
    return _spreader(bits)(padded).view(mx.uint32).reshape(*words.shape[:-1], -1)


@cache
def _spreader(bits: int) -> Callable[[mx.array], mx.array]:
    """Return a function that moves eight adjacent codes to the bytes of a word, half of each part
    at a time.
    """
    steps = []
    for size in (32, 16, 8):
        used = size // 8 * bits
        low = sum((1 << used) - 1 << start for start in range(0, 64, 2 * size))
        steps.append([mx.array(n, dtype=mx.uint64) for n in (low, low << used, size - used)])

    def move(x: mx.array) -> mx.array:
        for low, high, by in steps:
            x = (x & low) | ((x & high) << by)
        return x

    return current_device().fused(move)


def _quick(words: mx.array, bits: int) -> tuple[mx.array, int]:
    """Return the codes in a width that MLX reads fast, and this width in bits."""
    if bits not in current_device().slow_code_bits:
        return words, bits
    return spread(words, bits), 8


def affine_coding(
    size: int, layout: Affine, *, refit: bool, rotation: VectorRotation | None = None
) -> VectorCoding:
    """Return how a kernel computes `affine` of vectors of `size` elements."""
    reach = _LOADING.get(layout.bits, 0.0) if refit else 0.0
    refits = _REFITS if refit else 0
    return VectorCoding(
        size, layout.bits, layout.group_size, rotation=rotation, reach=reach, refits=refits
    )


def affine(x: mx.array, layout: Affine, *, refit: bool) -> tuple[mx.array, mx.array, mx.array]:
    """Return affine codes along the last axis, as `mx.dequantize` and `mx.quantized_matmul` read
    them.

    Args:
        x: `[..., n]`, n a multiple of the group size.
        refit: choose scale and bias by least squares over the codes, twice, not by the range.

    Returns:
        uint32 codes `[..., n * bits / 32]`, float16 scales and biases `[..., n / group_size]`.
    """
    *lead, n = x.shape
    group_size, bits = layout.group_size, layout.bits
    grouped = x.astype(mx.float32).reshape(*lead, n // group_size, group_size)
    low, high = grouped.min(axis=-1, keepdims=True), grouped.max(axis=-1, keepdims=True)
    if refit and bits in _LOADING:
        mean = grouped.mean(axis=-1, keepdims=True)
        reach = _LOADING[bits] * mx.sqrt(grouped.var(axis=-1, keepdims=True))
        low, high = mx.maximum(low, mean - reach), mx.minimum(high, mean + reach)
    top = mx.array(2**bits - 1, dtype=mx.float32)
    scale, bias = _grid(low, high, top)
    codes = _round(grouped, scale, bias=bias, top=top)
    for _ in range(_REFITS if refit else 0):
        scale, bias = _fit(grouped, codes, scale=scale, bias=bias)
        codes = _round(grouped, scale, bias=bias, top=top)
    words = pack(codes.reshape(*lead, n), bits)
    return words, scale[..., 0].astype(SCALE), bias[..., 0].astype(SCALE)


def _stored(x: mx.array) -> mx.array:
    """Return a number rounded as it will be stored, so that codes are chosen for the stored
    scale.
    """
    return mx.clip(x, -F16_MAX, F16_MAX).astype(SCALE).astype(mx.float32)


@fused
def _grid(low: mx.array, high: mx.array, top: mx.array) -> tuple[mx.array, mx.array]:
    """Return the scale and bias of codes 0 to `top` from `low` to `high`."""
    return _stored((high - low) / top), _stored(low)


@fused
def _round(x: mx.array, scale: mx.array, bias: mx.array, top: mx.array) -> mx.array:
    inverse = mx.where(scale == 0, 0.0, 1.0 / scale)
    return mx.clip(mx.round((x - bias) * inverse), 0, top)


def _fit(
    x: mx.array, codes: mx.array, scale: mx.array, bias: mx.array
) -> tuple[mx.array, mx.array]:
    """Return the scale and bias that read these codes with the least squared error."""
    centred = codes - codes.mean(axis=-1, keepdims=True)
    spread = (centred * centred).sum(axis=-1, keepdims=True)
    fitted = (centred * x).sum(axis=-1, keepdims=True) / mx.maximum(spread, 0.25)
    better = _stored(mx.where(spread == 0, scale, fitted))
    offset = x.mean(axis=-1, keepdims=True) - better * codes.mean(axis=-1, keepdims=True)
    return better, _stored(mx.where(spread == 0, bias, offset))
