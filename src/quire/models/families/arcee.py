"""Arcee's models: AFM-4.5B, and Trinity, which has experts."""

from __future__ import annotations

from dataclasses import replace

from quire.models.base import LanguageModel
from quire.models.description import Mixer, NormPlacement
from quire.models.families.common import (
    Family,
    activation,
    attention,
    by_type,
    decoder,
    full_every,
    mlp,
    rms,
    softmax_mixture,
    uniform_layers,
    with_dense,
)
from quire.models.layers.attention import OutputGate, QKNorm
from quire.models.layers.routers import SigmoidRouter
from quire.models.settings import FULL, SLIDING, Settings
from quire.models.weights.names import Names


def arcee(s: Settings) -> LanguageModel:
    block = mlp(s, gated=False, activation=activation(s, "relu2"))
    return decoder(s, uniform_layers(s, attention(s), block), norm=rms(s, 1e-5))


def afmoe(s: Settings) -> LanguageModel:
    """Build Trinity. Only sliding layers rotate; the output of attention is gated."""
    s.only("route_norm", True)
    s.only("score_func", "sigmoid")
    for groups in ("n_group", "topk_group", "num_expert_groups", "num_limited_groups"):
        s.only(groups, 1)
    s = s.filled(head_dim=128, num_experts=64, num_experts_per_tok=6)
    norm = rms(s, 1e-5)
    usual = attention(s, qk_norm=QKNorm(norm), own_gate=OutputGate())
    mixers: dict[str, Mixer] = {
        FULL: replace(usual, rope=None),
        SLIDING: replace(usual, window=s.window(1024)),
    }
    types = s.layer_types(full_every(s, s.integer("global_attn_every_n_layers", default=4)))
    scale = s.number("route_scale", default=1.0)
    shared = s.integer("num_shared_experts", default=2, minimum=0)
    experts = softmax_mixture(
        s,
        router=SigmoidRouter(s.integer("num_experts_per_tok"), normalise=True, scale=scale),
        shared_width=s.integer("moe_intermediate_size") * shared,
    )
    dense = s.integer("num_dense_layers", default=1, minimum=0)
    layers = with_dense(by_type(types, mixers, experts), mlp(s, bias=False), lambda i: i < dense)
    scaled = s.flag("mup_enabled", default=False)
    return decoder(
        s,
        layers,
        Names(renamed=_PARTS),
        norm=norm,
        placement=NormPlacement.SANDWICH,
        embedding_multiplier=s.integer("hidden_size") ** 0.5 if scaled else 1.0,
    )


_PARTS = {
    "self_attn.gate_proj": "self_attn.g_proj",
    "pre_mlp_layernorm": "pre_feedforward_layernorm",
    "post_mlp_layernorm": "post_feedforward_layernorm",
    "router.gate": "gate",
    "expert_bias": "e_score_correction_bias",
    "shared_experts": "shared_expert",
}


FAMILIES = (
    Family("arcee", "AFM-4.5B", arcee),
    Family("afmoe", "Trinity", afmoe),
)
