"""Sarvam 30B and 105B: the decoders of GLM-4.5 and of DeepSeek V3 with other defaults."""

from __future__ import annotations

from typing import Any

from quire.models.base import LanguageModel
from quire.models.decoder import DecoderModel
from quire.models.families.common import EXPERT_PARTS, Family, query_key_value
from quire.models.families.deepseek import deepseek_v3
from quire.models.families.moonshot import PUBLISHED_KEYS
from quire.models.families.zhipu import glm4_moe_described
from quire.models.layers.attention import Attention
from quire.models.settings import Settings
from quire.models.weights.names import Names


def sarvam_moe(s: Settings) -> LanguageModel:
    s = _renamed(s).filled(rms_norm_eps=1e-6, rope_theta=8e6, num_key_value_heads=4, head_dim=64)
    s = s.filled(num_experts_per_tok=6, routed_scaling_factor=2.5, moe_intermediate_size=1024)
    s = s.filled(use_qk_norm=True, partial_rotary_factor=1.0)
    description = glm4_moe_described(s)
    (mixer,) = description.layers[0].mixers
    assert isinstance(mixer, Attention), "the decoder of GLM-4.5"
    fused = {"query_key_value": query_key_value(mixer)}
    return DecoderModel(description, Names(renamed=EXPERT_PARTS | _PARTS, fused=fused))


def sarvam_mla(s: Settings) -> LanguageModel:
    s = _renamed(s).filled(n_group=1, topk_group=1, first_k_dense_replace=1)
    scaling = dict(s.scaling().values)
    if "deepseek_yarn" in (scaling.pop("type", None), scaling.get("rope_type")):  # another name
        s = s.changed(rope_scaling=scaling | {"rope_type": "yarn"})
    return deepseek_v3(s)


def _renamed(s: Settings) -> Settings:
    """Return the settings by the usual keys. Published files have no layers that guess ahead."""
    given: dict[str, Any] = {
        ours: s.value(key) for key, ours in PUBLISHED_KEYS.items() if s.has(key)
    }
    if s.has("use_qkv_bias"):
        given["attention_bias"] = s.flag("use_qkv_bias")
    return s.filled(**given).filled(num_nextn_predict_layers=0)


_PARTS = {
    "word_embeddings": "embed_tokens",
    "attention": "self_attn",
    "attention.dense": "self_attn.o_proj",
    "attention.query_layernorm": "self_attn.q_norm",
    "attention.key_layernorm": "self_attn.k_norm",
    "gate.expert_bias": "e_score_correction_bias",
}
"""Names of tensors that Sarvam 30B was published with."""

FAMILIES = (
    Family("sarvam_mla", "Sarvam 105B", sarvam_mla),
    Family("sarvam_moe", "Sarvam 30B", sarvam_moe),
)
