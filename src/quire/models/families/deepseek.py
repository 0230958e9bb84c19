"""DeepSeek V2 to V3.2 (arXiv:2405.04434, arXiv:2412.19437, arXiv:2512.02556) and successors.

Kimi K2 (arXiv:2507.20534) and GLM-5 (arXiv:2602.15763) are among these.
"""

from __future__ import annotations

import math
from dataclasses import replace

from quire.core.errors import ModelError
from quire.core.values import require
from quire.models.base import LanguageModel
from quire.models.decoder import DecoderModel
from quire.models.description import Description, FeedForward, Layer
from quire.models.families.common import (
    EXPERT_PARTS,
    Family,
    attention,
    decoder,
    dense_by_type,
    described,
    extra_layer,
    mlp,
    sigmoid_mixture,
    softmax_mixture,
    uniform_layers,
    with_dense,
)
from quire.models.layers.indexer import Indexer
from quire.models.layers.latent_attention import LatentAttention
from quire.models.layers.rope import RopeParameters
from quire.models.layers.routers import SoftmaxRouter
from quire.models.settings import Settings
from quire.models.weights.names import Names


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
    shared = s.integer("moe_intermediate_size") * s.integer(
        "n_shared_experts", default=2, minimum=0
    )
    experts = softmax_mixture(
        s.changed(num_experts=s.integer("n_routed_experts")), router=router, shared_width=shared
    )
    first = s.integer("first_k_dense_replace", default=0, minimum=0)
    if not s.flag("use_mla", default=True):
        layers = uniform_layers(s, attention(s), experts)
        layers = with_dense(layers, mlp(s, bias=False), dense_by_type(s, first))
        return decoder(s, layers, Names(renamed=EXPERT_PARTS))
    kind = latent_attention(s)
    return latent_decoder(s, kind, uniform_layers(s, kind, experts), first=first)


def deepseek(s: Settings) -> LanguageModel:
    """Build DeepSeek MoE (arXiv:2401.06066): DeepSeek V2 with the usual attention."""
    s.only("scoring_func", "softmax")
    return deepseek_v2(s.filled(n_shared_experts=0).changed(use_mla=False))


def deepseek_v3(s: Settings) -> LanguageModel:
    return DecoderModel(*deepseek_v3_described(s))


def deepseek_v3_described(s: Settings, unused: tuple[str, ...] = ()) -> tuple[Description, Names]:
    """Describe DeepSeek V3's decoder. For `unused`, see `Names`."""
    s.only("moe_layer_freq", 1)
    s = s.filled(n_group=8, topk_group=4, routed_scaling_factor=2.5, n_shared_experts=1)
    kind, first = latent_attention(s), s.integer("first_k_dense_replace", default=3, minimum=0)
    return latent_described(
        s, kind, uniform_layers(s, kind, sigmoid_mixture(s)), first=first, unused=unused
    )


def glm_moe_dsa(s: Settings) -> LanguageModel:
    s = s.filled(routed_scaling_factor=2.5, n_shared_experts=1, rms_norm_eps=1e-5)
    s = s.filled(index_n_heads=32, indexer_rope_interleave=True)
    return _sparse(s, choosing_layers(s))


def deepseek_v32(s: Settings) -> LanguageModel:
    s = s.filled(n_group=8, topk_group=4, routed_scaling_factor=2.5, n_shared_experts=1)
    s = s.filled(index_n_heads=64, indexer_rope_interleave=False)
    return _sparse(s, (True,) * s.integer("num_hidden_layers"))


def _sparse(s: Settings, choosing: tuple[bool, ...]) -> LanguageModel:
    """Build a decoder whose queries attend to keys selected by an indexer.

    Args:
        choosing: whether each layer has an indexer; the others use the keys selected by the last
            layer before them that has one (arXiv:2603.12201).
    """
    first, count = (
        s.integer("first_k_dense_replace", default=3, minimum=0),
        s.integer("num_hidden_layers"),
    )
    first = min(first, count)
    s.only("mlp_layer_types", ["dense"] * first + ["sparse"] * (count - first))
    usual, experts = latent_attention(s), sigmoid_mixture(s)
    indexer = Indexer(
        heads=s.integer("index_n_heads"),
        dim=s.integer("index_head_dim", default=128),
        rotated_dim=usual.rotated_dim,
        halves=s.flag("rope_interleave", default=True) and not s.flag("indexer_rope_interleave"),
        limit=s.integer("index_topk", default=2048),
    )
    layers = indexed_layers(usual, indexer, choosing, feed_forward=experts)
    return latent_decoder(s, usual, layers, first=first)


