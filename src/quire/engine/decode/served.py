"""Which models and machines recorded steps serve."""

from __future__ import annotations

import mlx.core as mx

from quire.attention.paged import cuda as paged
from quire.cache.specs import KVLayout
from quire.device.cuda.products import ACTIVATIONS, Packed
from quire.device.operations import PackedWeight
from quire.models.stack import Stack, StackLayer


class Unfit(Exception):
    """The model or the machine is not served; the message says why."""


def has_head(stack: Stack) -> bool:
    """Whether kernels compute the logits too."""
    return stack.head is not None and _readable(stack.head.weight, 32, 256)


def check_stack(stack: Stack, layout: KVLayout) -> None:
    """Whether the kernels are made for a model.

    Raises:
        Unfit: they are not.
    """
    _check_matrix(stack.embedding)
    for number, layer in enumerate(stack.layers):
        _check(layer, number, layout)


def _check(layer: StackLayer, number: int, layout: KVLayout) -> None:
    """Raises `Unfit` for a layer that the kernels are not made for."""
    attention = layer.attention
    if layout.owner[number] != number or attention.layer != number:
        raise Unfit("a layer reads another's keys")
    spec = layout.groups[layout.group[number]].spec.attention
    if spec is None or spec.value_in_key or spec.value_dim != attention.head_dim:
        raise Unfit("values differ from keys")
    if attention.head_dim not in paged.VALUE_DIMS:
        raise Unfit(f"heads of {attention.head_dim}")
    matrices = [attention.q, attention.k, attention.o]
    if attention.v is not None:
        matrices.append(attention.v)
    for part in (layer.mlp, layer.experts):
        if part is None:
            continue
        if part.activation not in ACTIVATIONS:
            raise Unfit(f"the activation {part.activation}")
        if part.gate.packing != part.up.packing:
            raise Unfit("gate and up are packed differently")
        matrices += [part.gate, part.up, part.down]
    if layer.experts is not None:
        count = layer.experts.gate.codes.shape[0]
        if count % 32 or count > 1024 or layer.experts.k > 32:
            raise Unfit(f"{layer.experts.k} of {count} experts")
        matrices.append(layer.experts.router)
    for weight in matrices:
        _check_matrix(weight)
    if any(each.dtype != mx.bfloat16 for each in _vectors(layer)):
        raise Unfit("norms of another type than bfloat16")


def _vectors(layer: StackLayer) -> list[mx.array]:
    """What multiplies rows element by element."""
    found = [layer.input_norm, layer.attention_post_norm, layer.post_norm, layer.scalar]
    found += [layer.attention.q_norm, layer.attention.k_norm]
    if layer.mlp is not None:
        found += [layer.mlp.norm, layer.mlp.post_norm]
    if layer.experts is not None:
        own = layer.experts
        found += [own.norm, own.post_norm, own.router_norm, own.per_expert]
    return [each for each in found if each is not None]


def _check_matrix(weight: PackedWeight) -> None:
    packing = weight.packing
    if weight.biases is None or weight.tiled:
        raise Unfit(f"codes in mode {packing.mode}{' in tiles' * weight.tiled}")
    if not _readable(weight):
        raise Unfit(f"codes of {packing.bits} bits in groups of {packing.group_size}")


def _readable(weight: PackedWeight, rows: int = 16, columns: int = 64) -> bool:
    """Whether kernels read a matrix that must have multiples of so many rows and columns."""
    packing = weight.packing
    if (
        weight.biases is None
        or weight.codes.shape[-2] % rows
        or weight.codes.shape[-1] * 8 % columns
    ):
        return False
    known = Packed(weight.codes, weight.scales, weight.biases, packing.group_size, packing.bits)
    return known.readable_by_kernels
