"""Integers as GPTQ and AWQ libraries write them, as MLX's affine codes of the same numbers.

GPTQ (arXiv:2210.17323; AutoGPTQ, GPTQModel): words along the inputs, low bits first, zero points
stored less one unless the format is `gptq_v2`; `g_idx` is the group of each input. AWQ
(arXiv:2306.00978; AutoAWQ's "gemm"): words along the outputs, whose codes are interleaved. Both
stand for `(code - zero) * scale`, where MLX has `code * scale + bias`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from quire.core.errors import ModelError
from quire.models.affine import AffineCodes, pack_words, unpack_words

log = logging.getLogger("quire.models")

_BITS = (2, 4, 8)
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # of eight outputs in a word
_PARTS = ("qweight", "qzeros", "scales", "g_idx")
_FORMATS = {"gptq": ("gptq", "gptq_v2"), "awq": ("gemm",)}


@dataclass(frozen=True)
class Method:
    """What the configuration says of the packing.

    Attributes:
        interleaved: AWQ's layout, else GPTQ's.
        zero_offset: added to stored zero points.
    """

    bits: int
    interleaved: bool
    zero_offset: int


def from_integers(
    weights: dict[str, mx.array], config: dict[str, Any], dtype: mx.Dtype | None
) -> dict[str, mx.array]:
    """The tensors of a checkpoint with MLX's codes in the place of GPTQ's and AWQ's.

    Matrices that MLX's packing cannot hold (inputs out of the order of their groups, groups of
    other sizes) are unpacked; the log says how many.

    Args:
        dtype: of scales and of what is unpacked; None is the type of the checkpoint's scales.

    Raises:
        ModelError: a method, format or width that is not known, or a tensor is missing.
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
        if method.interleaved and words.shape[0] * method.bits % 32:
            raise ModelError(
                f"tensor '{path}.qweight': {list(words.shape)} words are no packing of whole rows"
            )
        zero_points = _zeros(zeros, method)  # [G, out]
        if zero_points.shape != scales.shape:
            raise ModelError(
                f"tensor '{path}.qzeros': {list(zero_points.shape)} zero points of {method.bits} "
                f"bits do not fit {list(scales.shape)} scales"
            )
        bias = -zero_points.astype(mx.float32) * scales.astype(mx.float32)
        codes = AffineCodes(
            _codes(words, method), method.bits, scales.T, bias.T, group_of=parts["g_idx"]
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
    """What `config.json` says of the packing.

    Raises:
        ModelError: a method, format or width that is not known.
    """
    said = config.get("quantization_config") or {}
    name = said.get("quant_method")
    if name == "auto-round":  # writes either layout, and says which
        name = str(said.get("packing_format", "")).rpartition("auto_")[2]
    if name not in _FORMATS:
        raise ModelError(f"config.json: quantization method {name!r} is not supported")
    key = "version" if name == "awq" else "checkpoint_format"
    form = str(said.get(key) or _FORMATS[name][0]).lower()
    if form not in _FORMATS[name]:
        raise ModelError(f"config.json: {name} {key} = {form!r} is not supported")
    bits: Any = said.get("bits", said.get("w_bit"))
    if bits not in (_BITS if name == "gptq" else (4,)):
        raise ModelError(f"config.json: {name} with bits = {bits!r} is not supported")
    return Method(bits, name == "awq", 1 if form == "gptq" else 0)


def _codes(words: mx.array, method: Method) -> mx.array:
    """MLX's words `[out, in * bits / 32]`."""
    if not method.interleaved:  # the same words: only the axes differ
        return mx.contiguous(words.view(mx.uint32).T)
    return pack_words(mx.contiguous(_in_order(words).T), method.bits)


def _zeros(words: mx.array, method: Method) -> mx.array:
    """Zero points `[groups, out]`."""
    if method.interleaved:
        return _in_order(words)
    stored = unpack_words(words, method.bits)
    zeros: mx.array = (stored + method.zero_offset) & (2**method.bits - 1)
    return zeros


def _in_order(words: mx.array) -> mx.array:
    """AWQ's codes `[..., n * 8]` of words `[..., n]`."""
    codes = mx.unflatten(unpack_words(words, 4), -1, (-1, 8))
    ordered: mx.array = codes[..., mx.array(_AWQ_PLACES)].flatten(-2)
    return ordered
