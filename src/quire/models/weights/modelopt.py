"""Dequantises NVFP4 weights of NVIDIA's ModelOpt.

E2M1 codes, two per byte, have an E4M3 scale for every 16 (`weight_scale`) and a global factor
(`weight_scale_2`), which MLX's nvfp4 lacks. With AWQ, inputs are multiplied by `pre_quant_scale`;
here the matrix's columns are. ModelOpt's FP8 is read by `foreign_packing`.

Format: https://github.com/NVIDIA/Model-Optimizer.
"""

from __future__ import annotations

import logging

import mlx.core as mx

from quire.core.errors import ModelError
from quire.models.weights.small_floats import nvfp4

log = logging.getLogger("quire.models")

_WHOLE = ".weight_scale_2"


def from_modelopt(weights: dict[str, mx.array], dtype: mx.Dtype | None) -> dict[str, mx.array]:
    """Return a checkpoint's tensors with NVFP4 matrices dequantised.

    Args:
        dtype: dtype of these matrices; None means bfloat16.

    Raises:
        ModelError: a tensor is missing, or shapes do not match.
    """
    paths = sorted(name.removesuffix(_WHOLE) for name in weights if name.endswith(_WHOLE))
    if not paths:
        return weights
    ready = dict(weights)
    for path in paths:
        ready[f"{path}.weight"] = _matrix(path, ready).astype(dtype or mx.bfloat16)
    log.warning("%d NVFP4 matrices are unpacked: MLX's format lacks a global scale", len(paths))
    return ready


def _matrix(path: str, tensors: dict[str, mx.array]) -> mx.array:
    """Remove a matrix's tensors and return it in float32: `[out, in]` or `[experts, out, in]`."""
    whole = tensors.pop(path + _WHOLE)
    for name in ("weight", "weight_scale"):
        if f"{path}.{name}" not in tensors:
            raise ModelError(f"tensor '{path}.{name}' is missing")
    codes, scales = tensors.pop(f"{path}.weight"), tensors.pop(f"{path}.weight_scale")
    matrix = nvfp4(f"{path}.weight", codes, scales)
    if whole.size != 1 and (codes.ndim == 2 or whole.shape != codes.shape[:1]):
        raise ModelError(
            f"tensor '{path}{_WHOLE}' has shape {list(whole.shape)}, not one number a matrix"
        )
    matrix *= whole.reshape(-1, *([1] * (codes.ndim - 1))).astype(mx.float32)
    inputs = tensors.pop(f"{path}.pre_quant_scale", None)
    if inputs is None:
        return matrix
    if inputs.shape != matrix.shape[-1:]:
        raise ModelError(
            f"tensor '{path}.pre_quant_scale' has shape {list(inputs.shape)}, the matrix "
            f"{matrix.shape[-1]} columns"
        )
    return matrix * inputs.astype(mx.float32)
