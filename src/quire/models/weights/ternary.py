"""Converts BitNet's matrices of -1, 0 and 1 (arXiv:2402.17764) to MLX's codes of two bits."""

from __future__ import annotations

import re
from typing import Any

import mlx.core as mx

from quire.core.errors import ModelError
from quire.core.values import Values
from quire.models.weights.affine import AffineCodes, pack_words
from quire.models.weights.quantization import foreign_method
from quire.models.weights.small_floats import scale_numbers

BITNET = "bitnet"
_MATRIX = re.compile(r".*\blayers\.\d+\..*_proj\.weight")
_SMALLEST = 1e-5  # of a matrix's mean


def from_ternary(
    weights: dict[str, mx.array], config: dict[str, Any], dtype: mx.Dtype | None
) -> dict[str, mx.array]:
    """Return a checkpoint's tensors with ternary matrices as MLX's codes.

    Packed bytes hold codes of four rows, a quarter of the rows apart. Trained matrices, which are
    rounded when they are used ("online"), are rounded here.

    Args:
        dtype: dtype of scales; None means that of the checkpoint's.

    Raises:
        ModelError: a packed matrix has no scale, or the number of inputs is no multiple of 16.
    """
    if foreign_method(config) != BITNET:
        return weights
    said = Values(config).nested("quantization_config")
    said.only("use_rms_norm", False)
    factor = said.word("linear_class", default="bitlinear") == "autobitlinear"
    ready = dict(weights)
    for name in filter(_MATRIX.fullmatch, weights):
        path, array = name.removesuffix(".weight"), ready.pop(name)
        scale = ready.pop(f"{path}.weight_scale", None)
        if array.shape[-1] % 16:
            raise ModelError(f"tensor {name!r}: {array.shape[-1]} inputs are no multiple of 16")
        if array.dtype == mx.uint8:
            if scale is None:
                raise ModelError(f"tensor {name!r} is packed and has no scale")
            number = scale_numbers(f"{path}.weight_scale", scale).reshape(1, 1)
            number = number if factor else 1 / number
            codes = mx.concatenate([array >> 2 * quarter & 3 for quarter in range(4)])
            own = scale.dtype
        elif scale is None:
            wide = array.astype(mx.float32)
            number = mx.maximum(mx.abs(wide).mean(), _SMALLEST).reshape(1, 1)
            codes, own = mx.clip(mx.round(wide / number), -1, 1) + 1, array.dtype
        else:
            raise ModelError(f"tensor {name!r} is not packed, but has a scale")
        numbers = mx.broadcast_to(number, (len(codes), 1))
        words = pack_words(codes.astype(mx.uint32), 2)
        ready |= AffineCodes(words, 2, numbers, biases=-numbers).tensors(path, dtype or own)
    return ready
