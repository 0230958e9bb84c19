"""Converts NVFP4 weights of NVIDIA's ModelOpt to `FP4`.

E2M1 codes, two per byte, have an E4M3 scale for every 16 (`weight_scale`) and a global factor
(`weight_scale_2`), which MLX's nvfp4 lacks. With AWQ, inputs are multiplied by `pre_quant_scale`;
here the matrix is dequantised, and its columns are. ModelOpt's FP8 is read by `foreign_packing`.

Format: https://github.com/NVIDIA/Model-Optimizer.
"""

from __future__ import annotations

import logging

import mlx.core as mx

from quire.core.errors import ModelError
from quire.device.weights import PackedWeight
from quire.models.weights.small_floats import nvfp4

log = logging.getLogger("quire.models")

_WHOLE = ".weight_scale_2"


def from_modelopt(weights: dict[str, mx.array], dtype: mx.Dtype | None) -> dict[str, mx.array]:
    """Return a checkpoint's tensors with NVFP4 matrices converted.

    Args:
        dtype: dtype of dequantised matrices; None means bfloat16.

    Raises:
        ModelError: a tensor is missing, or shapes do not match.
    """
    paths = sorted(name.removesuffix(_WHOLE) for name in weights if name.endswith(_WHOLE))
    if not paths:
        return weights
    ready = dict(weights)
    unpacked = 0
    for path in paths:
        weight, columns = _matrix(path, ready)
        if columns is None:
            ready |= {f"{path}.weight": weight.codes, f"{path}.scales": weight.scales}
        else:
            unpacked += 1
            matrix = weight.unpacked(mx.float32) * columns
            ready[f"{path}.weight"] = matrix.astype(dtype or mx.bfloat16)
    if unpacked:
        log.warning("%d NVFP4 matrices are unpacked: their columns have factors", unpacked)
    return ready


def _matrix(path: str, tensors: dict[str, mx.array]) -> tuple[PackedWeight, mx.array | None]:
    """Remove a matrix's tensors and return it, `[out, in]` or `[experts, out, in]`, and the factors
    of its columns, float32 `[in]`, if it has any.
    """
    whole = tensors.pop(path + _WHOLE)
    for name in ("weight", "weight_scale"):
        if f"{path}.{name}" not in tensors:
            raise ModelError(f"tensor '{path}.{name}' is missing")
    codes, scales = tensors.pop(f"{path}.weight"), tensors.pop(f"{path}.weight_scale")
    if whole.size != 1 and (codes.ndim == 2 or whole.shape != codes.shape[:1]):
        raise ModelError(
            f"tensor '{path}{_WHOLE}' has shape {list(whole.shape)}, not one number a matrix"
        )
    factor = whole.reshape(-1, *([1] * (codes.ndim - 1))).astype(mx.float32)
    weight = nvfp4(f"{path}.weight", codes, scales, whole=factor)
    inputs = tensors.pop(f"{path}.pre_quant_scale", None)
    if inputs is None:
        return weight, None
    width = 2 * codes.shape[-1]
    if inputs.shape != (width,):
        raise ModelError(
            f"tensor '{path}.pre_quant_scale' has shape {list(inputs.shape)}, the matrix "
            f"{width} columns"
        )
    return weight, inputs.astype(mx.float32)
