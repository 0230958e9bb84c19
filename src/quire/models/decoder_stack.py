"""A described decoder as data, where it is packed; see `stack`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import mlx.core as mx

from quire.models.description import Description, Layer, NormPlacement, Rotation
from quire.models.layers.attention import Attention, Over
from quire.models.layers.feed_forward import MLP
from quire.models.layers.moe import Mixture
from quire.models.layers.norm import RMSNorm
from quire.models.layers.rope import Rope
from quire.models.layers.routers import SoftmaxRouter
from quire.models.stack import (
    Stack,
    StackAttention,
    StackExperts,
    StackLayer,
    StackMLP,
    UnsupportedModel,
    packed,
    stack_head,
    stacked,
)


def decoder_stack(
    whole: Description, decoder: Any, head: Any, ropes: Mapping[Rotation, Rope]
) -> Stack:
    """Return the decoder of weights that are loaded.

    Raises:
        UnsupportedModel: it has a part that is not among plain attention, gated MLPs and experts
            behind a softmax, with RMS norms before each block; or weights are not packed.
    """
    if whole.placement is not NormPlacement.PRE or whole.residual_multiplier != 1:
        raise UnsupportedModel("norms elsewhere than before each block")
    layers = tuple(
        _layer(index, layer, module, ropes)
        for index, (layer, module) in enumerate(zip(whole.layers, decoder.layers, strict=True))
    )
    embedding = packed(decoder.embed_tokens, "embed_tokens")
    multiplier, eps = whole.embedding_multiplier, whole.norm.eps
    logits = None
    if whole.head_multiplier == 1:
        logits = stack_head(decoder.embed_tokens, head, whole.logit_softcap)
    norm = _weight(decoder.norm)
    return Stack(embedding, multiplier, layers, norm, eps, whole.hidden_size, logits)


def _layer(index: int, layer: Layer, module: Any, ropes: Mapping[Rotation, Rope]) -> StackLayer:
    if len(layer.mixers) != 1 or not isinstance(kind := layer.mixers[0], Attention):
        raise UnsupportedModel("layers that mix tokens otherwise than by attention")
    attention = _attention(index, kind, module.self_attn, ropes)
    norm, block = _weight(module.post_attention_layernorm), module.mlp
    mlp = experts = None
    if isinstance(fed := layer.feed_forward, MLP):
        if not fed.gated or fed.limit:
            raise UnsupportedModel("MLPs without a gate, or with a bounded one")
        mlp = StackMLP(
            norm,
            packed(block.gate_proj, "gate_proj"),
            packed(block.up_proj, "up_proj"),
            packed(block.down_proj, "down_proj"),
            fed.activation,
            None,
        )
    elif isinstance(fed, Mixture):
        experts = _experts(fed, block, norm)
    else:
        raise UnsupportedModel(f"a block of {type(fed).__name__}")
    return StackLayer(_weight(module.input_layernorm), attention, None, mlp, experts, None, None)


def _attention(
    index: int, kind: Attention, module: Any, ropes: Mapping[Rotation, Rope]
) -> StackAttention:
    norm = kind.qk_norm
    if norm is not None and (norm.over is not Over.HEAD or norm.after_rotation):
        raise UnsupportedModel(
            "norms of queries and keys otherwise than of each head, before rotation"
        )
    plain = {"heads", "kv_heads", "head_dim", "scale", "rope", "window", "qk_norm"}
    _refuse_others(kind, plain, "attention")
    if kind.rotation is None:
        raise UnsupportedModel("attention without rotation")
    return StackAttention(
        index,
        packed(module.q_proj, "q_proj"),
        packed(module.k_proj, "k_proj"),
        packed(module.v_proj, "v_proj"),
        packed(module.o_proj, "o_proj"),
        None if norm is None else _weight(module.q_norm),
        None if norm is None else _weight(module.k_norm),
        False,
        kind.heads,
        kind.kv_heads,
        kind.head_dim,
        ropes[kind.rotation],
        kind.scale,
    )


def _refuse_others(
    described: Attention | Mixture | SoftmaxRouter, plain: set[str], name: str
) -> None:
    """Raises: UnsupportedModel: a field other than the plain ones asks for something."""
    for each in fields(described):
        if each.name not in plain and getattr(described, each.name) != each.default:
            raise UnsupportedModel(f"{name} with {each.name}")


def _experts(kind: Mixture, module: Any, norm: mx.array) -> StackExperts:
    router = kind.router
    if not isinstance(router, SoftmaxRouter):
        raise UnsupportedModel("experts otherwise than behind a softmax")
    _refuse_others(kind, {"experts", "width", "activation", "router"}, "experts")
    _refuse_others(router, {"k", "normalise", "scale"}, "a router")
    return StackExperts(
        norm,
        norm,
        packed(module.gate, "gate"),
        None,
        router.normalise,
        router.scale,
        router.k,
        stacked(module.experts.gate_proj.matrices),
        stacked(module.experts.up_proj.matrices),
        stacked(module.experts.down_proj.matrices),
        kind.activation,
        None,
    )


def _weight(norm: Any) -> mx.array:
    """Return the weight of an RMS norm."""
    if not isinstance(norm, RMSNorm):
        raise UnsupportedModel(f"norms of type {type(norm).__name__}")
    return norm.weight
