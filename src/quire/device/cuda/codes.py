"""Supported packings of weights, and the constants by which kernels of products read them."""

from __future__ import annotations

from collections.abc import Mapping

import mlx.core as mx

from quire.device.weights import FP4, FP8, PackedWeight

SCALES: Mapping[tuple[str, int], tuple[mx.Dtype, tuple[int, ...]]] = {
    ("affine", 4): (mx.bfloat16, (32, 64, 128)),
    ("affine", 8): (mx.bfloat16, (32, 64, 128)),
    ("mxfp4", 4): (mx.uint8, (32,)),
    ("nvfp4", 4): (mx.uint8, (16,)),
    ("mxfp8", 8): (mx.uint8, (32,)),
    (FP8, 8): (mx.float32, (64, 128)),
    (FP4, 4): (mx.bfloat16, (16,)),
}
"""Type and supported group sizes of scales, by the mode and bits of codes."""


def readable(weight: PackedWeight) -> bool:
    """Return whether the kernels read a matrix, or a stack of them."""
    (*_, outputs, words), bits = weight.codes.shape, weight.packing.bits
    return unreadable(weight) is None and fit_tiles(outputs, words * 32 // bits)


def unreadable(weight: PackedWeight) -> str | None:
    """Return what of a matrix's codes the kernels do not read; None if they read all."""
    packing = weight.packing
    known = SCALES.get((packing.mode, packing.bits))
    if known is None or weight.tiled:
        return f"codes of {packing.bits} bits in mode {packing.mode}"
    dtype, groups = known
    if weight.scales.dtype != dtype or packing.group_size not in groups:
        return f"scales of {weight.scales.dtype} in groups of {packing.group_size}"
    return None


def fit_tiles(outputs: int, inputs: int) -> bool:
    """Return whether the kernels' tiles divide a matrix `[outputs, inputs]`."""
    return outputs % 16 == 0 and inputs % 64 == 0


def scale_defines(mode: str) -> dict[str, int]:
    """Return the constants of `common.cuh` for codes of a mode, see `Packing`."""
    return {"FLOATS": int(mode != "affine"), "WIDE_SCALES": {FP8: 1, FP4: 2}.get(mode, 0)}
