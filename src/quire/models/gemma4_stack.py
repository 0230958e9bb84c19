"""Gemma 4's decoder as data, where it is packed; see `stack`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from quire.models.families.gemma4_arguments import Gemma4Arguments
from quire.models.layers.rope import Rope
from quire.models.settings import FULL
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


def gemma4_stack(
    args: Gemma4Arguments, decoder: Any, head: Any, ropes: Mapping[str, Rope]
) -> Stack:
    """Return the decoder of weights that are loaded.

    Args:
        ropes: by the kind of layer.

    Raises:
        UnsupportedModel: layers share keys, or have embeddings of their own; weights are not
            packed.
    """
    if args.hidden_size_per_layer_input or args.num_kv_shared_layers:
        raise UnsupportedModel("layers with embeddings of their own, or with another layer's keys")
    layers = tuple(
        _layer(args, index, layer, ropes[args.layer_types[index]])
        for index, layer in enumerate(decoder.layers)
    )
    return Stack(
        packed(decoder.embed_tokens, "embed_tokens"),
        args.hidden_size**0.5,
        layers,
        decoder.norm.weight,
        args.rms_norm_eps,
        args.hidden_size,
        stack_head(decoder.embed_tokens, head, args.final_logit_softcapping),
    )


def _layer(args: Gemma4Arguments, index: int, layer: Any, rope: Rope) -> StackLayer:
    moe = args.enable_moe_block
    return StackLayer(
        layer.input_layernorm.weight,
        _attention(args, index, layer.self_attn, rope),
        layer.post_attention_layernorm.weight,
        StackMLP(
            layer.pre_feedforward_layernorm.weight,
            packed(layer.mlp.gate_proj, "gate_proj"),
            packed(layer.mlp.up_proj, "up_proj"),
            packed(layer.mlp.down_proj, "down_proj"),
            args.hidden_activation,
            layer.post_feedforward_layernorm_1.weight if moe else None,
        ),
        _experts(args, layer) if moe else None,
        layer.post_feedforward_layernorm.weight,
        layer.layer_scalar,
    )


def _attention(args: Gemma4Arguments, index: int, attention: Any, rope: Rope) -> StackAttention:
    full = args.layer_types[index] == FULL
    return StackAttention(
        index,
        packed(attention.q_proj, "q_proj"),
        packed(attention.k_proj, "k_proj"),
        None if full and args.attention_k_eq_v else packed(attention.v_proj, "v_proj"),
        packed(attention.o_proj, "o_proj"),
        attention.q_norm.weight,
        attention.k_norm.weight,
        True,
        args.num_attention_heads,
        args.num_global_key_value_heads if full else args.num_key_value_heads,
        args.global_head_dim if full else args.head_dim,
        rope,
        1.0,
    )


def _experts(args: Gemma4Arguments, layer: Any) -> StackExperts:
    router, experts = layer.router, layer.experts
    router_norm = router.scale * args.hidden_size**-0.5
    mx.eval(router_norm)
    return StackExperts(
        layer.pre_feedforward_layernorm_2.weight,
        router_norm,
        packed(router.proj, "router.proj"),
        router.per_expert_scale,
        True,
        1.0,
        args.top_k_experts,
        stacked(experts.gate_proj.matrices),
        stacked(experts.up_proj.matrices),
        stacked(experts.down_proj.matrices),
        args.hidden_activation,
        layer.post_feedforward_layernorm_2.weight,
    )
