"""Which models and machines recorded steps serve."""

from __future__ import annotations

import logging

import mlx.core as mx

from quire.attention.paged import cuda as paged
from quire.cache.specs import KVLayout
from quire.device.cuda.driver import Card
from quire.device.cuda.packed import ACTIVATIONS, Packed
from quire.device.cuda.skinny_gemm import SkinnyGemm
from quire.device.weights import PackedWeight
from quire.engine.decode.head import Head
from quire.models.stack import Stack, StackLayer

log = logging.getLogger("quire.engine")

MOST_ROWS = 64
"""In a recorded step."""


class UnsupportedStack(Exception):
    """The model or the machine is not served; the message says why."""


def has_head(stack: Stack, card: Card) -> bool:
    """Whether kernels compute the logits too."""
    if stack.head is None or not _readable(stack.head.weight, 32, 256):
        return False
    weight = stack.head.weight
    outputs, words = weight.codes.shape
    head = Head(MOST_ROWS, words * 8, outputs, weight.packing.group_size, None, card)
    if not head.fits:
        log.info("logits by MLX's own kernels: %s", _too_wide(words * 8, card))
    return head.fits


def check_stack(
    stack: Stack, layout: KVLayout, card: Card, *, batch_invariant: bool = False
) -> None:
    """Whether the kernels are made for a model.

    Args:
        batch_invariant: see `SkinnyGemm`.

    Raises:
        UnsupportedStack: they are not.
    """
    _check_matrix(stack.embedding)
    for number, layer in enumerate(stack.layers):
        _check_layer(layer, number, layout)
        _check_memory(layer, card, batch_invariant)


def _check_layer(layer: StackLayer, number: int, layout: KVLayout) -> None:
    """Raises `UnsupportedStack` for a layer that the kernels are not made for."""
    attention = layer.attention
    if layout.owner[number] != number or attention.layer != number:
        raise UnsupportedStack("a layer reads another's keys")
    spec = layout.groups[layout.group[number]].spec.attention
    if spec is None or spec.value_in_key or spec.value_dim != attention.head_dim:
        raise UnsupportedStack("values differ from keys")
    if attention.head_dim not in paged.VALUE_DIMS:
        raise UnsupportedStack(f"heads of {attention.head_dim}")
    matrices = [attention.q, attention.k, attention.o]
    if attention.v is not None:
        matrices.append(attention.v)
    for part in (layer.mlp, layer.experts):
        if part is None:
            continue
        if part.activation not in ACTIVATIONS:
            raise UnsupportedStack(f"the activation {part.activation}")
        if part.gate.packing != part.up.packing:
            raise UnsupportedStack("gate and up are packed differently")
        matrices += [part.gate, part.up, part.down]
    if layer.experts is not None:
        count = layer.experts.gate.codes.shape[0]
        if count % 32 or count > 1024 or layer.experts.k > 32:
            raise UnsupportedStack(f"{layer.experts.k} of {count} experts")
        matrices.append(layer.experts.router)
    for weight in matrices:
        _check_matrix(weight)
    if any(each.dtype != mx.bfloat16 for each in _vectors(layer)):
        raise UnsupportedStack("norms of another type than bfloat16")


def _check_memory(layer: StackLayer, card: Card, batch_invariant: bool) -> None:
    """Raises `UnsupportedStack` where products need more shared memory than the card has.

    What the narrowest cut needs is the same for all rows from 8 on.
    """
    attention, mlp, experts = layer.attention, layer.mlp, layer.experts
    products = [(each, False, False) for each in (attention.q, attention.o)]
    if mlp is not None:
        products += [(mlp.gate, True, False), (mlp.down, False, False)]
    if experts is not None:
        products += [(experts.router, False, False)]
        products += [(experts.gate, True, True), (experts.down, False, True)]
    for weight, gated, of_experts in products:
        outputs, words = weight.codes.shape[-2:]
        group_size = weight.packing.group_size
        kind = gated, of_experts, batch_invariant
        if not SkinnyGemm(words * 8, outputs, group_size, MOST_ROWS, card, *kind).fits:
            raise UnsupportedStack(_too_wide(words * 8, card))


def _too_wide(columns: int, card: Card) -> str:
    return f"{columns} columns do not fit {card.shared} bytes of shared memory"


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
        raise UnsupportedStack(f"codes in mode {packing.mode}{' in tiles' * weight.tiled}")
    if not _readable(weight):
        raise UnsupportedStack(f"codes of {packing.bits} bits in groups of {packing.group_size}")


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
