"""DeepSeek V2 to V3.2 (arXiv:2405.04434, arXiv:2412.19437, arXiv:2512.02556) and its heirs.

Kimi K2 (arXiv:2507.20534) and GLM-5 (arXiv:2602.15763) among them.
"""

from __future__ import annotations

import math
from dataclasses import replace

from quire.models.base import LanguageModel
from quire.models.description import FeedForward, Layer
from quire.models.families.common import (
    CORRECTION,
    Family,
    alike,
    decoder,
    mlp,
    sigmoid_mixture,
    softmax_mixture,
    with_dense,
)
from quire.models.latent_attention import LatentAttention
from quire.models.names import Names
from quire.models.rope import RopeParameters
from quire.models.routers import SoftmaxRouter
from quire.models.settings import Settings


def deepseek_v2(s: Settings) -> LanguageModel:
    s.only("topk_method", "greedy", "group_limited_greedy")
    s.only("norm_topk_prob", False)
    s.only("moe_layer_freq", 1)
    groups = s.values.get("topk_method") == "group_limited_greedy"
    router = SoftmaxRouter(
        s.integer("num_experts_per_tok"),
        normalise=False,
        scale=s.number("routed_scaling_factor", default=1.0),
        groups=s.integer("n_group", default=1) if groups else 1,
        best_groups=s.integer("topk_group", default=1) if groups else 1,
    )
    shared = s.integer("moe_intermediate_size") * s.integer("n_shared_experts", default=2)
    experts = softmax_mixture(
        s.changed(num_experts=s.integer("n_routed_experts")), router=router, shared_width=shared
    )
    first = s.integer("first_k_dense_replace", default=0)
    return _decoder(s, latent_attention(s), experts, first)


def deepseek_v3(s: Settings) -> LanguageModel:
    s.only("moe_layer_freq", 1)
    s = s.filled(n_group=8, topk_group=4, routed_scaling_factor=2.5, n_shared_experts=1)
    first = s.integer("first_k_dense_replace", default=3)
    return _decoder(s, latent_attention(s), sigmoid_mixture(s), first)


def glm_moe_dsa(s: Settings) -> LanguageModel:
    s = s.filled(routed_scaling_factor=2.5, n_shared_experts=1, rms_norm_eps=1e-5)
    first, count = s.integer("first_k_dense_replace", default=3), s.integer("num_hidden_layers")
    first = min(first, count)
    s.only("mlp_layer_types", ["dense"] * first + ["sparse"] * (count - first))
    return _decoder(s, latent_attention(s), sigmoid_mixture(s), first, _indexers(s))


def deepseek_v32(s: Settings) -> LanguageModel:
    return glm_moe_dsa(s.filled(n_group=8, topk_group=4, rms_norm_eps=1e-6))


def _indexers(s: Settings) -> tuple[str, ...]:
    """What chooses keys where there are more than it chooses; see `sparse_context`."""
    return tuple(f"layers.{i}.self_attn.indexer." for i in range(s.integer("num_hidden_layers")))


def sparse_context(s: Settings) -> int:
    """Tokens of which no query leaves one out.

    An indexer chooses `index_topk` keys for each query (DeepSeek V3.2, arXiv:2512.02556). Up to so
    many tokens it chooses all. What lies beyond is not served.
    """
    return min(s.integer("index_topk", default=2048), s.integer("max_position_embeddings"))


def glm4_moe_lite(s: Settings) -> LanguageModel:
    s = s.filled(routed_scaling_factor=1.8, n_shared_experts=1)
    s.only("mlp_layer_types", ["dense"] + ["sparse"] * (s.integer("num_hidden_layers") - 1))
    first = s.integer("first_k_dense_replace", default=1)
    return _decoder(s, latent_attention(s), sigmoid_mixture(s), first)


def latent_attention(s: Settings) -> LatentAttention:
    """Attention by the keys that DeepSeek introduced."""
    plain, rotated = s.integer("qk_nope_head_dim"), s.integer("qk_rope_head_dim")
    interleaved = s.flag("rope_interleave", default=True)
    rope = replace(s.rope(), interleaved=interleaved)
    return LatentAttention(
        heads=s.integer("num_attention_heads"),
        plain_dim=plain,
        rotated_dim=rotated,
        value_dim=s.integer("v_head_dim"),
        latent_dim=s.integer("kv_lora_rank"),
        query_latent_dim=s.integer("q_lora_rank") if s.has("q_lora_rank") else None,
        scale=(plain + rotated) ** -0.5 * _stretched(rope),
        rope=rope,
        bias=s.flag("attention_bias", default=False),
    )


def _stretched(rope: RopeParameters) -> float:
    """What multiplies the logits where the context was stretched."""
    if rope.rope_type == "default" or not rope.mscale_all_dim or rope.factor <= 1:
        return 1.0
    return (0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0) ** 2


def _decoder(
    s: Settings,
    kind: LatentAttention,
    experts: FeedForward,
    first: int,
    unused: tuple[str, ...] = (),
) -> LanguageModel:
    layers: tuple[Layer, ...] = alike(s, kind, experts)
    count, ahead = len(layers), s.integer("num_nextn_predict_layers", "num_mtp_layers", default=1)
    names = Names(
        renamed=CORRECTION | {"shared_experts": "shared_expert"},
        # The layers that guess several tokens ahead.
        unused=tuple(f"layers.{count + index}." for index in range(ahead)) + unused,
        prepare=kind.absorbed,
    )
    dense = mlp(s, bias=False)
    return decoder(s, with_dense(layers, dense, lambda index: index < first), names)


FAMILIES = (
    Family("deepseek_v2", "DeepSeek V2, V2.5, Coder V2", deepseek_v2),
    Family("deepseek_v3", "DeepSeek V3, R1, V3.1", deepseek_v3),
    Family(
        "deepseek_v32", "DeepSeek V3.2, up to `index_topk` tokens", deepseek_v32, sparse_context
    ),
    Family("glm_moe_dsa", "GLM-5, up to `index_topk` tokens", glm_moe_dsa, sparse_context),
    Family("kimi_k2", "Kimi K2", deepseek_v3),
    Family("glm4_moe_lite", "GLM-4.7 Flash", glm4_moe_lite),
)
