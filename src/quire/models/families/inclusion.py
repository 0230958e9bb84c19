"""Ling and Ring, the first generation (arXiv:2503.05139)."""

from __future__ import annotations

from quire.models.base import LanguageModel
from quire.models.families.common import (
    Family,
    attention,
    decoder,
    mlp,
    query_key_value,
    rms,
    softmax_mixture,
    uniform_layers,
    with_dense,
)
from quire.models.names import Names
from quire.models.settings import Settings


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


FAMILIES = (Family("bailing_moe", "Ling, Ring (first generation)", bailing_moe),)
