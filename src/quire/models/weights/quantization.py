"""Quantised weights as MLX stores them: codes in `weight`, with `scales` and perhaps `biases`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from quire.core.errors import ModelError
from quire.core.values import Values
from quire.device.weights import FP4, FP8, PackedWeight, Packing
from quire.models.base import named_layers
from quire.models.layers.linear import packed_layer, packing_of

_FLOAT_MODES = {(4, 32): "mxfp4", (4, 16): "nvfp4", (8, 32): "mxfp8"}
_AFFINE_BITS = (2, 3, 4, 5, 6, 8)
_AFFINE_GROUPS = (32, 64, 128)
FP8_GROUPS = (128, 64, 32)
"""Columns of a row that may share a scale of FP8 codes; the most first."""
_FOREIGN_TYPES = ("F8_E5M2", "I8")
AUTO_ROUND = ("auto-round", "intel/auto-round")
"""Names of the AutoRound library in configurations."""
_LARGEST_SCALE = 65
"""Largest exponent of a power of two that scales a group: kernels compute with no larger ones."""
_MODES = ("affine", "mxfp4", "mxfp8", "nvfp4")


def check_config(config: dict[str, Any]) -> None:
    """Refuse quantisation modes that this MLX lacks, and entries that are not objects.

    Raises:
        ModelError: there is such a mode or entry; the message names it.
    """
    said = Values(config)
    for name in ("quantization", "quantization_config", "compression_config"):
        said.nested(name, needed=False)
    packing = said.nested("quantization", needed=False)
    packing.integer("bits", default=4)
    mode = packing.value("mode", "affine")
    if mode not in _MODES:
        known = ", ".join(_MODES)
        raise ModelError(f"config.json: quantization mode {mode!r} is not supported ({known})")


def foreign_method(config: dict[str, Any]) -> str | None:
    """Return the name of another library's quantisation (GPTQ, HQQ, ...) in the configuration; None
    for none.
    """
    method = (config.get("quantization_config") or {}).get("quant_method")
    return None if method is None else str(method)


def auto_round_layout(config: dict[str, Any]) -> str | None:
    """Return AutoRound's tensor layout, such as "auto_round:auto_gptq".

    Return None for other libraries' files. Files before version 0.5 name a kernel ("backend"),
    which implies the layout.
    """
    if foreign_method(config) not in AUTO_ROUND:
        return None
    said = Values(config).nested("quantization_config")
    return said.word("packing_format", "backend", default="auto_round:auto_gptq")


def packed_otherwise(header: dict[str, Any], method: str | None) -> bool:
    """Return whether a safetensors header lists tensors of unsupported types.

    Args:
        method: see `foreign_method`.
    """
    types = {entry["dtype"] for name, entry in header.items() if name != "__metadata__"}
    if method == "compressed-tensors":
        types.discard("I8")
    return not types.isdisjoint(_FOREIGN_TYPES)


def unpacked(weights: dict[str, mx.array], path: str, width: int) -> mx.array:
    """Remove the tensors of one matrix of `width` columns from `weights`, and return it
    dequantised.
    """
    codes, scales = weights[f"{path}.weight"], weights.get(f"{path}.scales")
    packing = None if scales is None else _packing(path, width, weights, scales=scales)
    del weights[f"{path}.weight"]
    if scales is None or packing is None:
        return codes
    del weights[f"{path}.scales"]
    biases = weights.pop(f"{path}.biases", None)
    dtype = float_type(weights) if biases is None else scales.dtype
    return PackedWeight(codes, scales, biases, packing=packing).unpacked(dtype)


def float_type(weights: Mapping[str, mx.array]) -> mx.Dtype:
    """Return the type of most numbers of a checkpoint that are no codes."""
    sizes: Counter[mx.Dtype] = Counter()
    for name, array in weights.items():
        if mx.issubdtype(array.dtype, mx.floating) and not name.endswith((".scales", ".biases")):
            sizes[array.dtype] += array.size
    return max(sizes, key=lambda dtype: sizes[dtype], default=mx.bfloat16)


def has_float_codes(weights: Mapping[str, mx.array], path: str) -> bool:
    """Return whether a module's matrix is in codes of `DECODED_MODES`."""
    codes, scales = weights.get(f"{path}.weight"), weights.get(f"{path}.scales")
    if codes is None or scales is None or f"{path}.biases" in weights:
        return False
    return codes.dtype == mx.uint32 and mx.issubdtype(scales.dtype, mx.floating)


