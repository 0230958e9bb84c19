"""LFM2, dense and with experts (arXiv:2511.23404), and LFM3."""

from __future__ import annotations

from dataclasses import replace

from quire.models.base import LanguageModel
from quire.models.description import FeedForward, Layer, Mixer, Norm, NormPlacement
from quire.models.families.common import (
    Family,
    attention,
    by_type,
    channels_last,
    decoder,
    softmax_mixture,
    with_dense,
)
from quire.models.layers.attention import OutputGate, QKNorm
from quire.models.layers.feed_forward import MLP
from quire.models.layers.routers import SigmoidRouter
from quire.models.layers.short_conv import ShortConv
from quire.models.settings import FULL, SLIDING, Settings
from quire.models.weights.names import Names

CONV = "conv"

_PARTS = {
    "embedding_norm": "norm",
    "operator_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "feed_forward": "mlp",
    "w1": "gate_proj",
    "w2": "down_proj",
    "w3": "up_proj",
    "self_attn.out_proj": "self_attn.o_proj",
    "q_layernorm": "q_norm",
    "k_layernorm": "k_norm",
    "expert_bias": "e_score_correction_bias",
    "self_attn.gate_proj": "self_attn.g_proj",
}


def lfm2(s: Settings) -> LanguageModel:
    return _decoder(s, _layers(s, MLP(_width(s), "silu")))


def _width(s: Settings) -> int:
    """Return the width of the MLPs; the configuration states it before its reduction to two
    thirds.
    """
    width = s.integer("block_ff_dim", "intermediate_size")
    if not s.flag("block_auto_adjust_ff_dim", default=True):
        return width
    multiple = s.integer("block_multiple_of", default=256)
    width = int(s.positive("block_ffn_dim_multiplier", default=1.0) * int(2 * width / 3))
    return -(-width // multiple) * multiple


def lfm2_moe(s: Settings) -> LanguageModel:
    s.only("hidden_act", "silu")
    router = SigmoidRouter(
        k=s.integer("num_experts_per_tok", default=4),
        normalise=s.flag("norm_topk_prob", default=True),
        scale=s.number("routed_scaling_factor", default=1.0),
        corrected=s.flag("use_expert_bias", default=True),
    )
    s = s.filled(num_experts_per_tok=4)
    first, dense = (
        s.integer("num_dense_layers", default=2, minimum=0),
        s.integer("intermediate_size"),
    )
    layers = _layers(s, softmax_mixture(s, router=router))
    return _decoder(s, with_dense(layers, MLP(dense, "silu"), lambda index: index < first))


def _layers(s: Settings, block: FeedForward) -> tuple[Layer, ...]:
    count, norm = s.integer("num_hidden_layers"), _norm(s)
    listed = s.integers("full_attn_idxs") or range(count)
    usual = [FULL if index in listed else CONV for index in range(count)]
    types = s.layer_types(usual, (FULL, CONV))
    kernel, bias = s.integer("conv_L_cache", default=3), s.flag("conv_bias", default=False)
    full = attention(s, rope=s.rope(theta=1e6), qk_norm=QKNorm(norm), out_bias=False)
    mixers: dict[str, Mixer] = {
        FULL: replace(full, qkv_bias=False),
        CONV: ShortConv(s.integer("hidden_size"), kernel, bias),
    }
    return by_type(types, mixers, block)


def lfm3(s: Settings) -> LanguageModel:
    s = s.filled(head_dim=128, rope_parameters=_ROTATIONS)
    norm, gated = _norm(s), s.flag("use_attention_gate", default=True)
    full, sliding = s.rope_by_type(1e6, 1e4)
    gate = OutputGate(by_head=True) if gated else None
    seen = attention(s, rope=full, qk_norm=QKNorm(norm), own_gate=gate)
    width, kernel = s.integer("hidden_size"), s.integer("conv_L_cache", default=7)
    mixers: dict[str, Mixer] = {
        FULL: seen,
        SLIDING: replace(seen, rope=sliding, window=s.window(256)),
        CONV: ShortConv(width, kernel, s.flag("conv_bias", default=False)),
    }
    count = s.integer("num_hidden_layers")
    usual = [FULL if n % 4 == 2 else CONV if n % 4 or not n else SLIDING for n in range(count)]
    types = s.layer_types(usual, (FULL, SLIDING, CONV))
    layers = by_type(types, mixers, MLP(s.integer("intermediate_size"), "silu"))
    if s.flag("use_sandwich_norm", default=True):
        names = Names(renamed=_PARTS | _AROUND, prepare=channels_last)
        return decoder(s, layers, names, norm=norm, tied=True, placement=NormPlacement.SANDWICH)
    names = Names(renamed=_PARTS, prepare=channels_last)
    return decoder(s, layers, names, norm=norm, tied=True)


_ROTATIONS = {
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
}
_AROUND = {
    "post_operator_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffn_norm": "post_feedforward_layernorm",
}
"""Parts of names in models with norms before and after each block."""


def _norm(s: Settings) -> Norm:
    return Norm(s.number("norm_eps", default=1e-5, minimum=0.0))


def _decoder(s: Settings, layers: tuple[Layer, ...]) -> LanguageModel:
    tied = s.flag("tie_embedding", "tie_word_embeddings", default=True)
    names = Names(renamed=_PARTS, prepare=channels_last)
    return decoder(s, layers, names, norm=_norm(s), tied_head=tied)


FAMILIES = (
    Family("lfm2", "LFM2", lfm2),
    Family("lfm2_moe", "LFM2-8B-A1B", lfm2_moe),
    Family("lfm3", "LFM3", lfm3),
)
