"""DBRX."""

from __future__ import annotations

from functools import partial

import mlx.core as mx

from quire.core.values import require
from quire.models.base import LanguageModel
from quire.models.description import Norm
from quire.models.families.common import (
    Family,
    attention,
    decoder,
    query_key_value,
    softmax_mixture,
    uniform_layers,
)
from quire.models.settings import Settings
from quire.models.weights.names import Names, Weights


def dbrx(s: Settings) -> LanguageModel:
    """Build DBRX. Its settings of attention and of experts are objects of their own."""
    own, fed = s.nested("attn_config", needed=False), s.nested("ffn_config", needed=False)
    act = fed.nested("ffn_act_fn", needed=False).word("name", default="silu")
    require("ffn_config.ffn_act_fn.name", act, ("silu",))
    fed.only("moe_normalize_expert_weights", 1, None)
    clip = own.number("clip_qkv", minimum=0.0) if own.has("clip_qkv") else None
    s = s.filled(num_key_value_heads=own.integer("kv_n_heads", default=1))
    usual = attention(s, rope=s.rope(theta=own.number("rope_theta", default=1e4)), clip=clip)
    count = fed.integer("moe_num_experts", default=4)
    s = s.changed(
        num_experts=count,
        num_experts_per_tok=fed.integer("moe_top_k", default=1),
        norm_topk_prob=not fed.null("moe_normalize_expert_weights"),
    )
    experts = softmax_mixture(s, width=fed.integer("ffn_hidden_size", default=3584))
    names = Names(
        renamed=_PARTS,
        fused={"Wqkv": query_key_value(usual)},
        prepare=partial(_stacked, experts=count),
    )
    return decoder(s, uniform_layers(s, usual, experts), names, norm=Norm(1e-5, centred=True))


_PARTS = {
    "model.transformer": "model",
    "blocks": "layers",
    "wte": "embed_tokens",
    "norm_f": "norm",
    "norm_attn_norm.norm_1": "input_layernorm",
    "norm_attn_norm.norm_2": "post_attention_layernorm",
    "norm_attn_norm.attn": "self_attn",
    "norm_attn_norm.attn.out_proj": "self_attn.o_proj",
    "ffn": "mlp",
    "ffn.router.layer": "mlp.gate",
}


def _stacked(weights: Weights, experts: int) -> Weights:
    """Convert published experts, whose rows are joined, and mlx-lm's, with a tensor for each."""
    parts = {"w1": "gate_proj", "v1": "up_proj", "w2": "down_proj"}
    ready: Weights = {}
    for name, array in weights.items():
        path, found, part = name.partition(".experts.mlp.")
        if found:
            stacked = array.reshape(experts, -1, array.shape[-1])  # [experts, width, hidden]
            if part == "w2":
                stacked = stacked.swapaxes(-1, -2)
            ready[f"{path}.experts.{parts[part]}.weight"] = mx.contiguous(stacked)
            continue
        *before, part, kind = name.split(".")
        ready[".".join([*before, parts.get(part, part), kind])] = array
    return ready


FAMILIES = (Family("dbrx", "DBRX", dbrx),)