def pack_like(model: nn.Module, weights: dict[str, mx.array]) -> None:
    """Replace modules for which `weights` holds scales by quantised ones.

    Bits, group size and mode follow from the shapes of a module's tensors. So the configuration's
    per-module entries, which use other names, are not needed.

    Raises:
        ModelError: the shapes match no mode of MLX.
    """
    packed: list[tuple[str, nn.Module]] = []
    for path, module in named_layers(model).items():
        scales = weights.get(f"{path}.scales")
        if scales is not None and "weight" in module:
            if module["weight"].ndim < 2:
                raise ModelError(f"tensor '{path}.weight' is quantised, but only matrices can be")
            packing = _packing(path, module["weight"].shape[-1], weights, scales=scales)
            packed.append((path, packed_twin(module, packing)))
    model.update_modules(tree_unflatten(packed))


def check_scales(model: nn.Module) -> None:
    """Refuse scales of MXFP4 and MXFP8 that are no numbers, or larger than kernels compute with.

    Raises:
        ModelError: the message names the tensor and its largest scale.
    """
    found: dict[str, mx.array] = {}
    for path, module in named_layers(model).items():
        if "scales" in module:
            packing: Packing = getattr(module, "packing", None) or packing_of(module)
            if packing.mode in ("mxfp4", "mxfp8"):
                found[path] = mx.max(module["scales"])
    mx.eval(found)
    for path, largest in found.items():
        code = largest.item()
        assert isinstance(code, int), "scales are codes"
        if (exponent := code - 127) > _LARGEST_SCALE:
            raise ModelError(
                f"tensor '{path}.scales' holds 2^{exponent}, but scales are at most "
                f"2^{_LARGEST_SCALE}: the file is damaged"
            )


def packed_twin(module: Any, packing: Packing) -> nn.Module:
    """Return the quantised form of a module, without weights."""
    if isinstance(module, nn.Linear | nn.Embedding):
        return packed_layer(module, packing)
    other: nn.Module = module.to_quantized(**asdict(packing))
    return other


def _packing(path: str, width: int, weights: Mapping[str, mx.array], scales: mx.array) -> Packing:
    codes = weights.get(f"{path}.weight")
    if codes is None or codes.dtype != mx.uint32:
        raise ModelError(f"tensor '{path}.weight' has scales but does not hold codes (uint32)")
    bits, bits_rest = divmod(codes.shape[-1] * 32, width)
    group, group_rest = divmod(width, scales.shape[-1])
    fits = bits_rest == 0 and group_rest == 0
    affine = f"{path}.biases" in weights
    if fits and affine and bits in _AFFINE_BITS and group in _AFFINE_GROUPS:
        return Packing(group, bits, "affine")
    if fits and scales.dtype == mx.uint8 and (bits, group) in _FLOAT_MODES:
        return Packing(group, bits, _FLOAT_MODES[bits, group])
    if fits and has_float_codes(weights, path) and bits == 8 and group in FP8_GROUPS:
        return Packing(group, bits, FP8)
    if fits and has_float_codes(weights, path) and (bits, group) == (4, 16):
        return Packing(group, bits, FP4)
    raise ModelError(
        f"tensor '{path}.weight': {list(codes.shape)} codes with {list(scales.shape)} scales are "
        f"no packing of {width} columns that is known"
    )
