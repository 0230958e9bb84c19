"""Converts weights quantised by other libraries to MLX's forms, or dequantises them.

FP8 keeps its codes. Its scales (DeepSeek's blocks; a scale per tensor, row or group, as
compressed-tensors and ModelOpt write them) become one per row and group of columns, in float32; or
one byte where they are powers of two per 32 columns, which is MLX's MXFP8. Integers become MLX's
affine codes.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx

from quire.core.errors import ModelError
from quire.core.values import Values
from quire.models.weights.compressed_tensors import from_compressed
from quire.models.weights.gptq_awq import from_integers
from quire.models.weights.modelopt import from_modelopt
from quire.models.weights.quantization import AUTO_ROUND, FP8_GROUPS, foreign_method
from quire.models.weights.small_floats import check_exponents, scale_numbers
from quire.models.weights.ternary import BITNET, from_ternary

log = logging.getLogger("quire.models")

_BLOCK = (128, 128)
_SUPPORTED = (*AUTO_ROUND, BITNET, "awq", "compressed-tensors", "fp8", "gptq", "modelopt", "mxfp4")
_MX_GROUP = 32
_E4M3 = "F8_E4M3"
_RANKS = (1, 2, 4, 8)
"""How many ranks' projections MiMo V2 may join, one below the other, each with its own blocks."""
_SCALES = ("_scale_inv", ".weight_scale")
# Scales of activations and caches, which are not used here.
_SIDE = tuple(f".{name}_scale" for name in ("input", "output", "q", "k", "v", "kv"))
_SIDE += ("activation_scale",)


def from_foreign(
    weights: dict[str, mx.array],
    config: dict[str, Any],
    dtype: mx.Dtype | None,
    types: Mapping[str, str],
) -> dict[str, mx.array]:
    """Return a checkpoint's tensors without other libraries' quantisation.

    Args:
        types: each tensor's type as the files name it, since MLX reads all 8-bit types as bytes.
        dtype: dtype of dequantised matrices; None means that of the checkpoint's scales, and
            bfloat16 for FP8 whose rows are no whole groups of 32.

    Raises:
        ModelError: a scale matches no supported form.
    """
    weights = from_ternary(from_integers(weights, config, dtype), config, dtype)
    weights = from_compressed(weights, config, dtype)
    said = Values(config).nested("quantization_config", "compression_config", needed=False)
    if said.values or any(name.endswith(_SCALES) for name in weights):
        weights = {name: array for name, array in weights.items() if not name.endswith(_SIDE)}
    weights = from_modelopt(weights, dtype)
    scales = {name for name in weights if name.endswith(_SCALES)}
    if not scales:
        return weights
    blocks = _block_sizes(said)
    ready = {name: array for name, array in weights.items() if name not in scales}
    unpacked = 0
    for name in sorted(scales):
        packed, scale = name.removesuffix("_inv").removesuffix("_scale"), weights[name]
        codes = ready.get(packed)
        if codes is None or codes.dtype != mx.uint8:
            raise ModelError(f"tensor {name!r} belongs to no packed weight that is known")
        if types.get(name) != _E4M3 and _is_microscaled(
            packed, codes, scale, kind=types.get(packed)
        ):
            check_exponents(name, scale)
            ready[packed] = codes.view(mx.uint32)
            ready[packed.removesuffix("weight") + "scales"] = scale
            continue
        ranks = _RANKS if packed.endswith(".qkv_proj.weight") else (1,)
        numbers = _numbers(name, scale, types.get(name))
        groups = _group_scales(codes, numbers, blocks, counts=ranks)
        if groups is None:
            raise ModelError(
                f"tensor {name!r}: {list(scale.shape)} scales fit no FP8 weight of "
                f"{list(codes.shape)}, whose blocks are {[*map(list, blocks or [_BLOCK])]}"
            )
        wide = codes.shape[-1] // groups.shape[-1]
        if packed.endswith(".weight") and codes.ndim > 1 and wide in FP8_GROUPS:
            ready[packed] = codes.view(mx.uint32)
            # Kernels read memory as it lies: no view of one scale for all.
            ready[packed.removesuffix("weight") + "scales"] = mx.contiguous(groups)
            continue
        unpacked += 1
        numbers = mx.from_fp8(codes, mx.float32) * mx.repeat(groups, wide, axis=-1)
        ready[packed] = numbers.astype(dtype or mx.bfloat16)
    if unpacked:
        log.warning("%d tensors of FP8 are unpacked: no products are computed by them", unpacked)
    return ready


