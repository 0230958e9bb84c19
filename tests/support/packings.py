"""Packings of weights that CUDA kernels read, beside affine ones."""

from __future__ import annotations

import mlx.core as mx

from quire.attention.paged.portable_kernels import Codes
from quire.device.weights import DECODED_MODES, FP4, FP8, PackedWeight, Packing

MXFP4, NVFP4, MXFP8 = Packing(32, 4, "mxfp4"), Packing(16, 4, "nvfp4"), Packing(32, 8, "mxfp8")
FP8_OF_128, FP8_OF_64 = Packing(128, 8, FP8), Packing(64, 8, FP8)
FP4_OF_16 = Packing(16, 4, FP4)
FLOATS = [MXFP4, NVFP4, MXFP8, FP8_OF_128, FP8_OF_64, FP4_OF_16]
_LARGEST = 448.0
"""The largest number of E4M3."""
_GLOBAL = 3.0
"""Factor by which scales of FP4 differ from those of NVFP4."""
OF_32, BYTES_OF_32 = Packing(32, 4, "affine"), Packing(32, 8, "affine")


def page_codes(key_bits: int, value_bits: int, value_group: int) -> Codes:
    """Return the codes of the page format's blocks of 64 tokens."""
    return Codes(key_bits, 64, value_bits, value_group, by_channel=True, codebook=False)


def packed(matrix: mx.array, packing: Packing) -> PackedWeight:
    """Pack a matrix `[..., out, in]`."""
    if packing.mode in DECODED_MODES:
        return _in_floats(matrix.astype(mx.float32), packing)
    codes, scales, *biases = mx.quantize(
        matrix, group_size=packing.group_size, bits=packing.bits, mode=packing.mode
    )
    return PackedWeight(codes, scales, biases[0] if biases else None, packing)


def _in_floats(matrix: mx.array, packing: Packing) -> PackedWeight:
    if packing.mode == FP8:
        groups = matrix.reshape(*matrix.shape[:-1], -1, packing.group_size)
        scales = mx.maximum(mx.abs(groups).max(axis=-1), 1e-12) / _LARGEST
        codes = mx.to_fp8(groups / scales[..., None]).reshape(matrix.shape)
        return PackedWeight(codes.view(mx.uint32), scales, None, packing)
    words, bytes = mx.quantize(matrix, group_size=16, bits=4, mode="nvfp4")
    scales = (mx.from_fp8(bytes, mx.float32) * _GLOBAL).astype(mx.bfloat16)
    return PackedWeight(words, scales, None, packing)
