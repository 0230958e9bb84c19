"""Ling and Ring, first generation (arXiv:2503.05139), 2.0 (arXiv:2510.22115) and 3.0."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from quire.core.values import require
from quire.device.mixture import Router
from quire.models.base import LanguageModel
from quire.models.description import Layer, Mixer
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
from quire.models.layers.attention import Attention, QKNorm
from quire.models.layers.kimi_delta import KimiDelta
from quire.models.layers.latent_attention import LatentAttention
from quire.models.layers.lightning import LightningAttention, fixed_rates
from quire.models.layers.moe import Mixture
from quire.models.layers.routers import SigmoidRouter, SoftmaxRouter
from quire.models.settings import FULL, LINEAR, Settings
from quire.models.weights.names import Names, Weights


def bailing_moe(s: Settings) -> LanguageModel:
    """Build Ling and Ring, first generation and 2.0, which have one `model_type`."""
    usual = _attention(s)
    layers = uniform_layers(s, usual, _experts(s))
    first = s.integer("first_k_dense_replace", default=0, minimum=0)
    dense = with_dense(layers, mlp(s, bias=False), lambda index: index < first)
    return decoder(s, dense, _names(s, usual), norm=rms(s))


def bailing_moe_linear(s: Settings) -> LanguageModel:
    """Build Ring 2.0 with lightning attention, except in the last layer of each group."""
    s.only("use_rmsnorm", True)
    usual, experts = _attention(s), _experts(s)
    count, group = s.integer("num_hidden_layers"), s.integer("layer_group_size")
    assert usual.rope is not None, "heads are rotated"
    linear = LightningAttention(
        heads=usual.heads,
        head_dim=usual.head_dim,
        rates=(),
        rope=usual.rope,
        groups=s.integer("group_norm_size"),
        eps=rms(s).eps,
        qk_norm=None if usual.qk_norm is None else usual.qk_norm.norm,
        qkv_bias=usual.qkv_bias,
        out_bias=usual.out_bias,
    )
    require("heads % group_norm_size", usual.heads % linear.groups, (0,), file=s.file)
    layers = []
    for index in range(count):
        mixer: Mixer = replace(linear, rates=fixed_rates(usual.heads, index, count))
        if (index + 1) % group == 0 or index >= count // group * group:
            mixer = usual
        layers.append(Layer((mixer,), experts))
    first = s.integer("first_k_dense_replace", default=0, minimum=0)
    dense = with_dense(tuple(layers), mlp(s, bias=False), lambda index: index < first)
    names = _names(s, usual)
    return decoder(s, dense, replace(names, prepare=partial(_apart, usual=usual)), norm=rms(s))


def _apart(weights: Weights, usual: Attention) -> Weights:
    """Split queries, keys and values of lightning attention, which has as many heads of each."""
    width = usual.heads * usual.head_dim
    ready: Weights = {}
    for name, array in weights.items():
        path, fused, kind = name.partition(".query_key_value.")
        if not fused or array.shape[0] != 3 * width:
            ready[name] = array
            continue
        for at, part in enumerate(("q_proj", "k_proj", "v_proj")):
            ready[f"{path}.{part}.{kind}"] = array[at * width : (at + 1) * width]
    return ready


def _attention(s: Settings) -> Attention:
    head_dim = s.integer(
        "head_dim", default=s.integer("hidden_size") // s.integer("num_attention_heads")
    )
    share = s.number("partial_rotary_factor", default=1.0)
    if s.has("rotary_dim"):
        share = s.integer("rotary_dim") / head_dim
    return attention(
        s,
        rope=s.changed(partial_rotary_factor=share).rope(partial=share),
        qkv_bias=s.flag("use_qkv_bias", default=False),
        out_bias=s.flag("use_bias", default=False),
        qk_norm=QKNorm(rms(s)) if s.flag("use_qk_norm", default=False) else None,
    )


def _experts(s: Settings) -> Mixture:
    s.only("norm_head", False)
    s.only("norm_softmax", False)
    s.only("score_function", "softmax", "sigmoid")
    k, normalise = s.integer("num_experts_per_tok"), s.flag("norm_topk_prob", default=True)
    corrected = s.flag("moe_router_enable_expert_bias", default=False)
    groups = s.integer("n_group", default=1)
    require("num_experts % n_group", s.integer("num_experts") % groups, (0,), file=s.file)
    scale = s.number("routed_scaling_factor", default=1.0)
    best = s.integer("topk_group", default=4)
    router: Router = SoftmaxRouter(
        k,
        normalise,
        corrected,
        scale=scale,
        groups=groups,
        best_groups=best,
        counted=2,
    )
    if s.word("score_function", default="softmax") == "sigmoid":
        router = SigmoidRouter(
            k, normalise, scale, groups=groups, best_groups=best, corrected=corrected
        )
    width = s.integer("moe_intermediate_size")
    shared = s.integer("num_shared_experts", default=0, minimum=0)
    if not s.flag("moe_router_enable_shared_expert", default=True):
        shared = 0
    own = s.integer("moe_shared_expert_intermediate_size", default=width)
    return softmax_mixture(s, router=router, shared_width=own * shared)


def _names(s: Settings, usual: Attention) -> Names:
    count = s.integer("num_hidden_layers")
    ahead = s.integer("num_nextn_predict_layers", "num_mtp_layers", default=0, minimum=0)
    return Names(
        renamed={
            "word_embeddings": "embed_tokens",
            "attention": "self_attn",
            "attention.dense": "self_attn.o_proj",
            "query_layernorm": "q_norm",
            "key_layernorm": "k_norm",
            "shared_experts": "shared_expert",
            "gate.gate_proj": "gate",  # mlx-lm's
            "gate.expert_bias": "e_score_correction_bias",
        },
        fused={"query_key_value": query_key_value(usual)},
        unused=tuple(f"layers.{count + index}." for index in range(ahead)),
    )


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
        narrow_gates="",
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
    Family("bailing_moe_linear", "Ring 2.0 with linear attention", bailing_moe_linear),
    Family("bailing_moe", "Ling, Ring (first generation, 2.0)", bailing_moe),
)
