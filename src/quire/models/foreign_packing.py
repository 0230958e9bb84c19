"""Weights packed by other libraries, as MLX has them or unpacked.

FP8 with scales (DeepSeek's blocks; a scale a tensor, a row or a group, as compressed-tensors and
ModelOpt write them) is unpacked: MLX has no such packing. Integers become MLX's affine codes.
"""

from __future__ import annotations

import logging
from typing import Any

import mlx.core as mx

from quire.core.errors import ModelError
from quire.models.compressed_tensors import from_compressed
from quire.models.gptq_awq import from_integers

log = logging.getLogger("quire.models")

_BLOCK = (128, 128)
_SCALES = (".weight_scale_inv", ".weight_scale")
# Of activations and caches, which are stored otherwise here.
_SIDE = (".input_scale", ".output_scale", ".k_scale", ".v_scale")


def from_foreign(
    weights: dict[str, mx.array], config: dict[str, Any], dtype: mx.Dtype | None
) -> dict[str, mx.array]:
    """The tensors of a checkpoint without packings of other libraries.

    Args:
        dtype: what is unpacked, is unpacked to it; None is the type of the checkpoint's scales, for
            FP8 bfloat16.

    Raises:
        ModelError: a scale fits no packing that is known here.
    """
    weights = from_compressed(from_integers(weights, config, dtype), config, dtype)
    method: dict[str, Any] = config.get("quantization_config") or {}
    scales = {name for name in weights if name.endswith(_SCALES)}
    if not scales:
        return weights
    ready = {
        name: array
        for name, array in weights.items()
        if name not in scales and not name.endswith(_SIDE)
    }
    unpacked = 0
    for name in sorted(scales):
        path, scale = name.rpartition(".")[0], weights[name]
        codes = ready.get(f"{path}.weight")
        if codes is None or codes.dtype != mx.uint8:
            raise ModelError(f"tensor {name!r} belongs to no packed weight that is known")
        block = method.get("weight_block_size") or _BLOCK
        ready[f"{path}.weight"] = _from_fp8(codes, scale, block).astype(dtype or mx.bfloat16)
        unpacked += 1
    if unpacked:
        log.warning("%d tensors of FP8 are unpacked: MLX multiplies by none", unpacked)
    return ready


def _from_fp8(codes: mx.array, scale: mx.array, block: tuple[int, int]) -> mx.array:
    """The matrix, `[rows, columns]` in float32, of codes in E4M3 and one scale for each part."""
    rows, columns = codes.shape
    if scale.ndim == 2 and scale.shape[0] == rows and columns % scale.shape[1] == 0:
        scale = mx.repeat(scale, columns // scale.shape[1], axis=1)
    elif scale.ndim == 2:
        wide = mx.repeat(mx.repeat(scale, block[0], axis=0), block[1], axis=1)
        scale = wide[:rows, :columns]
    elif scale.size == rows:
        scale = scale.reshape(-1, 1)
    if scale.shape not in ((), (1,), (rows, 1), codes.shape):
        raise ModelError(f"{list(scale.shape)} scales fit no FP8 weight of {list(codes.shape)}")
    return mx.from_fp8(codes, mx.float32) * scale.astype(mx.float32)
