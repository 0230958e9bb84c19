"""Lays weights out as the device reads them fastest. Their numbers stay the same."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from quire.device.device import current_device
from quire.device.weights import FP4, FP8, TILE, JoinedMatrix, PackedWeight, in_tiles
from quire.models.base import Module, named_layers
from quire.models.layers.linear import (
    Embedding,
    Linear,
    PackedEmbedding,
    PackedLinear,
    packing_of,
)
from quire.models.layers.moe import ExpertLinear, PackedExpertLinear
from quire.models.weights.quantization import float_type, has_float_codes, unpacked

log = logging.getLogger("quire.models")

_MOST_MEMORY = 0.75
"""Largest fraction of the memory for weights that they may take with wider codes."""


def replaced_dtype(weights: Mapping[str, mx.array]) -> mx.Dtype | None:
    """Return the type in which the device stores a checkpoint's floats; None if in their own."""
    own = float_type(weights)
    dtype = current_device().replaced_dtypes.get(own)
    if dtype is not None:
        names = (str(each).removeprefix("mlx.core.") for each in (own, dtype, own))
        log.info("weights in %s are computed in %s, which is faster; --dtype %s keeps them", *names)
    return dtype


def widen_codes(model: nn.Module, weights: dict[str, mx.array]) -> None:
    """Replace codes that the device's products do not read by wider ones of the same numbers, if
    all weights have room then: affine ones of odd sizes, and FP8 and FP4 by floats. The arrays
    stay lazy.

    Args:
        weights: tensors with their places in `model`, whose modules are not quantised yet.
    """
    device, wide = current_device(), dict(weights)
    for path, module in named_layers(model).items():
        codes = weights.get(f"{path}.weight")
        if codes is None or codes.dtype != mx.uint32:
            continue
        width = module["weight"].shape[-1]
        bits = codes.shape[-1] * 32 // width
        to = device.weight_code_bits.get(bits) if f"{path}.biases" in weights else None
        if to is not None and width % 32 == 0:
            wide[f"{path}.weight"] = widened(codes, bits, to)
        if not has_float_codes(weights, path):
            continue
        mode = FP8 if bits == 8 else FP4
        if mode not in device.read_modes or not isinstance(module, nn.Linear | ExpertLinear):
            wide[f"{path}.weight"] = unpacked(wide, path, width)
        elif mode == FP4:  # in float32, scales would take a third of the memory
            wide[f"{path}.scales"] = wide[f"{path}.scales"].astype(mx.bfloat16)
    if all(wide[name] is weights[name] for name in wide):
        return
    after = sum(each.nbytes for each in wide.values())
    if after > _MOST_MEMORY * device.weight_memory():
        log.info("codes stay as they are: as products read them they take %.1f GB", after / 1e9)
        return
    weights.clear()
    weights.update(wide)


def widened(codes: mx.array, bits: int, to: int) -> mx.array:
    """Return codes `[..., n * bits / 32]` in `to` bits each, `[..., n * to / 32]`.

    Args:
        codes: uint32, n a multiple of 32.
    """
    words = codes.reshape(*codes.shape[:-1], -1, bits)  # of 32 codes
    wide: list[mx.array] = []
    for n in range(32):
        word, shift = divmod(n * bits, 32)
        code = words[..., word] >> shift
        if shift + bits > 32:
            code = code | words[..., word + 1] << (32 - shift)
        code = (code & (1 << bits) - 1) << n * to % 32
        if n * to % 32:
            wide[-1] = wide[-1] | code
        else:
            wide.append(code)
    return mx.stack(wide, axis=-1).reshape(*codes.shape[:-1], -1)


def store_for_device(model: nn.Module, weights: dict[str, mx.array]) -> None:
    """Replace tensors, which have their places in `model`, by the device's layouts of them."""
    if current_device().weights_by_columns:
        _store_by_columns(model, weights)
    if current_device().joins_products:
        store_joined(model, weights)
    if current_device().kernels is not None:
        _store_as_bfloat16(model, weights)
        _store_scales_narrow(model, weights)
        _store_in_tiles(model, weights)


def _store_by_columns(model: nn.Module, weights: dict[str, mx.array]) -> None:
    """Store matrices in column-major order.

    A layer multiplies by its transposed weight. MLX's CPU products are 1.2 to 1.4 times as fast if
    that is row-major, with the same bits as result.
    """
    tied = "lm_head.weight" not in weights
    for path, module in named_layers(model).items():
        head = tied and path == "model.embed_tokens" and isinstance(module, nn.Embedding)
        if head or isinstance(module, nn.Linear):
            name = f"{path}.weight"
            weights[name] = mx.contiguous(weights[name].T).T


