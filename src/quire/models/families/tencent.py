"""Hunyuan, dense and with experts, Hunyuan 3 and Hunyuan 4."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial

import mlx.core as mx

from quire.models.base import LanguageModel
from quire.models.description import NormPlacement
from quire.models.families.common import (
    EXPERT_PARTS,
    Family,
    attention,
    decoder,
    dense_by_type,
    mlp,
    rms,
    sigmoid_mixture,
    softmax_mixture,
    uniform_layers,
    with_dense,
)
from quire.models.families.deepseek import choosing_layers, indexed_layers, latent_attention
from quire.models.layers.attention import Attention, QKNorm
from quire.models.layers.indexer import Indexer
from quire.models.layers.latent_attention import LatentAttention
from quire.models.layers.routers import SigmoidRouter, SoftmaxRouter
from quire.models.layers.streams import Streams
from quire.models.settings import Settings
from quire.models.weights.names import Names, Weights

NAMES = Names(
    renamed={
        "query_layernorm": "q_norm",
        "key_layernorm": "k_norm",
        "gate.wg": "gate",
        "shared_mlp": "shared_expert",
    }
)


def hunyuan_dense(s: Settings) -> LanguageModel:
    layers = uniform_layers(s, hunyuan_attention(s), mlp(s, bias=False))
    return decoder(s, layers, NAMES, norm=rms(s, 1e-5))


def hunyuan_attention(s: Settings) -> Attention:
    s.only("use_cla", False)  # keys and values shared between layers
    return attention(s, qk_norm=QKNorm(rms(s, 1e-5), after_rotation=True))


def hunyuan_moe(s: Settings) -> LanguageModel:
    """Build Hunyuan with experts. Their number may differ by layer in files, but does not in
    published ones.
    """
    k, experts, shared = (
        _same(s, name, 1) for name in ("moe_topk", "num_experts", "num_shared_expert")
    )
    width = _same(s, "moe_intermediate_size", s.integer("intermediate_size"))
    mixture = softmax_mixture(
        s.changed(num_experts=experts, num_experts_per_tok=k, moe_intermediate_size=width),
        router=SoftmaxRouter(k, normalise=True),
        shared_width=s.integer("intermediate_size") * shared,
    )
    layers = uniform_layers(s, hunyuan_attention(s), mixture)
    return decoder(s, layers, NAMES, norm=rms(s, 1e-5))


def _same(s: Settings, name: str, default: int) -> int:
    """Return a number that the file may repeat for each layer."""
    listed = s.values.get(name)
    if not isinstance(listed, list):
        return s.integer(name, default=default, minimum=0)
    s.only(name, listed[:1] * len(listed))
    first = listed[0] if listed else default
    return s.changed(**{name: first}).integer(name, minimum=0)


def hy_v3(s: Settings) -> LanguageModel:
    """Build Hunyuan 3, with norms before rotation, and DeepSeek V3's router without groups."""
    for always in ("qk_norm", "route_norm", "moe_router_use_sigmoid"):
        s.only(always, True)
    s.only("moe_router_enable_expert_bias", True)
    s = s.filled(head_dim=128, num_key_value_heads=8, num_experts=192, num_experts_per_tok=8)
    norm = rms(s, 1e-5)
    usual = attention(s, rope=s.rope(theta=11_158_840.0), qk_norm=QKNorm(norm))
    shared = s.integer("num_shared_experts", default=1, minimum=0)
    width = s.integer("moe_intermediate_size", "expert_hidden_dim", default=1536)
    scale = s.number("router_scaling_factor", default=2.826)
    experts = softmax_mixture(
        s,
        router=SigmoidRouter(s.integer("num_experts_per_tok"), normalise=True, scale=scale),
        width=width,
        shared_width=width * shared,
    )
    dense = dense_by_type(s, s.integer("first_k_dense_replace", default=1, minimum=0))
    count = s.integer("num_hidden_layers")
    ahead = s.integer("num_nextn_predict_layers", default=1, minimum=0)
    names = Names(
        renamed={
            "router.gate": "gate",
            "expert_bias": "e_score_correction_bias",
            "shared_mlp": "shared_expert",
            "shared_experts": "shared_expert",
        },
        # The layers that guess several tokens ahead.
        unused=tuple(f"layers.{count + index}." for index in range(ahead)),
    )
    layers = with_dense(uniform_layers(s, usual, experts), mlp(s), dense)
    return decoder(s, layers, names, norm=norm)


