"""Packings of weights that CUDA kernels read, beside affine ones."""

from __future__ import annotations

import mlx.core as mx

from quire.device.weights import PackedWeight, Packing

MXFP4, NVFP4, MXFP8 = Packing(32, 4, "mxfp4"), Packing(16, 4, "nvfp4"), Packing(32, 8, "mxfp8")
FLOATS = [MXFP4, NVFP4, MXFP8]
OF_32, BYTES_OF_32 = Packing(32, 4, "affine"), Packing(32, 8, "affine")


def packed(matrix: mx.array, packing: Packing) -> PackedWeight:
    """Pack a matrix `[..., out, in]`."""
    codes, scales, *biases = mx.quantize(
        matrix, group_size=packing.group_size, bits=packing.bits, mode=packing.mode
    )
    return PackedWeight(codes, scales, biases[0] if biases else None, packing)
