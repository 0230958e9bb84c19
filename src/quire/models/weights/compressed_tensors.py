"""Converts weights of compressed-tensors (llm-compressor, vLLM) to MLX's codes.

Integers, with or without zero points, in words (`pack-quantized`) or bytes (`int-quantized`), mean
`(code - zero) * scale`, which is MLX's `code * scale + bias`. `mxfp4-pack-quantized` is MLX's
mxfp4; `nvfp4-pack-quantized`, with one more scale per matrix, becomes `FP4`. FP8 is read by
`foreign_packing`. Settings of activations are ignored: here activations are not quantised.

Format: https://github.com/vllm-project/compressed-tensors.
"""

from __future__ import annotations

import logging
from typing import Any

import mlx.core as mx

from quire.core.errors import ModelError
from quire.models.weights.affine import AffineCodes, unpack_words
from quire.models.weights.quantization import auto_round_layout
from quire.models.weights.small_floats import nvfp4, scale_numbers, small_float_words

log = logging.getLogger("quire.models")

_FORMATS = (
    "dense",
    "float-quantized",
    "int-quantized",
    "mixed-precision",
    "mxfp4-pack-quantized",
    "mxfp8-quantized",
    "naive-quantized",
    "nvfp4-pack-quantized",
    "pack-quantized",
)
_SIDE = (
    "input_global_scale",
    "input_scale",
    "input_zero_point",
    "output_zero_point",
)
_MOST_BITS = 8
_OF_AUTO_ROUND = "auto_round:llm_compressor"


def from_compressed(
    weights: dict[str, mx.array], config: dict[str, Any], dtype: mx.Dtype | None
) -> dict[str, mx.array]:
    """Return the tensors with this library's codes converted, except FP8 with its scales.

    Args:
        dtype: dtype of scales and of dequantised matrices; None means that of the checkpoint's
            scales.

    Raises:
        ModelError: a format or width is not supported, or a tensor is missing.
    """
    said: dict[str, Any] = (
        config.get("quantization_config") or config.get("compression_config") or {}
    )
    layout = auto_round_layout(config)
    if said.get("quant_method") != "compressed-tensors" and layout != _OF_AUTO_ROUND:
        return weights
    if (form := said.get("format", _FORMATS[-1])) not in _FORMATS:
        known = ", ".join(_FORMATS)
        raise ModelError(
            f"config.json: compressed-tensors format {form!r} is not supported (known: {known})"
        )
    ready = {name: array for name, array in weights.items() if name.rpartition(".")[2] not in _SIDE}
    unpacked = whole = 0
    for path in sorted(name.rpartition(".")[0] for name in weights if _holds_codes(name, weights)):
        matrix = _Matrix(path, ready)
        tensors = matrix.tensors(dtype)
        ready |= tensors
        unpacked += len(tensors) == 1
        whole += 1
    if unpacked:
        log.warning(
            "%d of %d packed matrices are unpacked: MLX has no packing for their groups or scales",
            unpacked,
            whole,
        )
    return ready


def _holds_codes(name: str, weights: dict[str, mx.array]) -> bool:
    if name.endswith(".weight"):
        return weights[name].dtype == mx.int8
    return name.endswith(".weight_packed")


class _Matrix:
    """The tensors of one matrix, removed from a checkpoint's."""

    def __init__(self, path: str, tensors: dict[str, mx.array]) -> None:
        self._path = path
        self._codes = self._taken(tensors, "weight_packed")
        self._bytes = self._taken(tensors, "weight") if self._codes is None else None
        self._scale = self._taken(tensors, "weight_scale")
        self._zero = self._taken(tensors, "weight_zero_point")
        self._group_of = self._taken(tensors, "weight_g_idx")
        self._shape = self._taken(tensors, "weight_shape")
        self._whole_scale = self._taken(tensors, "weight_global_scale")

    def _taken(self, tensors: dict[str, mx.array], name: str) -> mx.array | None:
        return tensors.pop(f"{self._path}.{name}", None)

    def tensors(self, dtype: mx.Dtype | None) -> dict[str, mx.array]:
        """Return the tensors in MLX's form.

        Raises:
            ModelError: a tensor is missing, or shapes do not match.
        """
        if self._scale is None:
            raise ModelError(f"tensor '{self._path}.weight_scale' is missing")
        if self._codes is not None and self._codes.dtype == mx.uint8:
            return self._floats(self._codes, self._scale, dtype)
        words, bits = self._words()
        numbers = scale_numbers(f"{self._path}.weight_scale", self._scale)
        kept = self._scale.dtype if mx.issubdtype(self._scale.dtype, mx.floating) else mx.bfloat16
        scales = numbers.reshape(-1, 1) if numbers.ndim < 2 else numbers
        scales = mx.broadcast_to(scales, (words.shape[0], scales.shape[-1]))
        zeros = self._zeros(bits, words.shape[0])
        if zeros.shape not in ((), (1, 1), (words.shape[0], 1), scales.shape):
            raise ModelError(
                f"tensor '{self._path}.weight_zero_point': {list(zeros.shape)} zero points do not "
                f"fit {list(scales.shape)} scales"
            )
        biases = -zeros * scales
        codes = AffineCodes(words, bits, scales, biases=biases, group_of=self._group_of)
        return codes.tensors(self._path, dtype or kept)

    def _words(self) -> tuple[mx.array, int]:
        """Return the unsigned codes, and their width."""
        if self._codes is None:
            assert self._bytes is not None
            unsigned = self._bytes.view(mx.uint8) ^ 128
            return mx.contiguous(unsigned).view(mx.uint32), 8
        if self._shape is None:
            raise ModelError(f"tensor '{self._path}.weight_shape' is missing")
        columns: Any = self._shape[-1].item()
        words = self._codes.view(mx.uint32)
        bits, rest = divmod(words.shape[-1] * 32, int(columns))
        if rest or not 0 < bits <= _MOST_BITS:
            raise ModelError(
                f"tensor '{self._path}.weight_packed': {words.shape[-1]} words a row are no "
                f"packing of {columns} columns that is known"
            )
        return words, bits

    def _zeros(self, bits: int, rows: int) -> mx.array:
        """Return the zero points of unsigned codes: `[rows, groups]`, or one for all."""
        half = 2.0 ** (bits - 1)
        if self._zero is None:
            return mx.array(half)
        if self._zero.dtype != mx.int32:  # not packed
            signed = self._zero.astype(mx.float32)
            return half + (signed.reshape(-1, 1) if signed.ndim < 2 else signed)
        packed = mx.contiguous(self._zero.T)  # packed along the rows
        return unpack_words(packed, bits)[:, :rows].T.astype(mx.float32)

    def _floats(
        self, codes: mx.array, scales: mx.array, dtype: mx.Dtype | None
    ) -> dict[str, mx.array]:
        """Return the tensors of E2M1 codes, two per byte: MXFP4 in groups of 32, or NVFP4 in groups
        of 16 with a global scale.
        """
        name, whole = f"{self._path}.weight_packed", self._whole_scale
        if whole is None:
            lack = " without a weight_global_scale"
            words = small_float_words(name, codes, scales, group=32, lack=lack)
            return {f"{self._path}.weight": words, f"{self._path}.scales": scales}
        if whole.size != 1:
            raise ModelError(
                f"tensor '{self._path}.weight_global_scale' has shape {list(whole.shape)}, "
                "not one number"
            )
        divisor = scale_numbers(f"{self._path}.weight_global_scale", whole).reshape(())
        weight = nvfp4(name, codes, scales, whole=1 / divisor)
        return {f"{self._path}.weight": weight.codes, f"{self._path}.scales": weight.scales}
