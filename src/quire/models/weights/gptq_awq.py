"""Converts integer weights of GPTQ and AWQ libraries to MLX's affine codes.

GPTQ (arXiv:2210.17323; AutoGPTQ, GPTQModel) has words along the inputs, low bits first, and zero
points stored less one unless the format is `gptq_v2`; `g_idx` is the group of each input. AWQ
(arXiv:2306.00978; AutoAWQ's "gemm") has words along the outputs, with interleaved codes. Both mean
`(code - zero) * scale`, where MLX has `code * scale + bias`. The width of a module's codes follows
from its tensors' shapes, not from the configuration (GPTQModel's `dynamic`, AutoRound's
`extra_config`).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from quire.core.errors import ModelError
from quire.models.weights.affine import AffineCodes, pack_words, unpack_words
from quire.models.weights.quantization import auto_round_layout
from quire.models.weights.small_floats import scale_numbers

log = logging.getLogger("quire.models")

_BITS = {"gptq": (2, 3, 4, 8), "awq": (4,)}
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # order of the eight outputs in a word
_PARTS = ("qweight", "qzeros", "scales", "g_idx")
_PLAIN_ZEROS = ("", "exllamav2", "gptqmodel", "triton", "tritonv2")
_FORMATS = {"gptq": ("gptq", "gptq_v2"), "awq": ("gemm",)}


@dataclass(frozen=True)
class Method:
    """A configuration's quantisation method.

    Attributes:
        name: "gptq" or "awq".
        zero_offset: number to add to stored zero points.
    """

    name: str
    zero_offset: int

    @property
    def interleaved(self) -> bool:
        """Whether codes are in AWQ's layout."""
        return self.name == "awq"


def from_integers(
    weights: dict[str, mx.array], config: dict[str, Any], dtype: mx.Dtype | None
) -> dict[str, mx.array]:
    """Return a checkpoint's tensors with GPTQ's and AWQ's codes converted to MLX's.

    Matrices that MLX cannot represent (unordered groups, other group sizes) are dequantised; the
    log says how many.

    Args:
        dtype: dtype of scales and of dequantised matrices; None means that of the checkpoint's
            scales.

    Raises:
        ModelError: a method, format or width is not supported, or a tensor is missing.
    """
    paths = [name.removesuffix(".qweight") for name in weights if name.endswith(".qweight")]
    if not paths:
        return weights
    method = read_method(config)
    ready = dict(weights)
    unpacked = 0
    for path in paths:
        parts = {part: ready.pop(f"{path}.{part}", None) for part in _PARTS}
        words, zeros, scales = (parts[part] for part in _PARTS[:3])
        if words is None or zeros is None or scales is None:
            raise ModelError(f"tensor '{path}.qweight' has no qzeros or no scales")
        if {words.dtype, zeros.dtype} - {mx.int32, mx.uint32}:
            raise ModelError(f"tensor '{path}.qweight' or its qzeros are no words of 32 bits")
        bits = _width(path, zeros, scales, method=method)
        if method.interleaved and words.shape[0] * bits % 32:
            raise ModelError(
                f"tensor '{path}.qweight': {list(words.shape)} words are no packing of whole rows"
            )
        numbers = scale_numbers(f"{path}.scales", scales)
        bias = -_zeros(zeros, method, bits).astype(mx.float32) * numbers  # [G, out]
        codes = AffineCodes(
            _codes(words, method, bits), bits, numbers.T, biases=bias.T, group_of=parts["g_idx"]
        )
        tensors = codes.tensors(path, dtype or scales.dtype)
        ready |= tensors
        unpacked += len(tensors) == 1
    if unpacked:
        log.warning(
            "%d of %d packed matrices are unpacked: MLX has no packing for the order or the size "
            "of their groups",
            unpacked,
            len(paths),
        )
    return ready


def read_method(config: dict[str, Any]) -> Method:
    """Read the quantisation method from `config.json`.

    Raises:
        ModelError: the method or format is not supported.
    """
    layout = auto_round_layout(config)
    if layout is not None:
        return _of_auto_round(layout)
    said = config.get("quantization_config") or {}
    name = said.get("quant_method")
    if name not in _FORMATS:
        raise ModelError(f"config.json: quantization method {name!r} is not supported")
    key = "version" if name == "awq" else "checkpoint_format"
    form = str(said.get(key) or _FORMATS[name][0]).lower()
    if form not in _FORMATS[name]:
        raise ModelError(f"config.json: {name} {key} = {form!r} is not supported")
    return Method(name, 1 if form == "gptq" else 0)


def _of_auto_round(layout: str) -> Method:
    """Return the method for AutoRound's layout names: other libraries' layouts, or its own, which
    is GPTQ's with plain zero points.
    """
    family, _, rest = layout.replace("-", "_").partition(":")
    parts = rest.split(":")
    if {"auto_awq", "awq"} & {family, *parts}:
        return Method("awq", 0)
    if {"auto_gptq", "gptq"} & {family, *parts}:
        return Method("gptq", 1)
    if family in ("auto_round", "autoround") and parts[0] in _PLAIN_ZEROS:
        return Method("gptq", 0)
    raise ModelError(f"config.json: AutoRound's layout {layout!r} is not supported")


def _width(path: str, zeros: mx.array, scales: mx.array, method: Method) -> int:
    """Return the number of bits of a code.

    Raises:
        ModelError: shapes of zero points and scales do not match, or the width is not supported.
    """
    fit = zeros.ndim == 2 == scales.ndim and len(zeros) == len(scales) and scales.shape[1]
    bits, rest = divmod(zeros.shape[1] * 32, scales.shape[1]) if fit else (0, 1)
    if rest or bits not in _BITS[method.name]:
        known = ", ".join(map(str, _BITS[method.name]))
        raise ModelError(
            f"tensor '{path}.qzeros': {list(zeros.shape)} words do not fit {list(scales.shape)} "
            f"scales: {method.name} is read with {known} bits"
        )
    return bits


def _codes(words: mx.array, method: Method, bits: int) -> mx.array:
    """Return MLX's words `[out, in * bits / 32]`."""
    if not method.interleaved:  # the words are equal, only transposed
        return mx.contiguous(words.view(mx.uint32).T)
    return pack_words(mx.contiguous(_in_order(words).T), bits)


def _zeros(words: mx.array, method: Method, bits: int) -> mx.array:
    """Return zero points `[groups, out]`."""
    if method.interleaved:
        return _in_order(words)
    stored = unpack_words(words, bits)
    zeros: mx.array = (stored + method.zero_offset) & (2**bits - 1)
    return zeros


def _in_order(words: mx.array) -> mx.array:
    """Unpack and deinterleave AWQ's words: `[..., n]` -> codes `[..., n * 8]`."""
    codes = mx.unflatten(unpack_words(words, 4), -1, (-1, 8))
    ordered: mx.array = codes[..., mx.array(_AWQ_PLACES)].flatten(-2)
    return ordered
