"""Says how kernels read codes that are floats, and their scales, by MLX's modes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from quire.device.weights import FP4, FP8


class FloatCodes(NamedTuple):
    """The functions of `rows.cuh` that read codes and scales."""

    code: str
    scale: str


FLOAT_CODES: Mapping[str, FloatCodes] = {
    "mxfp4": FloatCodes("e2m1_number", "e8m0_number"),
    "nvfp4": FloatCodes("e2m1_number", "e4m3_number"),
    "mxfp8": FloatCodes("e4m3_number", "e8m0_number"),
    FP8: FloatCodes("e4m3_number", "number"),
    FP4: FloatCodes("e2m1_number", "number"),
}
