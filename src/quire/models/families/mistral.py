"""Mistral (arXiv:2310.06825), Mixtral (arXiv:2401.04088), Ministral and Mistral Small 4."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.core.values import require
from quire.models.base import LanguageModel
from quire.models.families.common import (
    Family,
    attention,
    by_type,
    decoder,
    mlp,
    rms,
    softmax_mixture,
    text_of,
    uniform_layers,
    windows,
)
from quire.models.families.deepseek import latent_attention, latent_decoder
from quire.models.layers.attention import Temperature
from quire.models.layers.routers import SoftmaxRouter
from quire.models.settings import FULL, SLIDING, Settings
from quire.models.weights.names import Names

_UNUSED = ("vision_tower.", "multi_modal_projector.", "vision_encoder.", "patch_merger.")


def mistral(s: Settings) -> LanguageModel:
    windowed = replace(attention(s, qkv_bias=False, out_bias=False), window=s.window(4096))
    return decoder(s, uniform_layers(s, windowed, mlp(s, bias=False)))


def mixtral(s: Settings) -> LanguageModel:
    s = s.filled(num_experts_per_tok=2)
    router = SoftmaxRouter(s.integer("num_experts_per_tok"), normalise=True)
    usual = attention(s, window=s.window(), rope=s.rope(theta=1e6))
    layers = uniform_layers(
        s, usual, softmax_mixture(s, width=s.integer("intermediate_size"), router=router)
    )
    parts = {"block_sparse_moe": "mlp", "w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
    return decoder(s, layers, Names(renamed=parts), norm=rms(s, 1e-5))


def ministral(s: Settings) -> LanguageModel:
    usual = attention(s, qkv_bias=False, out_bias=False)
    kind = FULL if s.window(4096) is None else SLIDING
    types = s.layer_types([kind] * s.integer("num_hidden_layers"))
    return decoder(s, by_type(types, windows(s, usual, 4096), mlp(s, bias=False)))


def ministral3(s: Settings) -> LanguageModel:
    """Build Ministral 3, whose queries are scaled by position beyond the trained context (YaRN)."""
    stretched = s.scaling().filled(**_YARN)
    s = s.changed(rope_parameters=stretched.values, rope_scaling=None)
    temperature = _temperature(stretched)
    usual = attention(s, qkv_bias=False, out_bias=False, window=s.window(), temperature=temperature)
    return decoder(
        s, uniform_layers(s, usual, mlp(s, bias=False)), Names(unused=_UNUSED), norm=rms(s, 1e-5)
    )


def _temperature(stretched: Settings) -> Temperature:
    """Return the temperature of the rotary settings."""
    return Temperature(
        stretched.number("llama_4_scaling_beta"),
        stretched.integer("original_max_position_embeddings"),
    )


_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
"""Ministral 3's rotary settings, if the configuration gives none."""


def mistral4(s: Settings) -> LanguageModel:
    """Build Mistral Small 4: DeepSeek's latent attention and experts, with a softmax router and
    Ministral 3's temperature.
    """
    s = s.filled(**_MISTRAL4)
    stretched = s.scaling()
    if not stretched.values:
        stretched = s.like(_MISTRAL4_YARN)
    plain, rotated = s.integer("qk_nope_head_dim"), s.integer("qk_rope_head_dim")
    # The rotated share of a head follows from the sizes of its parts.
    stretched.only("partial_rotary_factor", rotated / (plain + rotated))
    values = stretched.values | {"partial_rotary_factor": None}
    s = s.changed(rope_parameters=values, rope_scaling=None)
    kind = replace(latent_attention(s), temperature=_temperature(stretched))
    groups = s.integer("n_group")
    require("n_routed_experts % n_group", s.integer("n_routed_experts") % groups, (0,))
    router = SoftmaxRouter(
        s.integer("num_experts_per_tok"),
        normalise=s.flag("norm_topk_prob"),
        scale=s.number("routed_scaling_factor"),
        groups=groups,
        best_groups=s.integer("topk_group"),
        counted=2,
    )
    experts = softmax_mixture(
        s.changed(num_experts=s.integer("n_routed_experts")),
        router=router,
        shared_width=s.integer("moe_intermediate_size") * s.integer("n_shared_experts", minimum=0),
    )
    first = s.integer("first_k_dense_replace", minimum=0)
    return latent_decoder(s, kind, uniform_layers(s, kind, experts), first=first, unused=_UNUSED)


_MISTRAL4: dict[str, Any] = {
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": True,
    "num_experts_per_tok": 4,
    "first_k_dense_replace": 0,
}
_MISTRAL4_YARN = _YARN | {
    "rope_theta": 1e4,
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
}
"""Mistral Small 4's rotary settings, if the configuration gives none."""


def mistral3_text(s: Settings) -> LanguageModel:
    """Build the text decoder of Mistral Small 3.1 to 4 and of Ministral 3."""
    text = text_of(s)
    text.only("model_type", "mistral", "ministral3", "mistral4")
    others = {"ministral3": ministral3, "mistral4": mistral4}
    if other := others.get(text.word("model_type", default="mistral")):
        return other(text)
    windowed = replace(attention(text, qkv_bias=False, out_bias=False), window=text.window(4096))
    return decoder(
        text, uniform_layers(text, windowed, mlp(text, bias=False)), Names(unused=_UNUSED)
    )


FAMILIES = (
    Family("mistral", "Mistral, Mistral Nemo, Mistral Small 2 and 3", mistral),
    Family("mixtral", "Mixtral", mixtral),
    Family("ministral", "Ministral", ministral),
    Family("ministral3", "Ministral 3, text", ministral3),
    Family("mistral4", "Mistral Small 4, text", mistral4),
)
