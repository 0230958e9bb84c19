"""Converts GGUF's codes to MLX's, or dequantises them.

Blocks of 32 numbers with one scale (`Q4_0` to `Q8_0`), and the parts of 32 of `Q4_K` and `Q5_K`,
equal MLX's affine groups of 32, `code * scale + bias`; their codes are kept. A scale of `Q4_K` is a
float16 times a 6-bit integer, which float32 holds exactly; converting it to the model's dtype
rounds by at most half a unit in the last place. `MXFP4` is MLX's mxfp4. Other types have smaller
groups than MLX supports, or use tables of numbers: they are dequantised.

Layouts: ggml-common.h and ggml-quants.c of https://github.com/ggml-org/ggml.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import mlx.core as mx
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

Parts = dict[str, mx.array]
"""The tensors of a matrix: `weight`, or codes with `scales` and perhaps `biases`."""

_Type = GGMLQuantizationType
FLOATS = {_Type.F32: "F32", _Type.F16: "F16", _Type.BF16: "BF16"}
"""Types that need no conversion, with their names in safetensors."""


def decode(kind: GGMLQuantizationType, rows: mx.array) -> Parts:
    """Convert the bytes of rows, `[..., rows, bytes]`, to a tensor `[..., rows, columns]`.

    Scales are float32. The result is lazy, except for types that only the `gguf` package
    dequantises.
    """
    if kind in FLOATS:
        return {"weight": rows}
    if kind in REPACKED:
        return REPACKED[kind](_blocks(kind, rows))
    if kind is _Type.Q6_K:
        return {"weight": _q6_k(_blocks(kind, rows)).flatten(-3)}
    return {"weight": numbers(kind, rows)}


def numbers(kind: GGMLQuantizationType, rows: mx.array) -> mx.array:
    """Return the numbers that the bytes of rows stand for, in float32."""
    if kind in FLOATS:
        return rows.astype(mx.float32)
    return mx.array(dequantize(np.array(rows), kind).astype(np.float32))


def is_repacked(kind: GGMLQuantizationType) -> bool:
    """Return whether tensors of this type stay quantised."""
    return kind in REPACKED


def _blocks(kind: GGMLQuantizationType, rows: mx.array) -> mx.array:
    """Split rows into blocks: `[..., blocks, bytes of a block]`."""
    _, size = GGML_QUANT_SIZES[kind]
    return mx.unflatten(rows, -1, (-1, size))


def _number(blocks: mx.array, at: int) -> mx.array:
    """Return the float16 at byte `at` of each block, as float32 `[..., blocks, 1]`."""
    return mx.contiguous(blocks[..., at : at + 2]).view(mx.float16).astype(mx.float32)


def _nibbles(codes: mx.array) -> mx.array:
    """Split bytes `[..., n]` into 4-bit codes `[..., 2 n]`: all low halves, then all high ones."""
    return mx.concatenate([codes & 15, codes >> 4], axis=-1)


def _fifth_bits(blocks: mx.array, at: int) -> mx.array:
    """Return the highest bits of 32 codes, from 4 bytes."""
    bits = blocks[..., at : at + 4, None] >> mx.arange(8, dtype=mx.uint8)
    return ((bits & 1) << 4).flatten(-2)


def _packed(codes: mx.array, bits: int) -> mx.array:
    """Pack codes `[..., n]` in uint8 into words, low bits first."""
    if bits == 4:
        codes = codes[..., 0::2] | (codes[..., 1::2] << 4)
    elif bits == 5:
        c = [codes[..., i::8] for i in range(8)]
        stream = [
            c[0] | (c[1] << 5),
            (c[1] >> 3) | (c[2] << 2) | (c[3] << 7),
            (c[3] >> 1) | (c[4] << 4),
            (c[4] >> 4) | (c[5] << 1) | (c[6] << 6),
            (c[6] >> 2) | (c[7] << 3),
        ]
        codes = mx.stack(stream, axis=-1).flatten(-2)
    return mx.contiguous(codes).view(mx.uint32)


def _affine(codes: mx.array, bits: int, scales: mx.array, biases: mx.array) -> Parts:
    """Pack codes `[..., groups, 32]` with scales and biases `[..., groups, 1]` for MLX."""
    words = _packed(codes, bits).flatten(-2)
    return {"weight": words, "scales": scales.squeeze(-1), "biases": biases.squeeze(-1)}


def _q4_0(blocks: mx.array) -> Parts:
    scale = _number(blocks, 0)
    return _affine(_nibbles(blocks[..., 2:]), 4, scale, biases=-8 * scale)


def _q4_1(blocks: mx.array) -> Parts:
    return _affine(_nibbles(blocks[..., 4:]), 4, _number(blocks, 0), biases=_number(blocks, 2))


def _q5_0(blocks: mx.array) -> Parts:
    scale, codes = _number(blocks, 0), _nibbles(blocks[..., 6:]) | _fifth_bits(blocks, 2)
    return _affine(codes, 5, scale, biases=-16 * scale)


def _q5_1(blocks: mx.array) -> Parts:
    codes = _nibbles(blocks[..., 8:]) | _fifth_bits(blocks, 4)
    return _affine(codes, 5, _number(blocks, 0), biases=_number(blocks, 2))


def _q8_0(blocks: mx.array) -> Parts:
    scale = _number(blocks, 0)
    return _affine(blocks[..., 2:] ^ 128, 8, scale, biases=-128 * scale)  # signed, plus 128


def _k_scales(blocks: mx.array) -> tuple[mx.array, mx.array]:
    """Return scales and biases of the parts of 32, `[..., 8 * blocks, 1]`, from 16 numbers of 6
    bits.
    """
    first, second, third = (blocks[..., at : at + 4] for at in (4, 8, 12))
    scales = mx.concatenate([first & 63, (third & 15) | ((first >> 6) << 4)], axis=-1)
    least = mx.concatenate([second & 63, (third >> 4) | ((second >> 6) << 4)], axis=-1)
    scales = scales.astype(mx.float32) * _number(blocks, 0)
    biases = least.astype(mx.float32) * -_number(blocks, 2)
    return scales.flatten(-2)[..., None], biases.flatten(-2)[..., None]


def _k_nibbles(blocks: mx.array) -> mx.array:
    """Return the low 4 bits of codes, `[..., blocks, 8, 32]`."""
    quarters = mx.unflatten(blocks[..., -128:], -1, (4, 32))
    return mx.stack([quarters & 15, quarters >> 4], axis=-2).flatten(-3, -2)


def _q4_k(blocks: mx.array) -> Parts:
    return _affine(_k_nibbles(blocks).flatten(-3, -2), 4, *_k_scales(blocks))


def _q5_k(blocks: mx.array) -> Parts:
    bits = (blocks[..., None, 16:48] >> mx.arange(8, dtype=mx.uint8)[:, None]) & 1
    codes = _k_nibbles(blocks) | (bits << 4)
    return _affine(codes.flatten(-3, -2), 5, *_k_scales(blocks))


def _q6_k(blocks: mx.array) -> mx.array:
    """Return dequantised numbers `[..., blocks, 16, 16]`: 6-bit codes less 32, times a signed scale
    per 16.
    """
    low = mx.unflatten(blocks[..., :128], -1, (2, 64))
    high = mx.unflatten(blocks[..., 128:192], -1, (2, 1, 32))
    high = (high >> mx.arange(0, 8, 2, dtype=mx.uint8)[:, None]) & 3  # [..., 2, 4, 32]
    codes = mx.unflatten(_nibbles(low), -1, (4, 32)) | (high << 4)
    scales = mx.contiguous(blocks[..., 192:208]).view(mx.int8) * _number(blocks, 208)
    signed: mx.array = mx.unflatten(codes.flatten(-3).astype(mx.float32) - 32, -1, (16, 16))
    return signed * scales[..., None]


def _mxfp4(blocks: mx.array) -> Parts:
    words = _packed(_nibbles(blocks[..., 1:]), 4).flatten(-2)
    return {"weight": words, "scales": mx.contiguous(blocks[..., 0])}


REPACKED: Mapping[GGMLQuantizationType, Callable[[mx.array], Parts]] = {
    _Type.Q4_0: _q4_0,
    _Type.Q4_1: _q4_1,
    _Type.Q5_0: _q5_0,
    _Type.Q5_1: _q5_1,
    _Type.Q8_0: _q8_0,
    _Type.Q4_K: _q4_k,
    _Type.Q5_K: _q5_k,
    _Type.MXFP4: _mxfp4,
}