def indexed_layers(
    usual: LatentAttention,
    indexer: Indexer,
    choosing: tuple[bool, ...],
    feed_forward: FeedForward,
) -> tuple[Layer, ...]:
    """Return layers whose queries attend to selected keys. For `choosing`, see `_sparse`."""
    layers = []
    last = 0
    for index, chooses in enumerate(choosing):
        last = index if chooses else last
        kind = replace(usual, indexer=indexer) if chooses else replace(usual, chosen_by=last)
        layers.append(Layer((kind,), feed_forward))
    return tuple(layers)


def choosing_layers(s: Settings) -> tuple[bool, ...]:
    """Return whether each layer has an indexer.

    Raises:
        ModelError: a type is unknown, their number is not that of the layers, or the first layer
            has no indexer.
    """
    count = s.integer("num_hidden_layers")
    if s.has("indexer_types"):
        types = s.names("indexer_types")
    elif s.has("index_topk_pattern"):
        short = {"F": "full", "S": "shared"}
        types = tuple(short.get(each, each) for each in s.word("index_topk_pattern"))
    else:
        every = max(s.integer("index_topk_freq", default=1, minimum=0), 1)
        offset = s.integer("index_skip_topk_offset", default=2, minimum=0)
        full = [max(index - offset + 1, 0) % every == 0 for index in range(count)]
        types = tuple("full" if each else "shared" for each in full)
    for each in types:
        require("indexer_types", each, ("full", "shared"))
    if len(types) != count or types[:1] != ("full",):
        raise ModelError(f"config.json: indexer_types for {count} layers, the first of them full")
    return tuple(each == "full" for each in types)


def glm4_moe_lite(s: Settings) -> LanguageModel:
    s = s.filled(routed_scaling_factor=1.8, n_shared_experts=1, rms_norm_eps=1e-5)
    s.only("mlp_layer_types", ["dense"] + ["sparse"] * (s.integer("num_hidden_layers") - 1))
    kind, first = latent_attention(s), s.integer("first_k_dense_replace", default=1, minimum=0)
    return latent_decoder(s, kind, uniform_layers(s, kind, sigmoid_mixture(s)), first=first)


def latent_attention(s: Settings) -> LatentAttention:
    """Describe latent attention by the keys that DeepSeek introduced."""
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
    """Return the factor of the logits for an extended context."""
    if rope.rope_type == "default" or not rope.mscale_all_dim or rope.factor <= 1:
        return 1.0
    return (0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0) ** 2


def latent_described(
    s: Settings,
    kind: LatentAttention,
    layers: tuple[Layer, ...],
    first: int,
    unused: tuple[str, ...] = (),
) -> tuple[Description, Names]:
    """Describe a decoder whose first layers have a dense block instead of experts. For `unused`,
    see `Names`.
    """
    count, ahead = (
        len(layers),
        s.integer("num_nextn_predict_layers", "num_mtp_layers", default=1, minimum=0),
    )
    names = Names(
        renamed=EXPERT_PARTS,
        # The layers that guess several tokens ahead.
        unused=unused + tuple(f"layers.{count + index}." for index in range(ahead)),
        prepare=kind.absorbed,
        heads=tuple(extra_layer(count + index) for index in range(ahead)),
    )
    dense = mlp(s, bias=False)
    decoder_layers = with_dense(layers, dense, lambda index: index < first)
    return described(s, decoder_layers, ahead=layers[0]), names


def latent_decoder(
    s: Settings,
    kind: LatentAttention,
    layers: tuple[Layer, ...],
    first: int,
    unused: tuple[str, ...] = (),
) -> LanguageModel:
    """Build the model of a `latent_described` decoder."""
    return DecoderModel(*latent_described(s, kind, layers, first=first, unused=unused))


FAMILIES = (
    Family("deepseek", "DeepSeek MoE 16B", deepseek),
    Family("deepseek_v2", "DeepSeek V2, V2.5, Coder V2", deepseek_v2),
    Family("deepseek_v3", "DeepSeek V3, R1, V3.1", deepseek_v3),
    Family("deepseek_v32", "DeepSeek V3.2", deepseek_v32),
    Family("glm_moe_dsa", "GLM-5", glm_moe_dsa),
    Family("joyai_llm_flash", "JoyAI-LLM Flash", deepseek_v3),
    Family("kimi_k2", "Kimi K2", deepseek_v3),
    Family("glm4_moe_lite", "GLM-4.7 Flash", glm4_moe_lite),
)