def unsupported_method(config: dict[str, Any]) -> str | None:
    """Return the quantisation method (HQQ, bitsandbytes, ...) of a checkpoint if it is not
    supported.

    Conversions keep this entry of the configuration, so it is only used to explain why tensors do
    not fit.
    """
    method = foreign_method(config)
    return None if method in _SUPPORTED else method


def _is_microscaled(packed: str, codes: mx.array, scale: mx.array, kind: str | None) -> bool:
    """Return whether a weight is MLX's mxfp8 or mxfp4: one power of two per 32 numbers of a row.

    Bytes whose type is not FP8 may hold two codes each (quark's MXFP4).
    """
    if not packed.endswith(".weight") or codes.ndim < 2 or scale.dtype != mx.uint8:
        return False
    sizes = (_MX_GROUP,) if kind == _E4M3 else (_MX_GROUP, _MX_GROUP // 2)
    fitting = [codes.shape[-1] // size for size in sizes if codes.shape[-1] % size == 0]
    return scale.shape[:-1] == codes.shape[:-1] and scale.shape[-1] in fitting


def _numbers(name: str, scale: mx.array, kind: str | None) -> mx.array:
    """Return a tensor of scales as float32 factors."""
    if kind == _E4M3:
        return mx.from_fp8(scale, mx.float32)
    return scale_numbers(name, scale)


def _block_sizes(said: Values) -> list[tuple[int, int]]:
    """Return the rows and columns of scaled blocks, from DeepSeek's key or compressed-tensors'
    groups.

    If there are none, `_BLOCK` is used.

    Raises:
        ModelError: a size is not a pair of positive integers.
    """
    groups = said.nested("config_groups", needed=False)
    weights = [groups.nested(name).nested("weights", needed=False) for name in groups.values]
    places = [(said, "weight_block_size"), *((each, "block_structure") for each in weights)]
    sizes = []
    for where, key in places:
        size = where.integers(key)
        if size and (len(size) != 2 or min(size) < 1):
            raise where.error(key, "which is not the rows and columns of a block")
        sizes += [(size[0], size[1])] if size else []
    return sizes


def _group_scales(
    codes: mx.array,
    scale: mx.array,
    blocks: Sequence[tuple[int, int]],
    counts: Sequence[int] = (1,),
) -> mx.array | None:
    """Return the scales of a matrix, or of a stack of experts' matrices, by row and group of
    columns: `[..., out, groups]`. Groups are as wide as `FP8_GROUPS` allow. Return None if the
    scales do not match.

    Args:
        counts: how many matrices, one below the other, may have blocks of their own.
    """
    if codes.ndim < 3:
        return _of_groups(scale, codes.shape, blocks, counts=counts)
    if scale.ndim != codes.ndim or len(scale) != len(codes):
        return None
    if scale.shape[1:] == (2, 1):  # gates and what they open have one each
        scale = mx.repeat(scale, codes.shape[1] // 2, axis=1)
    parts = [_group_scales(each, own, blocks) for each, own in zip(codes, scale, strict=True)]
    found = [part for part in parts if part is not None]
    return mx.stack(found) if len(found) == len(parts) else None


def _of_groups(
    scale: mx.array,
    shape: tuple[int, ...],
    blocks: Sequence[tuple[int, int]],
    counts: Sequence[int],
) -> mx.array | None:
    """Return scales by row and group of columns: of one for all, or one per row, group or block.

    Return None if they match none of these.
    """
    columns = shape[-1]
    if scale.size == 1 and (scale.ndim < 2 or not blocks):
        return mx.broadcast_to(
            scale.reshape(()), (*shape[:-1], columns // _group(columns, columns))
        )
    if len(shape) != 2:
        return None
    rows = shape[0]
    if scale.shape == (rows,):
        scale = scale.reshape(-1, 1)
    if scale.ndim != 2:
        return None
    if scale.shape[0] == rows and scale.shape[1] and columns % scale.shape[1] == 0:
        own = columns // scale.shape[1]
        return mx.repeat(scale, own // _group(columns, own), axis=1)
    for high, wide in blocks or [_BLOCK]:
        for count in counts:
            own = -(-rows // count // high)
            if rows % count == 0 and scale.shape == (count * own, -(-columns // wide)):
                size = _group(columns, wide)
                tall = mx.repeat(scale.reshape(count, own, -1), high, axis=1)
                tall = tall[:, : rows // count].flatten(0, 1)
                return mx.repeat(tall, wide // size, axis=1)[:, : columns // size]
    return None


def _group(columns: int, wide: int) -> int:
    """Return the most columns that groups may have, so that `columns` and those of one scale, of
    which there are `wide`, are whole groups. 1 if `FP8_GROUPS` do not fit.
    """
    return next((n for n in FP8_GROUPS if columns % n == 0 and wide % n == 0), 1)
