"""A decoder as plain data: what an engine needs to compute a whole step as one operation.

A model that can be described this way is, by its `stack`; the model itself stays the reference.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from quire.device.weights import ExpertMatrices, PackedWeight, Packing
from quire.models.layers.rope import Rope


class UnsupportedModel(Exception):
    """The model has a part that a `Stack` cannot describe; the message names it."""


@dataclass(frozen=True)
class StackAttention:
    """Attention of one layer.

    Attributes:
        layer: index into the model's `layout`.
        v: None where the keys' projection serves the values too.
        q_norm, k_norm: of each head; None without.
        norms_values: values are normalised by head, without a weight.
        scale: multiplies the logits.
    """

    layer: int
    q: PackedWeight
    k: PackedWeight
    v: PackedWeight | None
    o: PackedWeight
    q_norm: mx.array | None
    k_norm: mx.array | None
    norms_values: bool
    heads: int
    kv_heads: int
    head_dim: int
    rope: Rope
    scale: float


@dataclass(frozen=True)
class StackMLP:
    """`down(act(gate(x)) * up(x))` of normalised rows.

    Attributes:
        norm: weight of the norm before.
        post_norm: weight of a norm behind; None without.
    """

    norm: mx.array
    gate: PackedWeight
    up: PackedWeight
    down: PackedWeight
    activation: str
    post_norm: mx.array | None


@dataclass(frozen=True)
class StackExperts:
    """Experts, each a gated MLP, of which a router chooses `k` a row by a softmax.

    Attributes:
        norm, post_norm: see `StackMLP`.
        router_norm: weight of the norm of what the router reads.
        router: `[experts, hidden]`.
        per_expert: multiplies the weights, `[experts]`; None without.
        normalise: the weights of the chosen sum to one.
        gate, up, down: `[experts, -, -]`.
    """

    norm: mx.array
    router_norm: mx.array
    router: PackedWeight
    per_expert: mx.array | None
    normalise: bool
    scale: float
    k: int
    gate: PackedWeight
    up: PackedWeight
    down: PackedWeight
    activation: str
    post_norm: mx.array | None


@dataclass(frozen=True)
class StackLayer:
    """Attention, then what each row passes through for itself; both are added to the rows.

    Attributes:
        input_norm: weight of the norm before attention.
        attention_post_norm: weight of a norm behind it; None without.
        mlp, experts: one of them at least; their sum is added.
        post_norm: weight of a norm of that sum; None without.
        scalar: multiplies what the layer gives, `[1]`; None without.
    """

    input_norm: mx.array
    attention: StackAttention
    attention_post_norm: mx.array | None
    mlp: StackMLP | None
    experts: StackExperts | None
    post_norm: mx.array | None
    scalar: mx.array | None


@dataclass(frozen=True)
class StackHead:
    """From normalised hidden states to logits.

    Attributes:
        weight: `[vocab, hidden]`.
        softcap: logits are `softcap * tanh(x / softcap)`; None without.
    """

    weight: PackedWeight
    softcap: float | None


@dataclass(frozen=True)
class Stack:
    """A decoder from tokens to normalised hidden states; all norms are RMS norms.

    Attributes:
        embedding: `[vocab, hidden]`.
        multiplier: of embeddings.
        norm: weight of the norm behind the last layer.
        head: None where it is no packed matrix, or does more.
    """

    embedding: PackedWeight
    multiplier: float
    layers: tuple[StackLayer, ...]
    norm: mx.array
    eps: float
    hidden_size: int
    head: StackHead | None


def packed(module: Any, name: str) -> PackedWeight:
    """Return the matrix of a linear layer or an embedding.

    Raises:
        UnsupportedModel: it is not packed, or has a bias.
    """
    if not isinstance(module, nn.QuantizedLinear | nn.QuantizedEmbedding) or "bias" in module:
        raise UnsupportedModel(f"{name} is no packed matrix without a bias")
    packing = Packing(module.group_size, module.bits, module.mode)
    scales, biases = module["scales"], module.get("biases")
    return PackedWeight(module["weight"], scales, biases, packing, getattr(module, "tiled", False))


def stack_head(table: Any, head: Any, softcap: float | None) -> StackHead | None:
    """Return the head, or the table where that is tied; None if it is not packed, or has a bias."""
    try:
        return StackHead(packed(table if head is None else head, "the head"), softcap)
    except UnsupportedModel:
        return None


def stacked(matrices: ExpertMatrices) -> PackedWeight:
    """Return the matrices of experts.

    Raises:
        UnsupportedModel: they are not packed, or have biases.
    """
    if not isinstance(matrices.weight, PackedWeight) or matrices.bias is not None:
        raise UnsupportedModel("experts that are not packed, or have biases")
    return matrices.weight
