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
    packing, (*_, outputs, words) = weight.packing, weight.codes.shape
    known = SCALES.get((packing.mode, packing.bits))
    if known is None or weight.tiled:
        return False
    dtype, groups = known
    if weight.scales.dtype != dtype or packing.group_size not in groups:
        return False
    return outputs % 16 == 0 and words * 32 // packing.bits % 64 == 0


def scale_defines(mode: str) -> dict[str, int]:
    """Return the constants of `common.cuh` for codes of a mode, see `Packing`."""
    return {"FLOATS": int(mode != "affine"), "WIDE_SCALES": {FP8: 1, FP4: 2}.get(mode, 0)}
