"""Linear layers and embedding tables that use the device's products. They have MLX's parameters."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from quire.device.device import current_device
from quire.device.weights import (
    DECODED_MODES,
    FP4,
    FP8,
    JoinedMatrix,
    Matrix,
    PackedWeight,
    Packing,
)
from quire.models.base import Module, named_layers

_STAND_INS = {FP8: Packing(32, 8, "mxfp8"), FP4: Packing(16, 4, "nvfp4")}
"""Packings of MLX whose layers are made for codes in modes that MLX does not have."""


class Linear(nn.Linear):
    """A linear layer, `[..., in]` -> `[..., out]`.

    Attributes:
        joined: see `Matrix`.
    """

    joined: JoinedMatrix | None = None

    def __call__(self, x: mx.array) -> mx.array:
        return current_device().operations.linear(x, self["weight"], self.get("bias"))


class Embedding(nn.Embedding):
    """An embedding table, also used as a tied head."""

    def __call__(self, x: mx.array) -> mx.array:
        """`[T]` -> `[T, dim]`."""
        return current_device().operations.embed(x, self["weight"], dtype=None)

    def as_linear(self, x: mx.array) -> mx.array:
        """`[..., dim]` -> `[..., rows]`."""
        return current_device().operations.linear(x, self["weight"], bias=None)


class PackedLinear(nn.QuantizedLinear):
    """A quantised `Linear`.

    Attributes:
        tiled: see `PackedWeight`.
        joined: see `Matrix`.
    """

    tiled = False
    joined: JoinedMatrix | None = None

    def __call__(self, x: mx.array) -> mx.array:
        return current_device().operations.packed_linear(x, _packed(self), self.get("bias"))


class PackedEmbedding(nn.QuantizedEmbedding):
    """A quantised `Embedding`.

    Attributes:
        row_type: dtype of rows; None means that of the scales.
        tiled: see `PackedWeight`.
    """

    row_type: mx.Dtype | None = None
    tiled = False

    def __call__(self, x: mx.array) -> mx.array:
        """`[T]` -> `[T, dim]`."""
        return current_device().operations.embed(x, _packed(self), self.row_type)

    def as_linear(self, x: mx.array) -> mx.array:
        """`[..., dim]` -> `[..., rows]`."""
        return current_device().operations.packed_linear(x, _packed(self), bias=None)


def packed_layer(layer: nn.Linear | nn.Embedding, packing: Packing) -> nn.Module:
    """Return the quantised form of a layer, without weights."""
    # MLX quantises what it is given, in its own modes alone.
    known = asdict(_STAND_INS.get(packing.mode, packing))
    twin: Any
    if isinstance(layer, nn.Linear):
        twin = PackedLinear.from_linear(layer, **known)
    else:
        twin = PackedEmbedding.from_embedding(layer, **known)
    if packing.mode in DECODED_MODES:
        twin.mode, twin.group_size = packing.mode, packing.group_size
        twin.scales = mx.zeros(
            (*layer.weight.shape[:-1], layer.weight.shape[-1] // packing.group_size)
        )
    quantised: nn.Module = twin
    return quantised


def matrix_of(layer: Any) -> Matrix:
    """Return the weight and bias of a linear layer whose weights are loaded."""
    weight = _packed(layer) if isinstance(layer, PackedLinear) else layer["weight"]
    return Matrix(weight, layer.get("bias"), _joined(layer))


def joined_matrices(model: nn.Module) -> dict[tuple[str, ...], JoinedMatrix]:
    """Return the plain matrices that store those of several layers, by the paths of the layers'
    weights in order.
    """
    found: dict[tuple[str, ...], JoinedMatrix] = {}
    for path, module in model.named_modules():
        for names in module.same_rows if isinstance(module, Module) else ():
            own = [name for name in names if name in module]
            joined = {id(each): each for each in (_joined(module[name]) for name in own)}
            (whole,) = joined.values() if len(joined) == 1 else (None,)
            if whole is not None and isinstance(whole.weight, mx.array):
                found[tuple(f"{path}.{name}.weight" for name in own)] = whole
    return found


def _joined(layer: Any) -> JoinedMatrix | None:
    return layer.joined if isinstance(layer, Linear | PackedLinear) else None


def packing_of(module: Any) -> Packing:
    """Return how the codes of a packed layer or table are packed."""
    return Packing(module.group_size, module.bits, module.mode)


def _packed(module: Any) -> PackedWeight:
    packing = packing_of(module)
    scales, biases = module["scales"], module.get("biases")
    return PackedWeight(module["weight"], scales, biases, packing=packing, tiled=module.tiled)


def use_device_products(model: nn.Module) -> None:
    """Replace MLX's linear layers and embedding tables by those of this module."""
    own: list[tuple[str, nn.Module]] = []
    for path, module in named_layers(model).items():
        if type(module) is nn.Linear:
            outputs, inputs = module["weight"].shape
            own.append((path, Linear(inputs, outputs, bias="bias" in module)))
        elif type(module) is nn.Embedding:
            own.append((path, Embedding(*module["weight"].shape)))
    model.update_modules(tree_unflatten(own))