def store_joined(model: nn.Module, weights: dict[str, mx.array]) -> None:
    """Store matrices that multiply the same rows one below the other.

    Each layer keeps its own rows of the joined matrix, which take no memory of their own.
    """
    for path, module in model.named_modules():
        for names in module.same_rows if isinstance(module, Module) else ():
            paths = [f"{path}.{name}" for name in names if name in module]
            layers = [module[name] for name in names if name in module]
            if len(layers) > 1 and _are_joinable(layers, paths, weights):
                _join(layers, paths, weights)


def _are_joinable(
    layers: Sequence[nn.Module], paths: Sequence[str], weights: Mapping[str, mx.array]
) -> bool:
    """Return whether layers have the same parameters, and their matrices the same packing."""

    def kind(layer: nn.Module, path: str) -> object:
        packing = packing_of(layer) if isinstance(layer, PackedLinear) else None
        arrays = [(name, weights[f"{path}.{name}"]) for name in sorted(layer)]
        return type(layer), packing, [(name, each.dtype, each.shape[1:]) for name, each in arrays]

    first, *others = (kind(*each) for each in zip(layers, paths, strict=True))
    served = (Linear, PackedLinear) if current_device().joins_codes else (Linear,)
    return type(layers[0]) in served and all(each == first for each in others)


def _join(layers: Sequence[Any], paths: Sequence[str], weights: dict[str, mx.array]) -> None:
    ends = list(accumulate(len(weights[f"{path}.weight"]) for path in paths))
    whole = {}
    for name in layers[0]:
        whole[name] = mx.concatenate([weights[f"{path}.{name}"] for path in paths])
        parts = mx.split(whole[name], ends[:-1])
        weights.update({f"{path}.{name}": each for path, each in zip(paths, parts, strict=True)})
    weight: mx.array | PackedWeight = whole["weight"]
    if isinstance(layers[0], PackedLinear):
        packing = packing_of(layers[0])
        weight = PackedWeight(
            whole["weight"], whole["scales"], whole.get("biases"), packing=packing
        )
    joined = JoinedMatrix(weight, whole.get("bias"), ends=tuple(ends))
    for layer in layers:
        layer.joined = joined


def _store_as_bfloat16(model: nn.Module, weights: dict[str, mx.array]) -> None:
    """Store float32 matrices as `narrowed`."""
    for path, module in named_layers(model).items():
        name = f"{path}.weight"
        if type(module) in (Linear, Embedding, ExpertLinear):
            weights[name] = narrowed(weights[name])


def narrowed(matrix: mx.array) -> mx.array:
    """Return a matrix as bfloat16 if the device's kernels read it so, and it loses nothing.

    The kernels read bfloat16 and multiply in float32, so results are equal to the bit, and
    decoding, which is bound by memory, takes half as long.
    """
    if current_device().kernels is None:
        return matrix
    narrow = matrix.astype(mx.bfloat16)
    return narrow if mx.array_equal(narrow.astype(mx.float32), matrix).item() else matrix


def _store_scales_narrow(model: nn.Module, weights: dict[str, mx.array]) -> None:
    """Store scales and biases of affine codes in 16 bits if that loses nothing.

    Checkpoints have them in 16 bits. This saves a tenth of what decoding reads, for 4 bits in
    groups of 64.
    """
    for path, module in named_layers(model).items():
        names = (f"{path}.scales", f"{path}.biases")
        if type(module) not in (PackedLinear, PackedEmbedding, PackedExpertLinear) or any(
            name not in weights or weights[name].dtype != mx.float32 for name in names
        ):
            continue
        wide = [weights[name] for name in names]
        for dtype in (mx.bfloat16, mx.float16):
            narrow = [array.astype(dtype) for array in wide]
            pairs = zip(narrow, wide, strict=True)
            if all(mx.array_equal(a.astype(mx.float32), b).item() for a, b in pairs):
                weights.update(zip(names, narrow, strict=True))
                if isinstance(module, PackedEmbedding):
                    module.row_type = mx.float32
                break


def _store_in_tiles(model: nn.Module, weights: dict[str, mx.array]) -> None:
    """Store codes in the order in which the kernels read them, if they have their own.

    This includes an embedding table that is also the head.
    """
    operations = current_device().operations
    tied = not any(name.startswith("lm_head.") for name in weights)
    for path, module in named_layers(model).items():
        head = tied and path == "model.embed_tokens" and isinstance(module, PackedEmbedding)
        # Matrices by head, a subclass of experts', are not multiplied by kernels.
        experts = type(module) is PackedExpertLinear
        if not (isinstance(module, PackedLinear) or head or experts):
            continue
        codes = weights[f"{path}.weight"]
        packing = module.packing if experts else packing_of(module)
        if codes.shape[-2] % TILE == 0 and operations.reads_tiles(packing):
            module.tiled = True
            names = [f"{path}.{name}" for name in ("weight", "scales", "biases")]
            weights.update({name: in_tiles(weights[name]) for name in names if name in weights})
