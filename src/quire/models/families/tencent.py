"""Hunyuan, dense and with experts, and Hunyuan 3."""

from __future__ import annotations

from quire.models.base import LanguageModel
from quire.models.families.common import (
    Family,
    attention,
    decoder,
    dense_by_type,
    mlp,
    rms,
    softmax_mixture,
    uniform_layers,
    with_dense,
)
from quire.models.layers.attention import Attention, QKNorm
from quire.models.layers.routers import SigmoidRouter, SoftmaxRouter
from quire.models.settings import Settings
from quire.models.weights.names import Names

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


FAMILIES = (
    Family("hunyuan_v1_dense", "Hunyuan 0.5B to 7B", hunyuan_dense),
    Family("hunyuan_v1_moe", "Hunyuan A13B", hunyuan_moe),
    Family("hy_v3", "Hunyuan 3", hy_v3),
)
