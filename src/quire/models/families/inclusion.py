"""Ling and Ring, first generation (arXiv:2503.05139), and Ling 3.0."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from quire.core.values import require
from quire.models.base import LanguageModel
from quire.models.description import Mixer
from quire.models.families.common import (
    EXPERT_PARTS,
    Family,
    attention,
    by_type,
    decoder,
    dense_by_type,
    full_every,
    mlp,
    query_key_value,
    rms,
    sigmoid_mixture,
    softmax_mixture,
    uniform_layers,
    with_dense,
)
from quire.models.families.deepseek import latent_attention
from quire.models.families.moonshot import PUBLISHED_KEYS, delta_tensors
from quire.models.layers.kimi_delta import KimiDelta
from quire.models.layers.latent_attention import LatentAttention
from quire.models.settings import FULL, LINEAR, Settings
from quire.models.weights.names import Names, Weights


def bailing_moe(s: Settings) -> LanguageModel:
    for name in ("use_qk_norm", "norm_head", "norm_softmax", "moe_router_enable_expert_bias"):
        s.only(name, False)
    s.only("score_function", "softmax")
    s.only("routed_scaling_factor", 1.0)
    usual = attention(
        s,
        qkv_bias=s.flag("use_qkv_bias", default=False),
        out_bias=s.flag("use_bias", default=False),
    )
    width = s.integer("moe_intermediate_size")
    shared = width * s.integer("num_shared_experts", default=0, minimum=0)
    experts = softmax_mixture(s.filled(norm_topk_prob=True), shared_width=shared)
    first = s.integer("first_k_dense_replace", default=0, minimum=0)
    layers = with_dense(uniform_layers(s, usual, experts), mlp(s, bias=False), lambda i: i < first)
    names = Names(
        renamed={
            "word_embeddings": "embed_tokens",
            "attention": "self_attn",
            "attention.dense": "self_attn.o_proj",
            "shared_experts": "shared_expert",
            "gate.gate_proj": "gate",  # mlx-lm's
        },
        fused={"query_key_value": query_key_value(usual)},
    )
    return decoder(s, layers, names, norm=rms(s))


def bailing_hybrid(s: Settings) -> LanguageModel:
    """Build Ling 3.0: Kimi's delta nets, and latent attention with gated heads.

    Ling 2.5 has the same `model_type` but other layers, and is refused.
    """
    s.only("architectures", ["BailingMoeV3ForCausalLM"], ["BailingHybridForCausalLM"])
    s.only("group_norm_size")
    s.only("no_kda_lora", True)
    s.only("score_function", "sigmoid")
    s.only("moe_router_enable_expert_bias", True)
    s.only("hidden_act", "silu")
    s = s.filled(**{ours: s.value(key) for key, ours in _KEYS.items() if s.has(key)})
    s = s.filled(rope_theta=6e6, **_USUAL)
    latents = replace(latent_attention(s), gate_dim=1)
    delta = KimiDelta(
        heads=s.integer("linear_num_heads", default=s.integer("num_attention_heads")),
        head_dim=s.integer("linear_head_dim", default=s.integer("head_dim", default=128)),
        kernel=s.integer("short_conv_kernel_size", "linear_conv_kernel_dim", default=4),
        eps=rms(s).eps,
        narrow_gates=False,
        most_forgotten=_most_forgotten(s) if s.flag("kda_safe_gate", default=True) else None,
    )
    mixers: dict[str, Mixer] = {FULL: latents, LINEAR: delta}
    own = s.integer(
        "moe_shared_expert_intermediate_size", default=s.integer("moe_intermediate_size")
    )
    experts = sigmoid_mixture(s, shared_width=own * s.integer("n_shared_experts", minimum=0))
    first = s.integer("first_k_dense_replace", default=2, minimum=0)
    layers = with_dense(
        by_type(_hybrid_types(s), mixers, experts), mlp(s, bias=False), dense_by_type(s, first)
    )
    ahead = s.integer("num_nextn_predict_layers", "num_mtp_layers", default=1, minimum=0)
    names = Names(
        renamed=EXPERT_PARTS
        | {
            "word_embeddings": "embed_tokens",
            "self_attn.dense": "self_attn.o_proj",
            "gate.expert_bias": "e_score_correction_bias",
        },
        unused=tuple(f"layers.{len(layers) + index}." for index in range(ahead)),
        prepare=partial(_hybrid_tensors, latents=latents),
    )
    return decoder(s, layers, names)


def _most_forgotten(s: Settings) -> float:
    """Return the logarithm of the least decay factor of a channel.

    Raises:
        ModelError: it is not negative.
    """
    bound = s.number("kda_lower_bound", default=-5.0)
    if bound >= 0:
        raise s.error("kda_lower_bound", "which is not below zero")
    return bound


def _hybrid_tensors(weights: Weights, latents: LatentAttention) -> Weights:
    named = {key.replace(".attention.", ".self_attn."): each for key, each in weights.items()}
    return delta_tensors(named, latents)


def _hybrid_types(s: Settings) -> tuple[str, ...]:
    """Return the mixer type of each layer: the last layer of each group has attention."""
    count, group = s.integer("num_hidden_layers"), s.integer("layer_group_size", default=6)
    if not s.has("layer_types"):
        # Implementations differ in layers after the last whole group.
        require("num_hidden_layers % layer_group_size", count % group, (0,), file=s.file)
    return s.layer_types(full_every(s, group, LINEAR), (FULL, LINEAR))


_KEYS = PUBLISHED_KEYS | {"model_max_length": "max_position_embeddings"}
_USUAL = {
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
}


def _context(s: Settings) -> int:
    return s.integer("max_position_embeddings", "model_max_length")


FAMILIES = (
    Family("bailing_hybrid", "Ling 3.0", bailing_hybrid, context=_context),
    Family("bailing_moe", "Ling, Ring (first generation)", bailing_moe),
)