def hy_v4(s: Settings) -> LanguageModel:
    """Build Hunyuan 4: latent attention to selected keys, between several residual streams."""
    s = s.filled(rms_norm_eps=1e-5, routed_scaling_factor=2.827, n_shared_experts=1)
    s = s.filled(num_experts_per_tok=8, moe_intermediate_size=768, rope_interleave=False)
    s = s.filled(index_topk_freq=4, index_skip_topk_offset=2)
    s.only("moe_layer_freq", 1)
    s.only("layer_types", ["indexed_attention"] * s.integer("num_hidden_layers"))
    norm = rms(s)
    usual = latent_attention(s)
    usual = replace(usual, gate_dim=usual.value_dim, sinks=True)
    indexer = Indexer(
        heads=s.integer("index_n_heads", default=16),
        dim=s.integer("index_head_dim", default=128),
        rotated_dim=usual.rotated_dim,
        halves=False,
        limit=s.integer("index_topk", default=2048),
        last=True,
        eps=norm.eps,
    )
    limit = max(s.number("swiglu_limit", default=10.0), 0.0)
    experts = sigmoid_mixture(s, limit=limit, inner_limit=True)
    first = s.integer("first_k_dense_replace", default=1, minimum=0)
    layers = indexed_layers(usual, indexer, choosing_layers(s), feed_forward=experts)
    streams = Streams(
        streams=s.integer("hc_mult", default=4),
        magnitude=s.number("hc_magnitude", default=2.0),
        eps=s.number("hc_eps", default=1e-6),
        norm_eps=norm.eps,
    )
    names = Names(
        renamed=EXPERT_PARTS | _STREAMS,
        unused=("mtp_layers.",),
        prepare=partial(_hy_v4_tensors, latents=usual, streams=streams.streams),
    )
    return decoder(
        s,
        with_dense(layers, mlp(s, bias=False), dense_by_type(s, first)),
        names,
        placement=NormPlacement.STREAMS,
        residuals=streams,
    )


_STREAMS = {
    "self_attn.learnable_sink_param": "self_attn.sinks",
    "self_attn.linear_gate": "self_attn.g_proj",
    "self_attn.gate_proj": "self_attn.g_proj",
    "hc_attn_layer": "attn_hc",
    "hc_attn_layer.hc_pre": "attn_hc",
    "hc_mlp_layer": "ffn_hc",
    "hc_mlp_layer.hc_pre": "ffn_hc",
    # As transformers 5.24 saves what it has read.
    "hc_pre.hc_attn_layer": "attn_hc",
    "hc_pre.hc_mlp_layer": "ffn_hc",
    "hc_pre.hc_head": "hc_head",
    "mlp.linear_gate": "mlp.gate_proj",
    "shared_experts.linear_gate": "shared_expert.gate_proj",
    **dict.fromkeys(("hc_fn", "hc_head_fn", "fn"), "mixing.weight"),
    **dict.fromkeys(("hc_base", "hc_head_base"), "base"),
    **dict.fromkeys(("hc_scale", "hc_head_scale"), "scale"),
}
_SCALE = re.compile(r".*(\.hc_\w+|_hc)\.(.*_)?scale")


def _hy_v4_tensors(weights: Weights, latents: LatentAttention, streams: int) -> Weights:
    """Split the latents' matrices, and repeat the scales of streams for each stream."""
    ready = latents.absorbed(weights)
    for name, array in ready.items():
        if _SCALE.fullmatch(name):
            outputs = streams if ".hc_head." in name else 2 * streams
            ready[name] = mx.repeat(array, outputs // array.size)
    return ready


FAMILIES = (
    Family("hunyuan_v1_dense", "Hunyuan 0.5B to 7B", hunyuan_dense),
    Family("hunyuan_v1_moe", "Hunyuan A13B", hunyuan_moe),
    Family("hy_v3", "Hunyuan 3", hy_v3),
    Family("hy_v4", "Hunyuan 4", hy_v4),
)
