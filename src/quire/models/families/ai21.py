"""Jamba (arXiv:2403.19887, arXiv:2408.12570): state space layers, attention without positions,
experts.
"""

from __future__ import annotations

from dataclasses import replace

from quire.models.base import LanguageModel
from quire.models.description import FeedForward, Layer, Mixer
from quire.models.families.common import (
    Family,
    attention,
    channels_last,
    decoder,
    mlp,
    rms,
    softmax_mixture,
)
from quire.models.layers.mamba import Mamba
from quire.models.layers.routers import SoftmaxRouter
from quire.models.settings import Settings
from quire.models.weights.names import Names

_PARTS = {
    "feed_forward": "mlp",
    "pre_ff_layernorm": "post_attention_layernorm",
    "final_layernorm": "norm",
    "router": "gate",
}


def jamba(s: Settings) -> LanguageModel:
    every, at = (
        s.integer("attn_layer_period", default=8),
        s.integer("attn_layer_offset", default=4, minimum=0),
    )
    attends = replace(attention(s, qkv_bias=False, out_bias=False), rope=None)
    mixers: tuple[Mixer, Mixer] = (_state_space(s), attends)
    blocks = _blocks(s)
    period = s.integer("expert_layer_period", default=2)
    first = s.integer("expert_layer_offset", default=1, minimum=0)
    layers = tuple(
        Layer((mixers[index % every == at],), blocks[index % period == first])
        for index in range(s.integer("num_hidden_layers"))
    )
    return decoder(s, layers, Names(renamed=_PARTS, prepare=channels_last))


def _blocks(s: Settings) -> tuple[FeedForward, FeedForward]:
    """Return the feed-forward blocks of dense layers, and of layers with experts."""
    dense = mlp(s, bias=False)
    if s.integer("num_experts", "num_local_experts", default=16) == 1:
        return dense, dense
    s = s.filled(num_experts=16)
    router = SoftmaxRouter(s.integer("num_experts_per_tok", default=2), normalise=False)
    width = s.integer("intermediate_size")
    return dense, softmax_mixture(s.filled(num_experts_per_tok=2), width=width, router=router)


def _state_space(s: Settings) -> Mamba:
    s.only("hidden_act", "silu")
    hidden = s.integer("hidden_size")
    if s.values.get("mamba_dt_rank") in (None, "auto"):
        s = s.changed(mamba_dt_rank=-(-hidden // 16))
    return Mamba(
        channels=s.integer("mamba_expand", default=2) * hidden,
        state_dim=s.integer("mamba_d_state", default=16),
        step_rank=s.integer("mamba_dt_rank"),
        kernel=s.integer("mamba_d_conv", default=4),
        norm=rms(s),
        conv_bias=s.flag("mamba_conv_bias", default=True),
        bias=s.flag("mamba_proj_bias", default=False),
    )


FAMILIES = (Family("jamba", "Jamba", jamba),)
